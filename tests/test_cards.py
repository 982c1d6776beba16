"""Model cards: every fact comes from a file of the model."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from loopback_hub import LoopbackHub, Reply
from safetensors.torch import load_file, save_file
from test_batching import make_trainer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer
from transformers.testing_utils import CaptureLogger
from vaswani.commands.main import main
from vaswani.commands.train import make_parser
from vaswani.corpora import atomic_folder
from vaswani.hub_cards import card as cards
from vaswani.hub_cards import metadata as card_metadata
from vaswani.hub_cards import saved_model, sibling_card
from vaswani.hub_cards.card import may_be_written, write_model_card
from vaswani.hub_cards.results import read_results
from vaswani.hub_cards.saved_model import SavedModel
from vaswani.training.circumstances import weights_sha256

from vaswani import VaswaniModel, VaswaniTokenizer

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CIRCUMSTANCES = {
    "command": "python train.py --steps 6538",
    "commit": "abc1234",
    "hardware": {"cpu": "Some CPU", "cores": 2, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "date": "2026-01-31",
}
SCORES = {
    "bleu": 36.82,
    "signature": SIGNATURE,
    "chrf": 61.07,
    "chrf_signature": "nrefs:1|case:mixed|nc:6|nw:0|version:2.6.0",
    "compound_split_bleu": 37.4,
    "exact_match": 12.3,
    "beams": 4,
    "nbest_accuracy": [12.3, 18.25],
}
SAMPLE = {"source": "three hundred and forty-two", "translation": "a | b", "reference": "<i>c</i>"}
RUN = {
    **CIRCUMSTANCES,
    "training_minutes": 29.5,
    "resumed": False,
    "steps": 6538,
    "pairs": {"train": 29_000, "valid": 1014, "test": 1000},
    "settings": {
        "train": ["data/train.tok.en.gz", "data/train.tok.de.gz"],
        "valid": ["data/valid.tok.en.gz", "data/valid.tok.de.gz"],
        "test": ["data/test.tok.en.gz", "data/test.tok.de.gz"],
        "columns": ["source", "target"],
        "license": None,
        "model": None,
    },
    "arguments": {"learning_rate": 0.00417, "adam_beta2": 0.98},
    "log": [{"step": 3000, "loss": 4.0}, {"step": 6538, "eval_loss": 1.9737, "eval_bleu": 35.36}],
    "valid": {"loss": 1.97, "perplexity": 7.1973, "greedy_bleu": 35.36, "signature": SIGNATURE},
    "test": {**SCORES, "samples": [SAMPLE]},
}
SEVERAL_SEEDS = {
    **CIRCUMSTANCES,
    "recipe": "numbers",
    "score": "bleu",
    "runs": [
        {"seed": seed, "test": {**SCORES, "bleu": bleu}} for seed, bleu in ((1, 36.8), (2, 36.9))
    ],
    "test": {"mean": 36.85, "standard_deviation": 0.07, "seeds": [36.8, 36.9]},
}


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


def test_text_files_have_no_columns_to_name_languages(run):
    settings = {**RUN["settings"], "columns": ["fr", "cs"]}
    write_json(run / "results.json", {**RUN, "settings": settings})
    assert read_results(run / "results.json").languages() == ["en", "de"]
    records = {**settings, "train": ["data/train.jsonl"]}
    write_json(run / "results.json", {**RUN, "settings": records})
    assert read_results(run / "results.json").languages() == ["fr", "cs"]


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """runs/numbers in the working folder: a saved translation model without results."""
    monkeypatch.chdir(tmp_path)
    unwanted = shutil.ignore_patterns("expected.*")
    return shutil.copytree(FROZEN, Path("runs/numbers"), ignore=unwanted)


@pytest.fixture
def run(bare):
    """The same model with the files of a training run."""
    write_json(bare / "results.json", {**RUN, "weights_sha256": weights_sha256(bare)})
    (bare / "recipe.yaml").write_text("steps: 6538\nwarmup: 800\n")
    (bare / "test.txt").write_text("zwei\n")
    (bare / "learning_curve.png").write_bytes(b"drawn")
    return bare


@pytest.fixture
def warnings():
    """The warnings of hub_cards."""

    @contextlib.contextmanager
    def caught():
        with contextlib.ExitStack() as stack:
            loggers = (cards.logger, card_metadata.logger, saved_model.logger)
            logs = [stack.enter_context(CaptureLogger(logger)) for logger in loggers]
            yield lambda: "".join(log.io.getvalue() for log in logs)

    with caught() as text:
        yield text


def text_of(folder, **options):
    return write_model_card(folder, **options).read_text(encoding="utf-8")


def metadata(text):
    """Return the YAML block, parsed without huggingface_hub."""
    block = re.match(r"---\n(.*?)\n---\n", text, re.S)
    return yaml.safe_load(block[1]) if block else {}


def score_rows(text):
    """Return the cells of the results table."""
    table = text[text.index("## Results") : text.index("## Use")]
    rows = re.findall(r"^\| (.*) \|$", table, re.M)
    cells = [re.split(r" ?(?<!\\)\| ?", row) for row in rows]
    return [row for row in cells if len(row) == 6 and row[0] != "data" and "---" not in row[0]]


def leaves(content):
    """Return all strings of a results file, and all numbers as formatted in a card."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return set().union(*map(leaves, content))
    return {f"{content:.2f}"} if isinstance(content, int | float) else {content}


