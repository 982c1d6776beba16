"""Model cards beside other files: edited cards, copies, and cards of trainers."""

import json
import re
import shutil
from pathlib import Path

import pytest
from card_runs import (
    FIXTURES,
    FROZEN,
    RUN,
    SCORES,
    SEVERAL_SEEDS,
    assert_every_score_stands_in_its_file,
    metadata,
    text_of,
    write_json,
)
from huggingface_hub import ModelCard, ModelCardData
from test_batching import make_trainer
from transformers import Seq2SeqTrainer
from vaswani.commands.main import main
from vaswani.commands.train import make_parser
from vaswani.corpora import atomic_folder
from vaswani.hub_cards import card as cards
from vaswani.hub_cards.card import may_be_written, write_model_card
from vaswani.training.circumstances import weights_sha256

from vaswani import VaswaniModel

bare, run, warnings = FIXTURES


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
