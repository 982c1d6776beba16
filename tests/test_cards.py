"""Model cards: every fact comes from a file of the model."""

import contextlib
import io
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from card_runs import (
    FIXTURES,
    ROOT,
    RUN,
    SAMPLE,
    SCORES,
    SEVERAL_SEEDS,
    SIGNATURE,
    assert_every_score_stands_in_its_file,
    metadata,
    python_blocks,
    text_of,
    write_json,
)
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM
from vaswani.hub_cards import card as cards
from vaswani.hub_cards import sibling_card
from vaswani.hub_cards.card import may_be_written, write_model_card
from vaswani.hub_cards.results import read_results
from vaswani.hub_cards.saved_model import SavedModel
from vaswani.training.circumstances import weights_sha256

from vaswani import VaswaniTokenizer

bare, run, warnings = FIXTURES


# Numbers


def test_every_score_of_a_card_stands_in_the_file_it_names(run):
    report = write_json(Path("elsewhere/three-seeds.json"), SEVERAL_SEEDS)
    rows = assert_every_score_stands_in_its_file(write_model_card(run, report))
    shown = {(data, metric): (value, beams) for data, metric, value, beams, _, _ in rows}
    assert shown == {
        ("data/test.tok", "BLEU"): ("36.82", "4"),
        ("data/test.tok", "chrF"): ("61.07", "4"),
        ("data/test.tok", "compound-split BLEU"): ("37.40", "4"),
        ("data/test.tok", "exactly right, %"): ("12.30", "4"),
        ("data/test.tok", "right among the best 2, %"): ("18.25", "4"),
        ("data/valid.tok", "BLEU, greedy search"): ("35.36", "1"),
        ("data/valid.tok", "perplexity"): ("7.20", ""),
        ("test set of numbers", "BLEU, mean of 2 seeds"): ("36.85 ± 0.07", "4"),
    }
    signatures = {row[1]: row[4].replace("\\|", "|") for row in rows}
    assert signatures["BLEU"] == signatures["BLEU, mean of 2 seeds"] == f"`{SIGNATURE}`"


def test_the_training_run_is_told_as_its_file_has_it(run):
    text = text_of(run)
    for words in (
        "| data | data/train.tok |",
        "| pairs | 29,000 |",
        "| updates | 6,538 |",
        "| time | 29.5 minutes |",
        "| hardware | Some CPU, 2 cores |",
        "| versions | python 3.11.7, torch 2.13.0 |",
        "| date, commit | 2026-01-31, `abc1234` |",
        "python train.py --steps 6538",
        "steps: 6538\nwarmup: 800",
        '"learning_rate": 0.00417',
        "after 6,538 updates, the validation loss was 1.974 nats",
        "4 beams and a length penalty of ((5 + length) / 6)^0.6",
        "| `d_model` | 32 | 512 |",
        "one vocabulary of 340 byte pairs",
        "| a \\| b | &lt;i&gt;c&lt;/i&gt; |",
    ):
        assert words in text, words
    parameters = AutoModelForSeq2SeqLM.from_pretrained(run).num_parameters()
    assert f"{parameters:,} parameters" in text
    assert weights_sha256(run) in text


def test_a_resumed_run_says_that_its_minutes_are_not_all(run):
    write_json(run / "results.json", {**RUN, "resumed": True})
    assert "| time | 29.5 minutes since it was last resumed |" in text_of(run)


def test_a_copy_of_a_results_file_adds_nothing(run):
    copy = shutil.copyfile(run / "results.json", "numbers.json")
    once = text_of(run)
    assert text_of(run, results=[copy, copy]) == once
    assert not (run / "results").exists()


def test_two_results_files_of_one_name_are_refused(run):
    one = write_json(Path("one/seeds.json"), SEVERAL_SEEDS)
    other = write_json(Path("other/seeds.json"), {**SEVERAL_SEEDS, "recipe": "other"})
    with pytest.raises(ValueError, match=r"one/seeds\.json and other/seeds\.json would both be"):
        write_model_card(run, [one, other])
    assert not (run / "README.md").exists()