def assert_every_score_stands_in_its_file(card):
    text = card.read_text(encoding="utf-8")
    rows = score_rows(text)
    for _, _, value, _, signature, link in rows:
        name = re.fullmatch(r"\[(.+)\]\(\1\)", link)[1]
        known = leaves(json.loads((card.parent / name).read_text(encoding="utf-8")))
        numbers = re.findall(r"\d+\.\d+", value)
        assert numbers
        assert set(numbers) <= known, name
        assert signature.strip("`").replace("\\|", "|") in {"", *known}
    files = [path for pattern in ("*.json", "results/*.json") for path in card.parent.glob(pattern)]
    known = set().union(*(leaves(json.loads(path.read_text("utf-8"))) for path in files))
    for entry in ModelCard.load(card).data.eval_results or []:
        assert f"{entry.metric_value:.2f}" in known
        assert (entry.metric_args or {}).get("signature", SIGNATURE) in {SIGNATURE, *known}
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (card.parent / link).is_file(), link
    return rows


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


# The card itself


def test_the_template_leaves_nothing_unfilled(run, bare):
    for text in (text_of(run), text_of(run, repo_id="user/numbers")):
        assert not re.search(r"\{\{ | \}\}|\{%|%\}|\bNone\b|undefined|\n\n\n", text, re.M), text


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


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


# Edited cards


def test_a_card_is_written_again_as_long_as_nobody_changed_it(run, warnings):
    first = text_of(run, license="mit", language=["en", "de"], tags="numbers")
    write_json(run / "results.json", {**RUN, "test": {**SCORES, "bleu": 40.01}, "settings": {}})
    second = text_of(run)
    assert ("36.82" in first, "40.01" in first) == (True, False)
    assert ("36.82" in second, "40.01" in second) == (False, True)
    # The earlier card has facts that no file has.
    assert metadata(second)["license"] == "mit"
    assert metadata(second)["language"] == ["en", "de"]
    assert "numbers" in metadata(second)["tags"]
    assert warnings() == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("translates each line without", "translates each line with"),
        ("license: mit", "license: cc-by-4.0"),
        ("## Licence", "## Thanks\n\nTo all.\n\n## Licence"),
        ("-->\n", "-->\nOne more line.\n"),
        ("<!-- Written by", "<!-- By"),
    ],
)
def test_a_card_that_was_changed_stays_until_told_otherwise(run, warnings, before, after):
    card = write_model_card(run, license="mit")
    changed = card.read_text("utf-8").replace(before, after)
    card.write_text(changed, encoding="utf-8")
    assert not may_be_written(card)
    assert write_model_card(run) == card
    assert card.read_text("utf-8") == changed
    assert "was changed by hand and stays as it is; overwrite=True" in warnings()
    write_model_card(run, overwrite=True)
    assert may_be_written(card)
    assert card.read_text("utf-8") != changed


