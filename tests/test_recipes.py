"""Recipes have all settings of a published result, and `vaswani train` follows them."""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from forks import in_child
from num2words import num2words
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerState
from transformers.testing_utils import CaptureLogger
from vaswani.commands.main import main
from vaswani.commands.train import make_parser
from vaswani.corpora.reading import DataError, read_pairs
from vaswani.training import checkpoints, run, run_data
from vaswani.training.checkpoints import last_complete_checkpoint
from vaswani.training.run import TrainingRun
from vaswani.training.run_arguments import training_arguments
from vaswani.training.trainer import VaswaniTrainer

from vaswani import VaswaniConfig, VaswaniTokenizer, VaswaniTranslationPipeline

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"


def train(*arguments):
    """Run `vaswani train`."""
    main(["train", *map(str, arguments)])


def recipe_of(name, *arguments):
    return make_parser().parse_args(["--recipe", str(RECIPES / f"{name}.yaml"), *arguments])


def config_of(args):
    return VaswaniConfig.preset(args.preset, **{"vocab_size": args.vocab_size, **args.set})


def settings_of(args):
    """Return the settings of a recipe that publications state, by name."""
    config = config_of(args)
    arguments = training_arguments(args, config.d_model)
    assert config.encoder_layers == config.decoder_layers
    assert config.encoder_ffn_dim == config.decoder_ffn_dim
    assert config.encoder_attention_heads == config.decoder_attention_heads
    assert args.max_source_tokens == args.max_target_tokens
    return {
        "layers": config.encoder_layers,
        "d_model": config.d_model,
        "d_ff": config.encoder_ffn_dim,
        "heads": config.encoder_attention_heads,
        "dropout": config.dropout,
        "other dropout": {config.attention_dropout, config.activation_dropout},
        "label smoothing": config.label_smoothing,
        "tokens per update": args.max_source_tokens * args.accumulate,
        "updates": args.steps,
        "warm-up": args.warmup,
        "peak learning rate": args.learning_rate,
        "schedule": args.scheduler,
        "betas of Adam": (arguments.adam_beta1, arguments.adam_beta2),
        "epsilon of Adam": arguments.adam_epsilon,
        "largest gradient norm": arguments.max_grad_norm,
        "weight decay": arguments.weight_decay,
        "averaged checkpoints": args.average,
        "beams": args.beams,
    }