@pytest.mark.parametrize("number", [36.82, {"bleu": 36.82}, [36.82], [{"test": SCORES}]])
def test_a_number_without_a_file_cannot_enter(run, number):
    with pytest.raises(TypeError, match="Write the number to a JSON file"):
        write_model_card(run, number)
    assert not (run / "README.md").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, r"There is no results file elsewhere/results\.json"),
        ("36.82 BLEU", "is not a results file: it is not JSON"),
        (json.dumps(36.82), "has no command, commit, hardware, versions, date"),
        (json.dumps({"test": SCORES}), "has no command, commit, hardware, versions, date"),
        (json.dumps({**RUN, "commit": ""}), "has no commit"),
        (json.dumps({**RUN, "hardware": "fast"}), "has no hardware"),
        (json.dumps({**RUN, "parameters": 65_000_000}), "is of a model of 65,000,000 parameters"),
        (json.dumps({**RUN, "weights_sha256": "0" * 64}), r"is of other weights \(SHA-256 0000"),
        (
            json.dumps({**SEVERAL_SEEDS, "runs": [{"weights_sha256": "0" * 64}]}),
            "has no run with these weights",
        ),
    ],
)
def test_a_file_that_cannot_be_about_the_model_is_refused(run, content, complaint):
    path = Path("elsewhere/results.json")
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=complaint):
        write_model_card(run, path)
    assert not (run / "README.md").exists()
    assert not (run / "results").exists()


def test_results_of_earlier_weights_are_left_out_with_a_warning(run, warnings):
    write_json(run / "results.json", {**RUN, "weights_sha256": "0" * 64})
    text = text_of(run)
    assert "results.json is of other weights" in warnings()
    assert "36.82" not in text
    assert "model-index" not in metadata(text)


def test_without_results_nothing_is_claimed(bare):
    text = text_of(bare)
    assert "This model has no published score." in text
    assert "The training of this model is not documented." in text
    assert set(metadata(text)) == {"library_name", "pipeline_tag", "tags"}


def test_a_checkpoint_of_a_trainer_shows_its_own_log(bare):
    write_json(bare / "trainer_state.json", {"log_history": RUN["log"]})
    text = text_of(bare)
    assert "validation loss was 1.974 nats per token ([trainer_state.json]" in text
    assert "![Training and validation loss" in text
    assert (bare / "learning_curve.png").stat().st_size > 1000


@pytest.mark.parametrize("card", sorted((ROOT / "hub_cards" / "cards").glob("*/README.md")))
def test_cards_of_recipes_are_as_written_and_from_their_files(card):
    assert may_be_written(card)
    assert assert_every_score_stands_in_its_file(card)


def test_cards_of_recipes_link_to_the_licence_and_results_instead_of_copying_them():
    kept_elsewhere = [ROOT / "LICENSE", *(ROOT / "benchmarks" / "results").glob("*.json")]
    originals = {path.read_bytes() for path in kept_elsewhere}
    files = [path for path in (ROOT / "hub_cards" / "cards").rglob("*") if path.is_file()]
    assert [path for path in files if path.read_bytes() in originals] == []


def test_a_card_states_the_limit_of_learned_positions_only(run, bare):
    assert "tokens per line" not in text_of(bare)
    config = json.loads((run / "config.json").read_text())
    config |= {"position_encoding": "learned", "max_position_embeddings": 77}
    (run / "config.json").write_text(json.dumps(config))
    assert "at most 77 tokens per line" in text_of(run)


@pytest.mark.parametrize(("percentage", "shown"), [(9.99, False), (10.0, True)])
def test_few_exact_matches_are_shown_only_to_a_run_that_asked_for_them(run, percentage, shown):
    results = json.loads((run / "results.json").read_text())
    results["test"]["exact_match"] = percentage
    write_json(run / "results.json", results)
    assert ("exactly right, %" in text_of(run)) == shown
    results["settings"]["score"] = "exact_match"
    write_json(run / "results.json", results)
    assert "exactly right, %" in text_of(run)


def test_each_of_several_test_sets_has_its_own_scores(run):
    corpora = [
        {"data": "data/a.cs data/a.fr", "tag": "fr", **SCORES},
        {"data": "data/b.tsv and 3 more", "tag": None, **SCORES, "bleu": 12.5},
    ]
    write_json(run / "results.json", {**RUN, "test": {**SCORES, "corpora": corpora}})
    text = write_model_card(run).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| BLEU |" in line]
    assert [row.split(" | ")[:3] for row in rows[:2]] == [
        ["| data/a (fr)", "BLEU", "36.82"],
        ["| data/b and 3 more", "BLEU", "12.50"],
    ]


# Metadata