def test_a_card_that_is_not_utf8_stays(bare, warnings):
    card = bare / "README.md"
    card.write_bytes(b"na\xefve")
    write_model_card(bare)
    assert card.read_bytes() == b"na\xefve"
    assert "was changed by hand" in warnings()


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_a_damaged_file_is_named_instead_of_described(bare, name):
    path = bare / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        write_model_card(bare)
    assert not (bare / "README.md").exists()


@pytest.mark.parametrize("log", [None, [{"loss": 1.0}], ["loss"]])
def test_a_log_of_another_program_is_left_out(bare, log):
    write_json(bare / "trainer_state.json", {"log_history": log})
    assert "learning_curve.png" not in text_of(bare)
    assert not (bare / "learning_curve.png").exists()


def test_loading_and_saving_by_huggingface_hub_changes_nothing(run):
    card = write_model_card(run, license="mit")
    before = card.read_bytes()
    loaded = ModelCard.load(card)
    loaded.save(card)
    assert card.read_bytes() == before
    loaded.data.tags.append("mine")
    loaded.save(card)
    assert not may_be_written(card)


def test_an_empty_draft_is_nobodys_card_but_a_filled_one_is(bare):
    card = bare / "README.md"
    draft = ModelCard.from_template(
        ModelCardData(tags=["mine"], library_name="transformers"), model_description="Pushed."
    )
    draft.save(card)
    assert may_be_written(card)
    draft.text = draft.text.replace("[More Information Needed]", "Me", 1)
    draft.save(card)
    assert not may_be_written(card)


# Folders


def test_another_folder_gets_the_card_with_every_file_it_links_to(run):
    report = write_json(Path("elsewhere/three-seeds.json"), SEVERAL_SEEDS)
    kept = {path.name for path in run.iterdir()}
    card = write_model_card(run, report, output="cards/numbers", repo_id="user/numbers")
    assert card == Path("cards/numbers/README.md")
    assert_every_score_stands_in_its_file(card)
    names = {path.relative_to(card.parent).as_posix() for path in card.parent.rglob("*.*")}
    companions = {"results.json", "results/three-seeds.json", "recipe.yaml", "test.txt"}
    assert names == {"README.md", "learning_curve.png", *companions}
    assert (card.parent / "LICENSE-CODE").exists()
    assert 'from_pretrained("user/numbers")' in card.read_text("utf-8")
    assert {path.name for path in run.iterdir()} == kept


def test_a_results_file_with_spaces_in_a_deep_folder_is_linked_and_copied(run):
    report = write_json(run / "eval" / "more seeds" / "three (of 5).json", SEVERAL_SEEDS)
    card = write_model_card(run, report, output="cards/numbers")
    assert "(eval/more%20seeds/three%20%28of%205%29.json)" in card.read_text("utf-8")
    copy = card.parent / report.relative_to(run)
    assert copy.read_bytes() == report.read_bytes()
    other = Path("other")
    other.mkdir()
    cards._copy_linked(card.read_text("utf-8"), card.parent, other)
    assert (other / report.relative_to(run)).exists()


def test_the_command_writes_the_same_card(run, capsys):
    write_json(Path("elsewhere/three-seeds.json"), SEVERAL_SEEDS)
    arguments = ["--results", "elsewhere/three-seeds.json", "--license", "mit", "--tags", "a", "b"]
    main(["card", str(run), *arguments])
    assert capsys.readouterr().out == "runs/numbers/README.md\n"
    written = (run / "README.md").read_text("utf-8")
    again = text_of(run, results="elsewhere/three-seeds.json", license="mit", tags=["a", "b"])
    assert written == again
    with pytest.raises(SystemExit, match=r"absent holds no config\.json"):
        main(["card", "absent"])
    with pytest.raises(SystemExit, match="not valid///"):
        main(["card", str(run), "--repo-id", "not valid///"])
    for content, complaint in (("[]", "holds no JSON object"), ("{", "is damaged")):
        (run / "config.json").write_text(content)
        with pytest.raises(SystemExit, match=rf"numbers/config\.json {complaint}"):
            main(["card", str(run)])


