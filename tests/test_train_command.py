"""`vaswani train` on small data: results, fine-tuning, resuming, and wrong settings."""

import gzip
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from forks import in_child
from launches import environment
from loopback_hub import LoopbackHub
from num2words import num2words
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast
from vaswani.commands.main import main
from vaswani.commands.recipes import settings
from vaswani.commands.train import make_parser, recipe_of
from vaswani.corpora import atomic_folder
from vaswani.training.run import RunError, TrainingRun
from vaswani.training.run_arguments import training_arguments
from vaswani.training.run_data import RunData

from vaswani import VaswaniTokenizer, VaswaniTranslationPipeline

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
TINY = ["--vocab-size", "340", "--set", "d_model=32", "encoder_layers=1", "decoder_layers=1"]
TINY += ["encoder_attention_heads=4", "decoder_attention_heads=4"]
TINY += ["encoder_ffn_dim=64", "decoder_ffn_dim=64"]


@pytest.fixture
def pairs():
    return [(num2words(n), num2words(n, lang="de")) for n in range(100, 180)]


@pytest.fixture
def parallel_files(pairs, tmp_path):
    """Two parallel files, the target compressed."""
    source, target = tmp_path / "train.en", tmp_path / "train.de.gz"
    source.write_text("".join(f"{english}\n" for english, _ in pairs), encoding="utf-8")
    with gzip.open(target, "wt", encoding="utf-8") as file:
        file.writelines(f"{german}\n" for _, german in pairs)
    return [str(source), str(target)]


@pytest.fixture
def command():
    """Run the command `vaswani` in this process."""

    def run(*words):
        main([str(word) for word in words])

    return run