SHARED = {"other dropout": {0}, "label smoothing": 0.1, "betas of Adam": (0.9, 0.98)}
# Published by Wu et al. (2021) for Multi30k, by fairseq's logs for IWSLT, and by the paper for WMT
# (Table 3, sections 5 and 6.1). The paper's peak follows from equation 3.
PUBLISHED = {
    "multi30k-tiny": {
        **{"layers": 4, "d_model": 128, "d_ff": 256, "heads": 4, "dropout": 0.3},
        **{"warm-up": 2000, "peak learning rate": 5e-3, "epsilon of Adam": 1e-8},
        **{"largest gradient norm": 25, "averaged checkpoints": 10, "beams": 5},
        "weight decay": 0,
    },
    "iwslt14": {
        **{"layers": 6, "d_model": 512, "d_ff": 1024, "heads": 4, "dropout": 0.3},
        **{"tokens per update": 4096, "updates": 50_000, "warm-up": 4000},
        **{"peak learning rate": 5e-4, "schedule": "noam", "epsilon of Adam": 1e-8},
        **{"largest gradient norm": 0, "averaged checkpoints": 5, "beams": 5},
        "weight decay": 1e-4,
    },
    "wmt14-base": {
        **{"layers": 6, "d_model": 512, "d_ff": 2048, "heads": 8, "dropout": 0.1},
        **{"tokens per update": 25_000, "updates": 100_000, "warm-up": 4000},
        **{"peak learning rate": None, "schedule": "noam", "epsilon of Adam": 1e-9},
        **{"largest gradient norm": 0, "averaged checkpoints": 5, "beams": 4},
        "weight decay": 0,
    },
    "wmt14-big": {
        **{"layers": 6, "d_model": 1024, "d_ff": 4096, "heads": 16, "dropout": 0.3},
        **{"tokens per update": 25_000, "updates": 300_000, "warm-up": 4000},
        **{"peak learning rate": None, "schedule": "noam", "epsilon of Adam": 1e-9},
        **{"largest gradient norm": 0, "averaged checkpoints": 20, "beams": 4},
        "weight decay": 0,
    },
}
# Chosen by this project. Wu et al. have 8192 tokens per update, stop by the validation loss, and
# lower the learning rate with the square root of the update.
OURS = {
    "multi30k-tiny": {"tokens per update": 4096, "updates": 6000, "schedule": "linear"},
    "multi30k-muon": {
        **{"tokens per update": 4096, "updates": 4000, "schedule": "linear"},
        **{"warm-up": 500, "peak learning rate": 7e-3, "weight decay": 0.3},
    },
}
PUBLISHED["multi30k-muon"] = {
    name: value
    for name, value in PUBLISHED["multi30k-tiny"].items()
    if name not in OURS["multi30k-muon"]
}
NAMES = (*PUBLISHED, "g2p-eng_us")


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_the_published_settings(name):
    """Every setting is published, except those that `OURS` names."""
    published, ours = SHARED | PUBLISHED[name], OURS.get(name, {})
    assert not published.keys() & ours.keys()
    assert settings_of(recipe_of(name)) == published | ours


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_run_stands_in_its_recipe(name):
    """The file must have every field of the preset that differs from its default."""
    args = recipe_of(name)
    fields = args.set
    preset, default = (VaswaniConfig.preset(row).to_dict() for row in (args.preset, "base"))
    assert {key for key in preset if preset[key] != default[key]} <= set(fields)
    sizes = {"d_model", "dropout", "attention_dropout", "activation_dropout", "label_smoothing"}
    sizes |= {f"{s}_{size}" for s in ("encoder", "decoder") for size in ("layers", "ffn_dim")}
    assert sizes <= set(fields)
    assert {"adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"} <= set(
        args.trainer
    )
    settings = {"num_beams", "length_penalty_type", "length_penalty", "max_length_offset"}
    assert settings == set(args.generation)
    text = (RECIPES / f"{name}.yaml").read_text()
    stated = set(re.findall(r"^([\w-]+):", text, re.M))
    assert {"train", "valid", "test", "output", "steps", "warmup", "scheduler", "beams"} <= stated
    assert {"tokenizer-kind", "vocab-size", "preset", "max-source-tokens", "accumulate"} <= stated
    assert {"bf16", "seed", "save-steps", "eval-steps", "average", "bleu-tokenize"} <= stated