def test_a_full_disk_leaves_the_card_that_was_there(run, monkeypatch):
    card = write_model_card(run)
    before = card.read_bytes()

    def no_space_left(path):
        raise OSError("No space left on device")

    monkeypatch.setattr(atomic_folder, "flush", no_space_left)
    with pytest.raises(SystemExit, match=r"could not be saved: No space left on device \(\d+ MiB"):
        main(["card", str(run), "--license", "mit"])
    assert card.read_bytes() == before


def test_folders_without_a_translator_are_refused(bare, tiny_config):
    VaswaniModel(tiny_config()).save_pretrained("runs/stacks")
    with pytest.raises(ValueError, match="runs/stacks holds a VaswaniModel"):
        write_model_card("runs/stacks")
    settings = (bare / "generation_config.json").read_bytes()
    (bare / "generation_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no generation_config\.json"):
        write_model_card(bare)
    (bare / "generation_config.json").write_bytes(settings)
    (bare / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"numbers holds no model\.safetensors"):
        write_model_card(bare)
    assert not (bare / "README.md").exists()


# Trainers and examples


def test_a_trainer_writes_the_card_of_the_model_it_saved(tmp_path, warnings):
    trainer = make_trainer(tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(["en", "de"], "mit", "mine", "A name", dataset="user/pairs")
    card = tmp_path / "README.md"
    data = ModelCard.load(card).data
    assert (data.language, data.license) == (["en", "de"], "mit")
    assert {"mine", "vaswani"} <= set(data.tags)
    assert (data.datasets, data.base_model) == (["user/pairs"], None)
    text = card.read_text("utf-8")
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["arguments"]["learning_rate"] == 1e-3
    assert report["arguments"]["max_source_tokens"] == trainer.max_source_tokens
    assert [entry["loss"] for entry in report["log"] if "loss" in entry]
    assert "| updates | 2 |" in text
    assert f"| time | {report['training_minutes']} minutes |" in text
    assert '"learning_rate": 0.001' in text
    with pytest.raises(TypeError, match="title"):
        trainer.create_model_card(title="en")
    assert (tmp_path / "learning_curve.png").exists()
    card.write_text(text + "Mine.\n", encoding="utf-8")
    trainer.create_model_card()
    assert card.read_text("utf-8") == text + "Mine.\n"
    assert "was changed by hand" in warnings()


def test_training_leaves_a_card_of_its_own_results_and_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for language, words in (("en", "one two three"), ("de", "eins zwei drei")):
        Path(f"pairs.{language}").write_text("".join(f"{word}\n" for word in words.split() * 9))
    pairs = ["pairs.en", "pairs.de"]
    arguments = ["--train", *pairs, "--valid", *pairs, "--test", *pairs, "--steps", "2"]
    arguments += ["--set", "d_model=16", "encoder_layers=1", "decoder_layers=1", "dropout=0.2"]
    arguments += ["--vocab-size", "300", "--output", "run", "--license", "mit", "--no-bf16"]
    main(["train", *arguments])
    results = json.loads(Path("run/results.json").read_text())
    rows = assert_every_score_stands_in_its_file(Path("run/README.md"))
    assert ["pairs", "BLEU", f"{results['test']['bleu']:.2f}"] in [row[:3] for row in rows]
    data = ModelCard.load(Path("run/README.md")).data
    assert (data.language, data.license) == (["en", "de"], "mit")
    text = Path("run/README.md").read_text("utf-8")
    assert "| pairs | 27 |" in text
    assert results["test"]["samples"][0]["source"] == "one"
    # The recipe in the card is valid, and has the options of this run.
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    Path("again.yaml").write_text(recipe)
    told, repeated = (
        make_parser().parse_args(words) for words in (arguments, ["--recipe", "again.yaml"])
    )
    assert {**vars(repeated), "recipe": None} == {**vars(told), "columns": list(told.columns)}


def test_a_fine_tuned_model_keeps_the_language_pair_of_its_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FROZEN, "numbers")
    write_model_card("numbers", language=["en", "de"], license="mit")
    Path("more.tsv").write_text("one\teins\ntwo\tzwei\n" * 9)
    main(["train", "--model", "numbers", "--train", "more.tsv", "--steps", "1", "--output", "run"])
    data = ModelCard.load("run/README.md").data
    assert data.language == ["en", "de"]
    assert "en-de" in data.tags
    assert data.license is None