def test_the_metadata_is_complete_and_read_by_huggingface_hub(run):
    card = write_model_card(run, license="cc-by-4.0", datasets="user/pairs", tags=["numbers"])
    data = ModelCard.load(card).data
    assert data.language == ["en", "de"]
    assert (data.license, data.library_name) == ("cc-by-4.0", "transformers")
    assert (data.pipeline_tag, data.datasets) == ("translation", ["user/pairs"])
    assert {"vaswani", "transformer", "en-de", "numbers"} <= set(data.tags)
    assert data.metrics == ["bleu", "chrf", "exact_match", "perplexity"]
    found = {(entry.metric_type, entry.dataset_split): entry for entry in data.eval_results}
    bleu = found["bleu", "test"]
    assert (bleu.task_type, bleu.metric_value) == ("translation", 36.82)
    assert bleu.metric_args == {"signature": SIGNATURE}
    assert (bleu.dataset_name, bleu.dataset_type) == ("data/test.tok", "data-test-tok")
    assert found["perplexity", "validation"].metric_value == 7.1973
    # The YAML of the file has the same facts.
    name, entries = model_index_to_eval_results(metadata(card.read_text("utf-8"))["model-index"])
    assert name == "numbers"
    assert entries == data.eval_results


def test_data_and_base_model_of_the_hub_are_named_by_their_ids(run):
    settings = {
        "train": ["wmt/wmt14@de-en:train"],
        "test": ["wmt/wmt14@de-en:test"],
        "columns": ["en", "de"],
        "model": "user/base",
        "license": "mit",
    }
    write_json(run / "results.json", {**RUN, "settings": settings})
    data = ModelCard.load(write_model_card(run)).data
    assert (data.datasets, data.base_model, data.license) == (["wmt/wmt14"], "user/base", "mit")
    bleu = next(entry for entry in data.eval_results if entry.metric_type == "bleu")
    assert (bleu.dataset_type, bleu.dataset_config) == ("wmt/wmt14", "de-en")
    assert bleu.dataset_split == "test"
    # The same names were folders on the machine of the run.
    local = ["user/base", "wmt/wmt14@de-en:train"]
    write_json(run / "results.json", {**RUN, "settings": settings, "local": local})
    (run / "README.md").unlink()
    data = ModelCard.load(write_model_card(run)).data
    assert (data.datasets, data.base_model) == (None, None)


@pytest.mark.parametrize(
    ("settings", "language"),
    [
        ({"languages": ["eng", "deu"]}, ["eng", "deu"]),
        ({"languages": ["en"], "columns": ["fr", "de"]}, ["en"]),
        ({"columns": ["fr", "de"], "train": ["pairs.jsonl"]}, ["fr", "de"]),
        ({"columns": ["source", "target"], "train": ["t.tok.cs.gz", "t.tok.en.gz"]}, ["cs", "en"]),
        ({"train": ["train.src", "train.tgt"]}, None),
        ({"train": ["pairs.tsv"]}, None),
    ],
)
def test_languages_are_those_recorded_and_never_guessed(run, settings, language):
    write_json(run / "results.json", {**RUN, "settings": settings})
    text = text_of(run)
    assert metadata(text).get("language") == language
    pair = language is not None and len(language) == 2
    assert ("Translates from" in text) == pair


@pytest.mark.parametrize(
    "train", ["d/train.parquet", "d/train.tsv.zst", "d/train.tsv=2", "d/train.jsonl.gz=0.5"]
)
def test_local_files_that_are_gone_are_no_data_sets_of_the_hub(run, train):
    write_json(run / "results.json", {**RUN, "settings": {"train": [train]}})
    text = text_of(run)
    assert "datasets" not in metadata(text)
    assert "| data | d/train" in text
    assert "=" not in re.search(r"\| data \| (.*) \|", text)[1]


@pytest.mark.parametrize(
    ("train", "data_sets"),
    [
        (["wmt/wmt14@de-en:train=2"], ["wmt/wmt14"]),
        (["wmt/wmt14@de-en:train", "user/news:train=1e3"], ["wmt/wmt14", "user/news"]),
        (["user/news:train[:10%]", "user/news:train[90%:]"], ["user/news"]),
        (["d/train.en", "d/train.de"], None),  # files that are gone
        (["d/train.en", "d/train.de", "user/news:train"], ["user/news"]),
    ],
)
def test_data_sets_of_the_hub_are_found_among_the_training_data(run, train, data_sets):
    write_json(run / "results.json", {**RUN, "settings": {"train": train}})
    assert metadata(text_of(run)).get("datasets") == data_sets