def test_training_on_parallel_files_writes_a_model_that_auto_classes_load(
    command, parallel_files, pairs, tmp_path
):
    output = tmp_path / "run"
    command(
        "train", "--train", *parallel_files, "--valid", *parallel_files,
        "--test", *parallel_files, *TINY, "--steps", 20, "--eval-steps", 10, "--warmup", 5,
        "--batch-size", 32, "--output", output,
    )  # fmt: skip
    model, tokenizer = (
        auto.from_pretrained(output) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    assert model.config.d_model == 32
    assert (model.generation_config.num_beams, model.generation_config.max_length) == (4, None)
    assert tokenizer(pairs[0][0])["input_ids"][-1] == model.config.eos_token_id
    results = json.loads((output / "results.json").read_text())
    assert results["steps"] == 20
    assert [entry["eval_bleu"] for entry in results["log"] if "eval_bleu" in entry]
    # The score is sacreBLEU's for the translations in test.txt.
    translations = (output / "test.txt").read_text(encoding="utf-8").splitlines()
    score = sacrebleu.corpus_bleu(translations, [[german for _, german in pairs]])
    assert results["test"]["bleu"] == round(score.score, 2)
    assert "tok:13a" in results["test"]["signature"]
    assert (output / "tokenization_vaswani.py").exists()


@pytest.mark.parametrize("length", [("--epochs", 2), ("--steps", 7)])
def test_every_epoch_is_evaluated_once(command, parallel_files, tmp_path, length):
    output = tmp_path / "run"
    command(
        "train", "--train", *parallel_files, "--valid", *parallel_files, *TINY, *length,
        "--batch-size", 16, "--trainer", "eval_strategy=epoch", "--output", output,
    )  # fmt: skip
    results = json.loads((output / "results.json").read_text())
    evaluated = [entry["step"] for entry in results["log"] if "eval_loss" in entry]
    assert evaluated == [5, results["steps"]]


def test_a_vocabulary_that_does_not_fit_the_data_is_said(command, parallel_files, tmp_path, capsys):
    other = tmp_path / "other.tsv"
    other.write_text("one hundred\tpère mère\n" * 9, encoding="utf-8")
    common = ["train", "--train", *parallel_files, "--tokenizer-kind", "word", *TINY, "--steps", 1]
    command(*common, "--valid", *parallel_files, "--output", tmp_path / "a")
    assert "unknown to the vocabulary" not in capsys.readouterr().out
    command(*common, "--valid", other, "--output", tmp_path / "b")
    # Two words and the end token, on both sides.
    said = "Warning: 0% of the source tokens and 67% of the target tokens of the validation set"
    assert said in capsys.readouterr().out


def test_fine_tuning_keeps_sizes_and_tokenizer_and_improves_on_the_new_pairs(command, tmp_path):
    numbers = range(1000, 1100)  # the frozen model has seen none above 999
    pairs, output = tmp_path / "pairs.tsv", tmp_path / "run"
    rows = [f"{num2words(n)}\t{num2words(n, lang='de')}\n" for n in numbers]
    pairs.write_text("".join(rows), encoding="utf-8")
    command(
        "train", "--model", FROZEN, "--train", pairs, "--valid", pairs,
        "--steps", 30, "--eval-steps", 30, "--warmup", 5, "--learning-rate", 1e-3,
        "--batch-size", 32, "--output", output,
    )  # fmt: skip
    before, after = (
        AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (FROZEN, output)
    )
    assert (output / "tokenizer.json").read_bytes() == (FROZEN / "tokenizer.json").read_bytes()
    assert after.config.vocab_size == before.config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(output)
    english, german = num2words(1042), num2words(1042, lang="de")
    batch = tokenizer([english], text_target=[german], return_tensors="pt")
    with torch.no_grad():
        assert after(**batch).loss < before(**batch).loss
    # Fine-tune the fine-tuned model again.
    command(
        "train", "--model", output, "--train", pairs, "--steps", 2,
        "--output", tmp_path / "again",
    )  # fmt: skip
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_validation_bleu_is_sacrebleus_of_the_models_own_greedy_translations(command, tmp_path):
    # The sentences have different words and lengths, so shuffled predictions would be detected.
    numbers = [n * 37 % 1000 for n in range(1, 41)]
    english = [f"{num2words(n)} {num2words(n + 1)}" for n in numbers]
    pairs = [(words, num2words(n, lang="de")) for words, n in zip(english, numbers, strict=True)]
    data, output = tmp_path / "pairs.tsv", tmp_path / "run"
    data.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    command(
        "train", "--model", FROZEN, "--train", data, "--valid", data, "--steps", 1,
        "--learning-rate", 1e-12, "--batch-size", 7, "--output", output,
    )  # fmt: skip
    model, tokenizer = (
        auto.from_pretrained(output) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    outputs = VaswaniTranslationPipeline(model, tokenizer, num_beams=1)(english)
    translations = [output["translation_text"] for output in outputs]
    expected = sacrebleu.corpus_bleu(translations, [[target for _, target in pairs]])
    results = json.loads((output / "results.json").read_text())
    assert results["valid"]["greedy_bleu"] == round(expected.score, 2)


@pytest.mark.parametrize(
    ("beams", "saved"), [((), 6), (("--beams", 5), 5), (("--generation", "num_beams=3"), 3)]
)
def test_fine_tuning_keeps_the_checkpoints_generation_settings(
    command, parallel_files, tmp_path, beams, saved
):
    model = AutoModelForSeq2SeqLM.from_pretrained(FROZEN)
    model.generation_config.update(length_penalty=1.2, max_length_offset=7, no_repeat_ngram_size=3)
    model.generation_config.num_beams = 6
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(FROZEN).save_pretrained(tmp_path / "model")
    command(
        "train", "--model", tmp_path / "model", "--train", *parallel_files,
        "--valid", *parallel_files, "--steps", 1, *beams, "--output", tmp_path / "run",
    )  # fmt: skip
    kept = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").generation_config
    assert (kept.length_penalty, kept.max_length_offset, kept.no_repeat_ngram_size) == (1.2, 7, 3)
    assert (kept.num_beams, kept.max_length) == (saved, None)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["valid"]["beams"] == saved


def test_fine_tuning_keeps_separate_vocabularies_apart(
    command, parallel_files, pairs, tmp_path, tiny_model
):
    english, german = (
        VaswaniTokenizer.train_from_iterator(lines, "bpe", vocab_size=size, show_progress=False)
        for lines, size in zip(zip(*pairs, strict=True), (300, 350), strict=True)
    )
    model = tiny_model(
        dtype=torch.float32,
        vocab_size=len(english),
        decoder_vocab_size=len(german),
        share_encoder_decoder_embeddings=False,
    )
    model.save_pretrained(tmp_path / "model")
    english.save_pretrained(tmp_path / "model")
    german.save_pretrained(tmp_path / "model" / "target_tokenizer")
    command(
        "train", "--model", tmp_path / "model", "--train", *parallel_files,
        "--valid", *parallel_files, "--steps", 60, "--eval-steps", 60, "--batch-size", 40,
        "--warmup", 10, "--learning-rate", 0.01, "--output", tmp_path / "run",
    )  # fmt: skip
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-60"):
        saved = AutoTokenizer.from_pretrained(folder / "target_tokenizer")
        assert saved.get_vocab() == german.get_vocab()
    assert AutoTokenizer.from_pretrained(tmp_path / "run").get_vocab() == english.get_vocab()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").eval()
    sources, targets = zip(*pairs, strict=True)
    labels = german(text_target=list(targets))["input_ids"]
    found = model.score(english(list(sources))["input_ids"], labels).sums.sum()
    tokens = sum(map(len, labels))
    assert found / tokens > -3, "chance is -5.9 a token"


def test_a_resumed_run_goes_on_from_its_checkpoint_with_its_tokenizer(
    command, parallel_files, tmp_path
):
    output = tmp_path / "run"
    common = ["--train", *parallel_files, *TINY, "--eval-steps", 2, "--output", output]
    command("train", *common, "--steps", 4)
    tokenizer = (output / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit, match=r"checkpoint-4 is from an earlier run"):
        command("train", *common, "--steps", 6)
    Path(parallel_files[0]).write_text("other words\n" * 80)
    command("train", *common, "--steps", 6, "--resume")
    results = json.loads((output / "results.json").read_text())
    assert (results["steps"], results["resumed"]) == (6, True)
    assert (output / "checkpoint-6").exists()
    assert (output / "tokenizer.json").read_bytes() == tokenizer
    with pytest.raises(SystemExit, match=r"checkpoint-6 has d_model 32, but this run has 48"):
        command("train", *common, "--steps", 8, "--resume", "--set", "d_model=48")
    with pytest.raises(SystemExit, match="no folder"):
        command("train", *common[:-1], tmp_path / "absent", "--resume")


def test_batches_of_similar_lengths_are_the_same_after_a_resume(command, parallel_files, tmp_path):
    common = ["--train", *parallel_files, *TINY, "--batch-size", 16, "--save-steps", 7]
    common += ["--steps", 12, "--warmup", 5]
    command("train", *common, "--output", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-7", tmp_path / "resumed" / "checkpoint-7")
    command("train", *common, "--output", tmp_path / "resumed", "--resume")
    whole, resumed = (
        (tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "resumed")
    )
    assert whole == resumed


def test_checkpoints_that_cannot_continue_a_run_are_refused(command, parallel_files, tmp_path):
    common = ["train", "--train", *parallel_files, *TINY, "--steps", 4, "--output", tmp_path / "a"]
    command(*common, "--save-steps", 2, "--trainer", "save_only_model=true")
    with pytest.raises(SystemExit, match=r"checkpoint-4 has no state of an optimizer"):
        command(*common, "--resume")
    common[-1] = tmp_path / "b"
    command(*common, "--save-steps", 2)
    shutil.rmtree(tmp_path / "b" / "checkpoint-4")
    with pytest.raises(SystemExit, match=r"checkpoint-2 was trained with the base learning rates"):
        command(*common, "--learning-rate", 0.5, "--resume")


def test_a_full_disk_at_the_end_of_a_run_leaves_every_file_whole(
    command, parallel_files, tmp_path, monkeypatch
):
    output = tmp_path / "run"
    arguments = [
        "train", "--model", FROZEN, "--train", *parallel_files, "--test", *parallel_files,
        "--steps", 4, "--save-steps", 2, "--average", 2, "--output", output,
    ]  # fmt: skip
    command(*arguments)
    flush = atomic_folder.flush
    for name in ("model.safetensors", "test.txt", "results.json", "README.md"):
        before = {path: path.read_bytes() for path in output.iterdir() if path.is_file()}

        def full(path, name=name):
            if name in path.name:
                raise OSError("No space left on device")
            flush(path)

        with monkeypatch.context() as patch:
            patch.setattr(atomic_folder, "flush", full)
            said = r"run\S* could not be saved: No space left on device \(\d+ MiB are free there"
            with pytest.raises(SystemExit, match=rf"vaswani train: .*{said}"):
                command(*arguments, "--resume")
        assert {path for path in output.iterdir() if path.is_file()} == set(before)
        assert (output / name).read_bytes() == before[output / name]
        json.loads((output / "results.json").read_text())
    AutoModelForSeq2SeqLM.from_pretrained(output)


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_training_does_not_replace_a_model_that_it_did_not_save(
    resume, command, parallel_files, tmp_path
):
    """The most important case is the model that is fine-tuned."""
    shutil.copytree(FROZEN, tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(SystemExit, match=r"model\.safetensors would be replaced: pass another"):
        command(
            "train", "--model", tmp_path / "model", "--train", *parallel_files,
            "--steps", 1, "--output", tmp_path / "model", *resume,
        )  # fmt: skip
    assert {path: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_default_training_arguments_are_the_papers():
    args = make_parser().parse_args(["--train", "x.tsv", "--output", "unused"])
    arguments = training_arguments(args, d_model=512)
    assert arguments.learning_rate == pytest.approx(512**-0.5 * 4000**-0.5)
    assert (arguments.lr_scheduler_type, arguments.warmup_steps) == ("inverse_sqrt", 4000)
    adam = (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon)
    assert adam == (0.9, 0.98, 1e-9)
    assert (arguments.weight_decay, arguments.max_grad_norm, arguments.max_steps) == (0, 0, 100_000)


def test_patience_follows_the_direction_of_its_score():
    words = ["--train", "x.tsv", "--valid", "x.tsv", "--output", "unused", "--patience", "3"]
    assert training_arguments(make_parser().parse_args(words), d_model=512).greater_is_better
    words += ["--trainer", "metric_for_best_model=loss"]
    assert not training_arguments(make_parser().parse_args(words), d_model=512).greater_is_better
    args = make_parser().parse_args([*words, "eval_strategy=no"])
    with pytest.raises(RunError, match="--patience needs evaluations"):
        training_arguments(args, d_model=512)


def test_the_best_checkpoint_is_kept_beside_those_to_average():
    words = ["--train", "x.tsv", "--valid", "x.tsv", "--output", "unused", "--average", "5"]
    words += ["--trainer", "save_strategy=steps"]
    for best, kept in (([], 5), (["metric_for_best_model=bleu"], 6)):
        arguments = training_arguments(make_parser().parse_args([*words, *best]), d_model=512)
        assert arguments.save_total_limit == kept
    args = make_parser().parse_args([*words, "load_best_model_at_end=true", "save_total_limit=5"])
    with pytest.raises(RunError, match="--average 5 needs as many checkpoints"):
        training_arguments(args, d_model=512)


def test_beams_of_the_command_line_override_those_in_the_recipe_of_a_run(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    words = ["--train", "x.tsv", "--output", "run", "--generation", "length_penalty=1"]
    recipe.write_text(recipe_of(make_parser().parse_args(words)))
    args = make_parser().parse_args(["--recipe", str(recipe), "--beams", "8"])
    assert args.generation == {"num_beams": 8, "length_penalty": 1}
    words = ["--recipe", str(recipe), "--beams", "8", "--generation", "num_beams=5"]
    assert make_parser().parse_args(words).generation["num_beams"] == 5


def test_texts_like_numbers_are_texts_in_the_recipe_of_a_run(tmp_path):
    words = ["--train", "x.tsv", "--output", "run", "--trainer", 'run_name="2024"', "seed=7"]
    args = make_parser().parse_args(words)
    (tmp_path / "recipe.yaml").write_text(recipe_of(args))
    again = make_parser().parse_args(["--recipe", str(tmp_path / "recipe.yaml")])
    assert again.trainer == args.trainer == {"run_name": "2024", "seed": 7}


@pytest.mark.parametrize("option", ["--preset", "--model", "--recipe", "--steps", "--generation"])
def test_an_option_without_its_value_is_an_error_of_the_command(option, capsys):
    parser = make_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["--train", "x.tsv", "--output", "run", option])
    assert f"{parser.prog}: argument {option}: expected" in capsys.readouterr().err


def test_a_run_has_one_recipe(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: other.yaml\n")
    for words, complaint in (
        (["--recipe", str(recipe)], "names another recipe: copy its settings"),
        (["--recipe", "a.yaml", "--recipe", "b.yaml"], "got a.yaml and b.yaml"),
    ):
        with pytest.raises(SystemExit):
            make_parser().parse_args(words)
        assert complaint in capsys.readouterr().err


def test_a_batch_size_beside_token_batches_is_told_to_be_that_of_evaluations(capsys):
    words = ["--train", "x.tsv", "--output", "run", "--preset", "tiny", "--batch-size", "32"]
    make_parser().parse_args(words)
    assert "--batch-size sets the batches of evaluations only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lack", "complaint"),
    [
        ({"pad_token": None}, "has no padding token"),
        ({"eos_token": None}, "has no end token"),
        ({}, "does not end a sentence with </s>"),
    ],
)
def test_a_tokenizer_that_cannot_end_sentences_is_refused_before_the_data_are_prepared(
    lack, complaint, command, parallel_files, tmp_path, monkeypatch
):
    monkeypatch.setattr(RunData, "prepare", lambda *_: pytest.fail("prepared"))
    vocabulary = {"[UNK]": 0, "<pad>": 1, "</s>": 2, "one": 3}
    special = {"unk_token": "[UNK]", "pad_token": "<pad>", "eos_token": "</s>"} | lack
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "tok")
    with pytest.raises(SystemExit, match=complaint):
        command(
            "train", "--train", *parallel_files, "--tokenizer", tmp_path / "tok",
            "--output", tmp_path / "run",
        )  # fmt: skip


def test_lines_beyond_the_learned_positions_are_named_before_training(
    command, parallel_files, tmp_path
):
    learned = ["position_encoding=learned", "max_position_embeddings=12"]
    call = ["train", "--train", *parallel_files, *TINY, *learned, "--steps", 1, "--warmup", 1]
    with pytest.raises(SystemExit, match=r"--max-length 256 is more than the 12 learned positions"):
        command(*call, "--output", tmp_path / "a")
    for split in ("valid", "test"):
        (tmp_path / "long.tsv").write_text("one\teins\n" + "one " * 20 + "\teins\n")
        data = [f"--{split}", tmp_path / "long.tsv", "--max-length", 12]
        with pytest.raises(SystemExit, match=r"Source 2 of the \w+ set has .* 12 learned"):
            command(*call, *data, "--output", tmp_path / split)


def test_training_stops_when_its_minutes_are_over(command, parallel_files, tmp_path):
    command(
        "train", "--train", *parallel_files, *TINY, "--steps", 100_000, "--minutes", 0.02,
        "--output", tmp_path / "run",
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "results.json").read_text())["steps"] < 100_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--preset", "huge"], "'huge' is unknown: .* The presets are tiny, small, base, "),
        (["--set", "dropout=1.5"], r"dropout must be in \[0, 1\)"),
        (["--set", "dropout"], "expected NAME=VALUE"),
        (["--set", "vocab_size=300"], "--set vocab_size: .* Pass --vocab-size"),
        (["--generation", "max_length=20"], "max_length has no effect, .*: pass max_new_tokens"),
        (["--set", "d_modle=32"], "'d_modle' is unknown: did you mean 'd_model'"),
        (["--set", "num_heads=4", "ffn_dim=128"], "'num_heads'.*'decoder_attention_heads'.*'ffn_"),
        (["--set", "my_note=32"], "'my_note' is unknown"),
        (
            ["--trainer", "weight_delay=0.1"],
            "'weight_delay' is unknown: did you mean 'weight_decay'",
        ),
        (["--muon", "--trainer", "optim=adafactor"], "--muon is an optimizer too: leave out --mu"),
        (["--trainer", "learning_rate=1e-4"], "has its own option: pass --learning-rate"),
        (
            ["--trainer", "hub_token=hf_secret"],
            "log in with `hf auth login`, or set the variable HF",
        ),
        (["--trainer", "predict_with_generate=false"], "evaluations always translate, so leave it"),
        (["--trainer", "batch_eval_metrics=true"], "scores are those of whole sets: leave them"),
        (["--trainer", "eval_do_concat_batches=false"], "scores are those of whole sets"),
        (["--scheduler", "lineer"], "'lineer' is unknown: did you mean 'linear'"),
        (["--scheduler", "cosine_with_min_lr"], "--scheduler cosine_with_min_lr: .*min_lr"),
        (["--seed", -1], "a seed must be between 0 and 4294967295, got -1"),
        (["--seed", 2**32], "a seed must be between 0 and 4294967295, got 4294967296"),
        (["--bleu-tokenize", "moses:de"], "--bleu-tokenize moses:de: sacreBLEU has no tokenizer"),
        (["--segmentations", 3], "--segmentations needs --bpe-dropout"),
        (["--bleu-tokenize", "13b"], "--bleu-tokenize 13b: "),
        (["--average", 3, "--trainer", "save_strategy=no"], "--average 3 needs as many checkpoint"),
        (
            ["--max-source-tokens", 90, "--trainer", "auto_find_batch_size=true"],
            "auto_find_batch_size would try the same batches again",
        ),
        (["--generation", "lenght_penalty=1"], "'lenght_penalty'.* mean 'length_penalty'"),
        (["--generation", "length_penalty=high"], "length_penalty must be a number, got 'high'"),
        (["--generation", "top_k=5"], "`top_k`|top_k"),
        (["--generation", "do_sample=true", "temperature=0"], "temperature must be greater than 0"),
        (
            ["--trainer", "adam_beta2=2"],
            "--trainer adam_beta2=2: Invalid beta parameter at index 1: 2",
        ),
        (["--trainer", "weight_decay=nan"], "--trainer weight_decay=nan: .*'str'"),
        (
            ["--trainer", "dataloader_num_workers=-1"],
            "--trainer dataloader_num_workers=-1: num_workers",
        ),
        (["--trainer", "save_strategy=best"], "--trainer save_strategy=best needs --patience"),
        (["--trainer", "resume_from_checkpoint=x"], "has its own option: pass --resume"),
        (["--results", ROOT], "is a folder: name a file"),
        (["--results", ROOT / "README.md" / "x.json"], "because .*README.md is not a writable"),
        (["--push-to-hub", "a b/c"], "Repo id must .*'a b/c'"),
        (
            ["--valid", "valid.tsv", "--trainer", "dataloader_drop_last=true"],
            "dataloader_drop_last=true would leave sentences out of evaluations",
        ),
        (
            ["--valid", "valid.tsv", "--trainer", "remove_unused_columns=false"],
            "remove_unused_columns=false would pass columns to `generate`",
        ),
        (["--generation", "num_beams=2", "--nbest", 3], "--nbest 3 needs at least as many --beams"),
        (["--tokenizer-kind", "regex", "--pattern", ""], "pattern is empty"),
        (["--model", FROZEN, "--nbest", 5], "--nbest 5 needs at least as many --beams, got 4"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_training(
    command, parallel_files, tmp_path, arguments, complaint, capsys
):
    with pytest.raises(SystemExit) as error:
        command(
            "train", "--train", *parallel_files, "--vocab-size", 340, *arguments,
            "--output", tmp_path / "run",
        )  # fmt: skip
    assert re.search(complaint, f"{error.value} {capsys.readouterr().err}")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_results_name_the_command_and_the_commit_of_the_package(parallel_files, tmp_path):
    arguments = ["train", "--model", str(FROZEN), "--train", *parallel_files, "--steps", "1"]
    arguments += ["--output", str(tmp_path / "run")]

    def command_elsewhere():
        os.chdir(tmp_path)
        sys.argv = ["vaswani", *arguments]
        runpy.run_module("vaswani", run_name="__main__", alter_sys=True)

    assert in_child(command_elsewhere) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert shlex.split(results["command"]) == ["vaswani", *arguments]
    describe = ["git", "-C", ROOT, "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    assert results["commit"] == commit or not commit


def test_an_upload_that_fails_says_where_the_model_is():
    def fail(repo_id):
        raise RuntimeError("no network")

    training = SimpleNamespace(model=SimpleNamespace(push_to_hub=fail), output=Path("runs/x"))
    with pytest.raises(
        RunError, match=r"complete in runs/x, .* no network\. Upload it with: hf up"
    ):
        TrainingRun.push(training, "someone/numbers")


@pytest.mark.slow
def test_training_pushes_a_complete_repository(parallel_files, tmp_path):
    with LoopbackHub() as hub:
        arguments = [
            "--model", FROZEN, "--train", *parallel_files, "--steps", "2",
            "--output", tmp_path / "run", "--push-to-hub", "someone/numbers",
        ]  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "vaswani", "train", *arguments],
            env=environment(**hub.environment),
            capture_output=True,
            check=True,
        )
        names = set(hub.files("someone/numbers"))
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {f"{room}_vaswani.py" for room in ("configuration", "modeling", "tokenization")} <= names


def test_an_objective_fine_tunes_a_saved_model_and_its_settings_stand_in_the_recipe(
    parallel_files, command, tmp_path
):
    common = ["--max-source-tokens", 200, "--warmup", 4, "--steps", 3, "--batching", "packed"]
    common += ["--muon", 0.5]
    command("train", "--train", *parallel_files, *TINY, *common, "--output", tmp_path / "first")
    command(
        "train", "--train", *parallel_files, "--model", tmp_path / "first", *common,
        "--objective", "risk", "--objective-settings", "reward=chrf", "candidates=2",
        "--output", tmp_path / "second",
    )  # fmt: skip
    results = json.loads((tmp_path / "second" / "results.json").read_text())
    assert results["arguments"]["objective"] == "MinimumRisk"
    assert results["arguments"]["muon"] == 0.5
    recipe = (tmp_path / "second" / "recipe.yaml").read_text()
    assert "objective: risk\nobjective-settings:\n  reward: chrf\n  candidates: 2\n" in recipe


def test_a_wrong_objective_setting_ends_the_run_with_a_sentence(parallel_files, command, tmp_path):
    with pytest.raises(SystemExit, match=r"no reward 'meteor': choose one of bleu, chrf"):
        command(
            "train", "--train", *parallel_files, "--objective", "risk",
            "--objective-settings", "reward=meteor", "--output", tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["risk", "reinforce"])
def test_an_objective_on_own_translations_warns_without_a_model(objective, capsys):
    words = ["--train", "x.tsv", "--output", "run", "--objective", objective]
    make_parser().parse_args(words)
    assert "--objective " in (warning := capsys.readouterr().err)
    assert "this model is not trained yet: train it without --objective first" in warning
    make_parser().parse_args([*words, "--model", str(FROZEN)])
    assert "not trained" not in capsys.readouterr().err


SAMPLING = "--train x.tsv --valid x.tsv --output run --objective scheduled_sampling"


@pytest.mark.parametrize(
    "words", ["--minutes 3", "--patience 3", "--minutes 3 --objective-settings schedule=linear"]
)
def test_a_schedule_of_sampling_needs_the_length_of_the_run(words, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(f"{SAMPLING} {words}".split())
    assert "pass --steps or --epochs beside --minutes or --patience" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--minutes 3 --steps 100000",
        "--minutes 3 --epochs 2",
        "--patience 3 --preset tiny",
        "--minutes 3 --objective-settings k=50",
        "--minutes 3 --objective-settings schedule=linear c=0.001",
    ],
)
def test_a_schedule_of_sampling_takes_a_known_length(words):
    assert make_parser().parse_args(f"{SAMPLING} {words}".split()).objective == "scheduled_sampling"


@pytest.mark.parametrize(
    ("value", "complaint"), [("save_strategy=stepz", "stepz"), ("optim=adamm", "adamm")]
)
def test_values_that_transformers_refuses_end_a_run_before_its_data_are_read(
    command, parallel_files, tmp_path, monkeypatch, value, complaint
):
    monkeypatch.setattr(RunData, "__init__", None)
    with pytest.raises(SystemExit, match=complaint):
        command(
            "train", "--train", *parallel_files, "--trainer", value, "--output", tmp_path / "run"
        )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((".5", 0.5), ("-.5e-3", -0.0005), ("5.", 5.0), ("1e-3", 0.001), ("07", "07")),
        *((".", "."), ("a.b", "a.b"), ("1.2.3", "1.2.3"), ("true", True), ("null", None)),
    ],
)
def test_values_of_settings_are_numbers_where_they_look_like_numbers(text, value):
    found = settings([f"name={text}"])["name"]
    assert (found, type(found)) == (value, type(value))


def test_a_folder_in_the_home_folder_may_be_named_by_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    args = make_parser().parse_args(
        ["--train", "a.tsv", "--output=~/run", "--data-cache=~/cache", "--results=~/all.json"]
    )
    found = [args.output, args.data_cache, args.results]
    assert found == [f"/home/somebody/{name}" for name in ("run", "cache", "all.json")]