def test_a_checkpoint_that_a_trainer_pushes_has_a_card(tmp_path, monkeypatch):
    pushed = []

    def push(self, checkpoint):
        pushed.append({path.name: path.read_bytes() for path in tmp_path.glob("*.*")})

    monkeypatch.setattr(Seq2SeqTrainer, "_push_from_checkpoint", push)
    changes = {"save_strategy": "steps", "logging_strategy": "steps", "logging_steps": 1}
    trainer = make_trainer(tmp_path, max_steps=2, save_steps=1, **changes)
    trainer.args.push_to_hub, trainer.push_in_progress = True, None
    trainer.hub_model_id = "user/running"
    trainer.train()
    weights = [re.search(r"`(\w{64})`", files["README.md"].decode())[1] for files in pushed]
    assert weights == [weights_sha256(tmp_path / f"checkpoint-{step}") for step in (1, 2)]
    assert b'from_pretrained("user/running")' in pushed[-1]["README.md"]
    assert {"LICENSE-CODE", "learning_curve.png"} <= {path.name for path in tmp_path.iterdir()}


def test_a_trainer_leaves_the_card_of_an_adapter_to_transformers(tmp_path, tiny_model):
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    settings = peft.LoraConfig(target_modules=["fc1"], task_type="SEQ_2_SEQ_LM")
    trainer = make_trainer(tmp_path, model=peft.get_peft_model(tiny_model(), settings), max_steps=1)
    trainer.save_model()
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text("utf-8")
    assert metadata(text)["library_name"] == "peft"
    assert "vaswani.hub_cards" not in text


# Pushes


class CheckingHub(LoopbackHub):
    """A Hub that refuses cards whose metadata violate the rules in the Hub's documentation."""

    def _admit(self, request, name, repo_id):
        if name != "validate_card":  # validation needs no token
            super()._admit(request, name, repo_id)

    def _validate_card(self, request):
        errors = [{"message": complaint} for complaint in complaints(request.json["content"])]
        return Reply({"errors": errors, "warnings": []}, 400 if errors else 200)


def complaints(content):
    """Return the errors in the metadata of a card."""
    data = metadata(content)
    languages = data.get("language", [])
    right = {
        "license": data.get("license", "mit") in ("apache-2.0", "mit", "cc-by-4.0"),
        "language": all(re.fullmatch("[a-z]{2,3}", code) for code in languages),
        "pipeline_tag": data.get("pipeline_tag", "translation") == "translation",
        "library_name": data.get("library_name", "transformers") == "transformers",
        "tags": all(isinstance(tag, str) for tag in data.get("tags", [])),
        "datasets": all(
            re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in data.get("datasets", [])
        ),
    }
    for model in data.get("model-index", []):
        for result in model["results"]:
            named = [model["name"], result["task"]["type"], *result["dataset"].values()]
            named += [metric["type"] for metric in result["metrics"]]
            values = [metric["value"] for metric in result["metrics"]]
            right["model-index"] = all(isinstance(name, str) for name in named) and all(
                isinstance(value, int | float) for value in values
            )
    return [f'"{field}" is wrong' for field, fine in right.items() if not fine]