def test_weights_and_compression_hide_no_language(run):
    settings = {"train": ["d/train.cs.zst=2", "d/train.en.zst=2"]}
    write_json(run / "results.json", {**RUN, "settings": settings})
    assert metadata(text_of(run))["language"] == ["cs", "en"]
    settings = {"train": ["d/train.cs=1E3", "d/train.en=2."]}
    write_json(run / "results.json", {**RUN, "settings": settings})
    text = text_of(run, overwrite=True)
    assert metadata(text)["language"] == ["cs", "en"]
    assert "| data | d/train |" in text


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({**SEVERAL_SEEDS, "runs": None}, "runs"),
        ({**RUN, "test": SEVERAL_SEEDS["test"]}, "runs"),
        ({**RUN, "log": [{"loss": 4.0}]}, r"log\[0\]\.step"),
        ({**RUN, "log": None}, "log"),
        ({**RUN, "test": {**SCORES, "bleu": "27.3"}}, r"test\.bleu"),
        ({**RUN, "test": {**SCORES, "nbest_accuracy": 3}}, r"test\.nbest_accuracy"),
        ({**RUN, "test": {"samples": [{"source": "a"}]}}, r"test\.samples\[0\]\.translation"),
        ({**RUN, "settings": {"train": 5}}, r"settings\.train"),
        ({**RUN, "parameters": "many"}, "parameters"),
        ({**SEVERAL_SEEDS, "score": "x"}, "score"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(run, warnings, content, field):
    path = write_json(Path("elsewhere/numbers.json"), content)
    with pytest.raises(ValueError, match=rf"numbers\.json: the field {field} must be"):
        write_model_card(run, path)
    write_json(run / "results.json", content)
    write_model_card(run)
    assert re.search(
        rf"results\.json: the field {field} must be.* leaves this file out", warnings()
    )


def test_a_line_break_in_a_sample_stays_in_its_cell(run):
    sample = {**SAMPLE, "translation": "a\nb\r\nc"}
    write_json(run / "results.json", {**RUN, "test": {**SCORES, "samples": [sample]}})
    assert "| a b c |" in text_of(run)


def test_a_card_with_broken_metadata_can_be_replaced(run, warnings):
    (run / "README.md").write_text("---\nlanguage: [en, de\ntags: {\n---\n# Mine\n")
    assert metadata(text_of(run, overwrite=True))["library_name"] == "transformers"
    assert "README.md cannot be read and are ignored" in warnings()


@pytest.mark.parametrize("written", ["language: [en, no]", "language:\n- en\n- no"])
def test_norwegian_is_no_truth_value(bare, written):
    (bare / "README.md").write_text(f"---\n{written}\n---\n# Mine\n")
    data = metadata(text_of(bare, overwrite=True))
    assert data["language"] == ["en", "no"]
    assert "en-no" in data["tags"]


@pytest.mark.parametrize(
    "splits", [None, {"type": "Whitespace"}, {"pretokenizers": [{"type": "Whitespace"}]}, "absent"]
)
def test_words_of_another_pre_tokenizer_are_words(bare, splits):
    tokenizer = json.loads((bare / "tokenizer.json").read_text())
    tokenizer["model"] = {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}
    tokenizer["pre_tokenizer"] = splits
    if splits == "absent":
        del tokenizer["pre_tokenizer"]
    write_json(bare / "tokenizer.json", tokenizer)
    assert "340 words" in text_of(bare)


def test_a_pair_that_is_put_right_leaves_no_wrong_tag(bare):
    text_of(bare, language=["de", "en"], tags="de-en-numbers")
    tags = metadata(text_of(bare, language=["en", "de"]))["tags"]
    assert "de-en" not in tags
    assert {"en-de", "de-en-numbers"} <= set(tags)


def test_a_language_that_is_no_code_is_refused(run):
    with pytest.raises(ValueError, match="language 'German' is no ISO 639 code"):
        write_model_card(run, language=["en", "German"])
    assert not (run / "README.md").exists()


def test_parameters_of_variants_and_old_shards_do_not_count(bare):
    weights = load_file(bare / "model.safetensors")
    expected = SavedModel(bare).parameters
    save_file(weights, bare / "model.fp16.safetensors")
    save_file(weights, bare / "model-00001-of-00002.safetensors")
    assert SavedModel(bare).parameters == expected
    (bare / "model.safetensors").rename(bare / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    write_json(bare / "model.safetensors.index.json", index)
    assert SavedModel(bare).parameters == expected


def test_several_base_models_are_listed(bare):
    (bare / "README.md").write_text("---\nbase_model:\n- user/one\n- user/two\n---\n")
    assert "fine-tuned from user/one, user/two." in text_of(bare, overwrite=True)


def test_a_licence_that_the_hub_cannot_know_is_refused(run):
    with pytest.raises(ValueError, match=r"license 'Apache 2\.0' is no name of the Hub"):
        write_model_card(run, license="Apache 2.0")
    assert not (run / "README.md").exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bpe", "byte pairs"),
        ("wordpiece", "word pieces"),
        ("unigram", "unigram pieces"),
        ("word", "words"),
        ("char", "characters"),
        ("regex", "matches of a pattern"),
    ],
)
def test_the_vocabulary_is_described_by_the_saved_tokenizer(bare, kind, words):
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["CCO.CN>>CCOC=N and so on"] * 5, kind=kind, vocab_size=300, show_progress=False
    )
    tokenizer.save_pretrained(bare)
    text = text_of(bare)
    assert f"one vocabulary of 340 {words}" in text
    assert ("not seen in training are read as unknown" in text) == (kind != "bpe")