@pytest.mark.parametrize("stage", ["r-drop", "risk"])
def test_a_second_stage_goes_on_from_a_model_and_its_settings_stand_in_its_recipe(stage):
    name = "multi30k-muon"
    path = RECIPES / f"{name}-{stage}.yaml"
    first, more = recipe_of(name), recipe_of(path.stem)
    assert more.model == first.output
    assert (first.r_drop, first.objective) == (0, None)
    same = ("train", "valid", "test", "generation", "beams", "bleu_tokenize", "average")
    same += ("seed", "bf16", "scheduler", "batching")
    if stage == "r-drop":
        assert more.r_drop == 1
        same += ("trainer", "muon")
    else:
        settings = {"reward": "bleu", "candidates": 10, "sharpness": 0.005}
        assert (more.objective, more.objective_settings) == ("risk", settings)
    for setting in same:
        assert getattr(more, setting) == getattr(first, setting), setting
    stated = set(re.findall(r"^([\w-]+):", path.read_text(), re.M))
    assert {"max-source-tokens", "accumulate", "steps", "warmup", "learning-rate"} <= stated
    assert {"save-steps", "eval-steps", "output", "trainer"} <= stated
    assert set(same) - {"bleu_tokenize"} <= stated
    assert re.findall(r"^#   (vaswani .*)$", path.read_text(), re.M) == [
        f"vaswani train --recipe examples/recipes/{recipe}.yaml" for recipe in (name, path.stem)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_a_recipe_reads_that_recipe(name):
    comments = re.findall(r"^# ?(.*)$", (RECIPES / f"{name}.yaml").read_text(), re.M)
    text = "\n".join(comments)
    (command,) = re.findall(r"^ +((?:vaswani|accelerate launch)(?:.*\\\n)*.*)$", text, re.M)
    words = shlex.split(command.replace("\\\n", " "))
    arguments = words[words.index("train") + 1 :]
    assert arguments[:2] == ["--recipe", f"examples/recipes/{name}.yaml"]
    assert make_parser().parse_args(["--recipe", str(RECIPES / f"{name}.yaml"), *arguments[2:]])
    if "--num_processes" in words:
        processes = int(words[words.index("--num_processes") + 1])
        args = recipe_of(name, *arguments[2:])
        assert args.max_source_tokens * processes == recipe_of(name).max_source_tokens


def test_the_command_line_comes_after_the_recipe():
    args = recipe_of("multi30k-tiny", "--set", "dropout=0.2", "--steps", "7", "--bf16")
    assert (args.steps, args.bf16, args.warmup) == (7, True, 2000)
    assert args.set["dropout"] == 0.2
    assert args.set["d_model"] == 128
    assert recipe_of("g2p-eng_us").languages == ["en"]
    assert recipe_of("g2p-eng_us", "--train", "fr.tsv").languages is None
    given = recipe_of("g2p-eng_us", "--train", "fr.tsv", "--languages", "fr")
    assert given.languages == ["fr"]
    args = recipe_of("multi30k-tiny", "--epochs", "2")
    assert (args.steps, args.epochs) == (None, 2)
    args = recipe_of("multi30k-tiny", "--no-bf16", "--generation", "length_penalty=0.6")
    assert args.bf16 is False
    assert args.generation["length_penalty"] == 0.6
    assert args.trainer["adam_epsilon"] == 1e-8


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        ("stepz: 7", "--stepz is unknown: did you mean --steps?"),
        ("tag: [no, en]", "tag holds true, false or null, as YAML reads yes, no and ~"),
        ("tag: [en, ~]", "tag holds true, false or null, as YAML reads yes, no and ~"),
        ("steps: many", "argument --steps: invalid integer value: 'many'"),
        ("- steps", "holds no settings"),
        ("steps: [7", "recipe.yaml"),
        (None, "No such file"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path, capsys, recipe, complaint):
    path = tmp_path / "recipe.yaml"
    if recipe is not None:
        path.write_text(recipe)
    with pytest.raises(SystemExit) as error:
        make_parser().parse_args(["--recipe", str(path), "--train", "x.tsv", "--output", "unused"])
    assert complaint in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-target-tokens", "8"], "--max-target-tokens needs --max-source-tokens"),
        (["--batching", "packed"], "--batching packed needs --max-source-tokens"),
        (["--objective", "risk", "--r-drop", "2"], "leave out --r-drop or --objective"),
        (["--objective-settings", "k=1"], "--objective-settings needs --objective"),
        (["--objective", "risk", "--objective-settings", "k"], "--objective-settings: expected"),
        (["--patience", "3"], "--patience needs --valid"),
        (["--r-drop", "nan"], "--r-drop: must be 0 or more, got nan"),
        (["--nbest", "5"], "--nbest 5 needs at least as many --beams, got 4"),
        (["--average", "0"], "--average: must be at least 1, got 0"),
    ],
)
def test_settings_that_need_others_are_refused_without(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--train", "x.tsv", "--output", "unused", *arguments])
    assert complaint in capsys.readouterr().err


@pytest.fixture
def recipe(tmp_path):
    """The recipe of a small run on 80 pairs of number words."""
    rows = [f"{num2words(n)}\t{num2words(n, lang='de')}\n" for n in range(100, 180)]
    (tmp_path / "pairs.tsv").write_text("".join(rows), encoding="utf-8")
    settings = {
        **{name: [str(tmp_path / "pairs.tsv")] for name in ("train", "valid", "test")},
        "output": str(tmp_path / "run"),
        "vocab-size": 340,
        "set": {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
        "max-source-tokens": 200,
        "max-target-tokens": 150,
        "accumulate": 2,
        "steps": 12,
        "warmup": 4,
        "save-steps": 3,
        "eval-steps": 6,
        "average": 3,
        "beams": 3,
        "nbest": 3,
        "score": "exact_match",
        "generation": {"length_penalty_type": "hf", "length_penalty": 1.5},
        "trainer": {"max_grad_norm": 1.0, "logging_steps": 4},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def test_a_run_leaves_model_scores_translations_picture_and_logs(recipe, tmp_path):
    train("--recipe", recipe)
    output = tmp_path / "run"
    model, tokenizer = (
        auto.from_pretrained(output) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    settings = model.generation_config
    assert (settings.num_beams, settings.length_penalty_type) == (3, "hf")
    assert settings.length_penalty == 1.5
    checkpoint = AutoModelForSeq2SeqLM.from_pretrained(output / "checkpoint-12")
    assert checkpoint.generation_config.to_dict() == settings.to_dict()
    results = json.loads((output / "results.json").read_text())
    # The model is the mean of the last three checkpoints.
    assert results["averaged"] == ["checkpoint-6", "checkpoint-9", "checkpoint-12"]
    parts = [load_file(output / name / "model.safetensors") for name in results["averaged"]]
    for name, value in load_file(output / "model.safetensors").items():
        mean = torch.stack([part[name].double() for part in parts]).mean(dim=0)
        torch.testing.assert_close(value.double(), mean, atol=1e-7, rtol=1e-6)
    # The scores are those of the saved model with its saved settings.
    rows = (tmp_path / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    sources, references = zip(*(row.split("\t") for row in rows), strict=True)
    nbest = VaswaniTranslationPipeline(model.eval(), tokenizer)(
        list(sources), num_return_sequences=3
    )
    candidates = [[candidate["translation_text"] for candidate in best] for best in nbest]
    translations = (output / "test.txt").read_text(encoding="utf-8").splitlines()
    assert translations == [best for best, *_ in candidates]
    score = sacrebleu.corpus_bleu(translations, [references])
    assert results["test"]["bleu"] == round(score.score, 2)
    for k, accuracy in enumerate(results["test"]["nbest_accuracy"], start=1):
        found = sum(r in best[:k] for r, best in zip(references, candidates, strict=True))
        assert accuracy == round(100 * found / 80, 2)
    # Losses, validation scores and their picture.
    log = results["log"]
    assert [entry["step"] for entry in log if "loss" in entry] == [4, 8, 12]
    assert [entry["step"] for entry in log if "eval_exact_match" in entry] == [6, 12]
    assert results["settings"]["max_target_tokens"] == 150
    assert (output / "learning_curve.png").stat().st_size > 1000
    assert list((output / "runs").rglob("events.out.tfevents.*"))
    # Equation 3, where the first update is step 1.
    for entry in log:
        if "learning_rate" in entry:
            step = entry["step"]
            expected = 32**-0.5 * min(step**-0.5, step * 4**-1.5)
            assert entry["learning_rate"] == pytest.approx(expected)


@pytest.mark.parametrize(("save", "dropout"), [(1, 0), (2, 0), (2, 0.2)])
def test_a_killed_run_resumes_and_ends_with_the_same_model(recipe, tmp_path, save, dropout):
    options = ("--recipe", recipe, "--bpe-dropout", dropout, "--r-drop", 10 * dropout)
    train(*options, "--output", tmp_path / "whole")

    def train_until_killed():
        to_json, saves = TrainerState.save_to_json, []

        def deadly(*args):
            saves.append(args)
            if len(saves) == save:
                os.kill(os.getpid(), signal.SIGKILL)
            to_json(*args)

        TrainerState.save_to_json = deadly
        train(*options)

    assert in_child(train_until_killed) == -signal.SIGKILL
    with CaptureLogger(checkpoints.logger) as log:
        last = last_complete_checkpoint(tmp_path / "run")
    assert (last and last.name) == (None if save == 1 else "checkpoint-3")
    assert f"checkpoint-{3 * save} is incomplete" in log.out
    with pytest.raises(SystemExit, match="is from an earlier run: pass --resume"):
        train(*options)
    train(*options, "--resume")
    whole, resumed = (
        (tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "run")
    )
    assert whole == resumed
    scores = [
        json.loads((tmp_path / run / "results.json").read_text())["test"]["nbest_accuracy"]
        for run in ("whole", "run")
    ]
    assert scores[0] == scores[1]


def test_an_epoch_of_bpe_dropout_has_every_pair_in_several_cuts(recipe):
    args = make_parser().parse_args(
        ["--recipe", str(recipe), "--bpe-dropout", "0.3", "--segmentations=3"]
    )
    run = TrainingRun(args)
    data, tokenizer = run.trainer.train_dataset, run.tokenizer
    pairs = read_pairs(args.train, args.columns, "train")
    assert len(data) == 3 * len(pairs)
    for side, name in enumerate(("input_ids", "labels")):
        epochs = []
        for epoch in (0, 1):
            data.set_epoch(epoch)
            epochs.append([row[name] for row in data.__getitems__(range(240))])
            texts = tokenizer.batch_decode(epochs[-1], skip_special_tokens=True)
            assert texts == [pair[side] for pair in pairs] * 3
            assert (np.array([len(ids) for ids in epochs[-1]]) <= data.lengths[:, side]).all()
        looks = [ids[start : start + 80] for ids in epochs for start in (0, 80, 160)]
        assert all(one != other for one, other in combinations(looks, 2))
    args.tokenizer_kind = "word"
    with pytest.raises(DataError, match=r"--bpe-dropout: .* BPE .* WordLevel"):
        _ = TrainingRun(args).trainer


def test_a_loss_that_is_not_finite_ends_the_command_with_its_update(recipe, tmp_path, monkeypatch):
    compute_loss = VaswaniTrainer.compute_loss

    def diverging(self, *args, **kwargs):
        loss = compute_loss(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 4 else loss

    monkeypatch.setattr(VaswaniTrainer, "compute_loss", diverging)
    with pytest.raises(SystemExit, match=r"loss is nan in update 5.*complete .*checkpoint-3\."):
        train("--recipe", recipe)
    assert last_complete_checkpoint(tmp_path / "run").name == "checkpoint-3"


@pytest.fixture
def falling_scores(monkeypatch):
    """Let the score of each evaluation be lower than the one before."""
    scores = iter(range(100, 0, -1))

    class Falling:
        def compute(self, **kwargs):
            names = ("chrf", "bleu", "exact_match", "compound_split_bleu", "brevity_penalty")
            signatures = [f"{name}_signature" for name in ("bleu", "chrf", "compound_split_bleu")]
            return dict.fromkeys(names, next(scores)) | dict.fromkeys(signatures, "none")

    monkeypatch.setattr(run, "TranslationMetric", lambda *args: Falling())


def test_early_stopping_is_added_and_changed_when_a_run_is_resumed(
    recipe, tmp_path, falling_scores
):
    common, steps = ["--recipe", recipe, "--eval-steps", 3, "--average", 1], []
    for changes in (["--steps", 6], ["--patience", 2, "--resume"], ["--patience", 4, "--resume"]):
        train(*common, *(changes if "--steps" in changes else ["--steps", 100, *changes]))
        steps.append(json.loads((tmp_path / "run" / "results.json").read_text())["steps"])
    # The first evaluation after update 6 sets the best score. Two worse ones end the run.
    assert steps == [6, 15, 21]


def test_training_stops_when_the_score_no_longer_rises(recipe, tmp_path, falling_scores):
    arguments = ["--patience", 2, "--eval-steps", 3, "--steps", 100, "--average", 1]
    train("--recipe", recipe, *arguments)
    for lost in ("results.json", "checkpoint-9"):  # killed at the end, and before it stopped
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["steps"] == 9
        path = tmp_path / "run" / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        train("--recipe", recipe, *arguments, "--resume")
    assert json.loads((tmp_path / "run" / "results.json").read_text())["steps"] == 9


def test_a_run_that_ends_with_its_time_is_resumed_and_averaged_to_its_last_update(recipe, tmp_path):
    output, arguments = tmp_path / "run", ["--minutes", 1e-9, "--save-steps", 50]
    train("--recipe", recipe, *arguments)
    results = json.loads((output / "results.json").read_text())
    assert (results["steps"], results["averaged"]) == (1, ["checkpoint-1"])
    # A kill may leave a checkpoint with a higher number than the run now reaches.
    checkpoints.begin_checkpoint(output / "checkpoint-50")
    train("--recipe", recipe, *arguments, "--resume")
    results = json.loads((output / "results.json").read_text())
    assert (results["steps"], results["averaged"]) == (2, ["checkpoint-1", "checkpoint-2"])


def test_a_run_killed_while_it_reads_its_data_can_be_resumed(recipe, tmp_path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_data, "prepare", killed)
    for arguments in ([], ["--resume"]):
        with pytest.raises(SystemExit, match="130"):  # the exit status after Ctrl-C
            train("--recipe", recipe, *arguments)


def test_weights_of_16_bits_are_fine_tuned_in_32(recipe, tmp_path):
    frozen = ROOT / "tests" / "frozen" / "0.1"
    folder, output = tmp_path / "half", tmp_path / "fine"
    AutoModelForSeq2SeqLM.from_pretrained(frozen, dtype=torch.float16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(frozen).save_pretrained(folder)
    train("--model", folder, "--train", tmp_path / "pairs.tsv", "--steps", 1, "--output", output)
    assert {value.dtype for value in load_file(output / "model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize("value", ["null", "7", '["eins"]'])
def test_a_record_that_is_no_text_is_refused_by_file_and_record(tmp_path, value):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"en": "two", "de": "zwei"}}\n{{"en": "one", "de": {value}}}\n')
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 2: 'de' is .*, not text"):
        read_pairs([str(path)], ("en", "de"), "train")
    path.write_text('["one", "eins"]\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"line 1: .* is not a JSON object"):
        read_pairs([str(path)], ("en", "de"), "train")


def test_an_empty_file_beside_a_full_one_is_refused_with_both_names(tmp_path):
    for name, text in (("empty", ""), ("full", "a\nb\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"full has 2 lines, .*empty has 0.*line 1 has no partner"):
        read_pairs([str(tmp_path / "full"), str(tmp_path / "empty")], ("a", "b"), "train")


def test_the_g2p_pattern_makes_a_token_of_every_letter_and_every_phone():
    if "VASWANI_DATA" not in os.environ:
        pytest.skip("VASWANI_DATA, a folder that holds g2p-eng_us/, is not set")
    data = Path(os.environ["VASWANI_DATA"]) / "g2p-eng_us" / "train.tsv.gz"
    with gzip.open(data, "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t") for line in file]
    args = recipe_of("g2p-eng_us")
    tokenizer = VaswaniTokenizer.train_from_iterator(
        [text for pair in pairs for text in pair],
        args.tokenizer_kind,
        args.vocab_size,
        pattern=args.pattern,
        show_progress=False,
    )
    assert len(tokenizer) < args.vocab_size
    for word, phones in pairs:
        letters, sounds = tokenizer([word, phones])["input_ids"]
        assert tokenizer.decode(sounds, skip_special_tokens=True) == phones
        assert len(letters) == len(word) + 1
        # A length mark before its phone, an error in the data, is a separate token.
        assert len(sounds) - 1 - len(phones.split()) == sum(p[0] in "ːˑ" for p in phones.split())