PUBLISHER = """
import torch
from huggingface_hub import ModelCard, get_session, upload_file
from huggingface_hub.constants import ENDPOINT
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
import vaswani

def validate(text):
    # Card.validate of huggingface_hub 1 asks huggingface.co, whatever the endpoint is.
    body = {"repoType": "model", "content": text}
    return get_session().post(f"{ENDPOINT}/api/validate-yaml", json=body)

model = AutoModelForSeq2SeqLM.from_pretrained("runs/numbers")
tokenizer = AutoTokenizer.from_pretrained("runs/numbers")
tokenizer.push_to_hub("user/numbers")
model.push_to_hub("user/numbers", tags=["mine"])
card = ModelCard.load("user/numbers")
assert validate(str(card)).status_code == 200
print(validate(str(card).replace("license: mit", "license: none-such")).text)

model.push_to_hub("user/changed")
upload_file(path_or_fileobj=b"# By hand", path_in_repo="README.md", repo_id="user/changed")
model.push_to_hub("user/changed")

AutoModelForSeq2SeqLM.from_pretrained("runs/by-hand").push_to_hub("user/by-hand")

with torch.no_grad():
    model.model.encoder.layers[0].fc2.bias.add_(1.0)
model.push_to_hub("user/numbers-later")
model.push_to_hub("user/numbers")
model.save_pretrained("runs/later", push_to_hub=True, repo_id="user/saved")
"""
WITHOUT_PACKAGE = "import sys\nsys.modules['vaswani'] = None\n"


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The files that a client pushed, and the output of a client without the package."""
    work = tmp_path_factory.mktemp("pushed")
    folder = work / "runs" / "numbers"
    for auto_class in (AutoModelForSeq2SeqLM, AutoTokenizer):
        auto_class.from_pretrained(FROZEN).save_pretrained(folder)  # with the code
    write_json(folder / "results.json", {**RUN, "weights_sha256": weights_sha256(folder)})
    by_hand = shutil.copytree(folder, work / "runs" / "by-hand")
    (by_hand / "README.md").write_text("# By hand\n\n[all](results.json)\n")
    with contextlib.chdir(work):
        text = text_of(Path("runs/numbers"), license="mit")
    _, without_package = python_blocks(text)
    with CheckingHub() as hub:
        environment = {**hub.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        clients = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env=environment,
                cwd=work,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for code in (PUBLISHER, WITHOUT_PACKAGE + without_package)
        ]
        finished = [client.communicate(timeout=300) for client in clients]
        for client, (_, errors) in zip(clients, finished, strict=True):
            assert client.returncode == 0, errors[-4000:]
        assert hub.unknown_requests == []
        names = ("numbers", "changed", "by-hand", "numbers-later", "saved")
        repositories = {
            name: [commit.files for commit in hub.commits(f"user/{name}")] for name in names
        }
    return repositories, [output for output, _ in finished], folder


@pytest.mark.slow
def test_a_push_brings_the_card_and_all_it_links_to(pushed):
    repositories, _, folder = pushed
    _, draft, first, _ = repositories["numbers"]
    assert b"36.82" not in draft["README.md"]
    text = first["README.md"].decode()
    assert "36.82" in text
    assert 'from_pretrained("user/numbers", trust_remote_code=True)' in text
    assert {"mit"} == {metadata(text)["license"]}
    assert "mine" in metadata(text)["tags"]
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert first[link] == (folder / link).read_bytes()
    assert {"LICENSE-CODE", "results.json", "learning_curve.png"} <= set(first)


@pytest.mark.slow
def test_the_hub_finds_no_fault_with_the_card_and_would_have_found_one(pushed):
    _, (printed, _), _ = pushed
    assert [error["message"] for error in json.loads(printed)["errors"]] == ['"license" is wrong']


@pytest.mark.slow
def test_a_card_changed_on_the_hub_or_in_the_folder_is_pushed_as_it_is(pushed):
    repositories, _, folder = pushed
    *_, last = repositories["changed"]
    assert last["README.md"].endswith(b"# By hand")
    *_, last = repositories["by-hand"]
    assert "# By hand\n\n[all](results.json)" in last["README.md"].decode()
    assert last["results.json"] == (folder / "results.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numbers", "numbers-later", "saved"])
def test_weights_trained_further_take_no_old_number_with_them(pushed, name):
    repositories, _, _ = pushed
    *_, last = repositories[name]
    text = last["README.md"].decode()
    assert "36.82" not in text
    assert "This model has no published score." in text
    assert "LICENSE-CODE" in last


@pytest.mark.slow
def test_the_code_without_the_package_runs_as_printed(pushed):
    _, (_, printed), _ = pushed
    assert printed == "[{'translation_text': 'dreihundertzweiundvierzig'}]\n"


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