def test_text_files_have_no_columns_to_name_languages(run):
    settings = {**RUN["settings"], "columns": ["fr", "cs"]}
    write_json(run / "results.json", {**RUN, "settings": settings})
    assert read_results(run / "results.json").languages() == ["en", "de"]
    records = {**settings, "train": ["data/train.jsonl"]}
    write_json(run / "results.json", {**RUN, "settings": records})
    assert read_results(run / "results.json").languages() == ["fr", "cs"]


# The card itself


def test_the_template_leaves_nothing_unfilled(run, bare):
    for text in (text_of(run), text_of(run, repo_id="user/numbers")):
        assert not re.search(r"\{\{ | \}\}|\{%|%\}|\bNone\b|undefined|\n\n\n", text, re.M), text


def test_the_code_with_the_package_runs_as_printed(run):
    with_package, _ = python_blocks(text_of(run))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(with_package, "README.md", "exec"), {})
    assert output.getvalue() == "['dreihundertzweiundvierzig']\n"


def test_the_versions_that_loading_needs_are_those_of_the_package(bare):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    needed = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(project["dependencies"]), re.M))
    words = f"Python {python}, torch {needed['torch']} and transformers {needed['transformers']}, "
    assert f"Both ways need {words}or newer." in text_of(bare)


def test_the_package_is_cited_as_its_citation_file_says(bare):
    text = text_of(bare)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"title = {{{citation['title']}}}" in text
    assert f"version = {{{citation['version']}}}" in text
    assert f"author = {{{{{citation['authors'][0]['name']}}}}}" in text
    paper = citation["references"][0]
    assert f"title = {{{paper['title']}}}" in text
    assert paper["url"] in text
    for author in paper["authors"]:
        assert author["family-names"] in text
    assert text.count("{") == text.count("}")


def test_the_licence_of_the_code_comes_with_the_card(bare):
    text = text_of(bare)
    assert (bare / "LICENSE-CODE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "The weights have no stated licence." in text
    assert "The weights are under `mit`." in text_of(bare, license="mit")


def test_a_licence_that_is_there_stays(bare):
    (bare / "LICENSE-CODE").write_text("of my own\n")
    text_of(bare)
    assert (bare / "LICENSE-CODE").read_text() == "of my own\n"


def test_the_templates_are_part_of_the_package():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = ROOT / tools["package-dir"]["vaswani.hub_cards"]
    templates = {
        path
        for pattern in tools["package-data"]["vaswani.hub_cards"]
        for path in folder.glob(pattern)
    }
    assert templates == {cards._TEMPLATE, sibling_card._TEMPLATE}
    assert "vaswani.hub_cards" in tools["packages"]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, ", and stops at 50 tokens more than the source has."),
        ({"max_length_factor": 1.2}, ", and stops at 1.2 times the tokens of the source plus 50"),
        ({"max_length_factor": 2, "max_length_offset": 0}, "stops at 2 times the tokens of the "),
        ({"max_length_factor": 0}, ", and stops at 50 tokens."),
        ({"max_length_offset": 0}, None),
    ],
)
def test_the_limit_of_a_translation_is_said_in_words(bare, settings, limit):
    path = bare / "generation_config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | settings)
    text = text_of(bare)
    assert limit in text if limit else "stops at" not in text


def test_a_file_whose_name_is_not_utf8_has_its_bytes_in_the_card(run):
    content = json.loads((run / "results.json").read_text())
    content["command"] = "vaswani train --train \udce9.en"
    write_json(run / "results.json", content)
    assert r"--train \udce9.en" in text_of(run)
