"""Checkpoint averaging (section 6.1): the mean, the saved folder and the errors."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_batching import make_trainer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from vaswani.commands.main import main
from vaswani.training.averaging import AverageCheckpoints, average_checkpoints

FROZEN = Path(__file__).parent / "frozen" / "0.1"


@pytest.fixture
def checkpoint(tmp_path):
    """Save tensors as a checkpoint folder, in one or several files."""

    def build(name, shards=None, config=None, **tensors):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        content = {"model_type": "vaswani"} if config is None else config
        (folder / "config.json").write_text(json.dumps(content))
        if shards is None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        for file, keys in zip(names, shards, strict=True):
            save_file({key: tensors[key] for key in keys}, folder / file, {"format": "pt"})
        weight_map = {key: file for file, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return build


@pytest.fixture
def run_of(checkpoint, tmp_path):
    """Make the output folder of a Trainer's run, where checkpoint-N has the tensor [N, -N]."""

    def build(*steps):
        for step in steps:
            weight = torch.tensor([float(step), -float(step)])
            folder = checkpoint(f"run/checkpoint-{step}", weight=weight)
            (folder / "trainer_state.json").write_text("{}")
        return tmp_path / "run"

    return build


def averaged(output):
    return load_file(Path(output) / "model.safetensors")


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_6_1_the_average_is_the_arithmetic_mean_of_each_weight(checkpoint, tmp_path):
    one = checkpoint("one", weight=torch.tensor([1.0, -2.0]), bias=torch.tensor([0.5]))
    two = checkpoint("two", weight=torch.tensor([2.0, 4.0]), bias=torch.tensor([0.5]))
    three = checkpoint("three", weight=torch.tensor([6.0, 1.0]), bias=torch.tensor([2.0]))
    result = averaged(average_checkpoints([one, two, three], tmp_path / "mean"))
    assert result.keys() == {"weight", "bias"}
    assert result["weight"].tolist() == [3.0, 1.0]  # (1 + 2 + 6) / 3, (-2 + 4 + 1) / 3
    assert result["bias"].tolist() == [1.0]


@pytest.mark.parametrize(("last", "mean"), [(1, 1000.0), (2, 950.0), (3, 650.0)])
def test_6_1_the_last_checkpoints_of_a_run_are_those_of_the_highest_steps(
    run_of, tmp_path, last, mean
):
    # Sorted as strings, 1000 would come first and 50 last.
    run = run_of(50, 1000, 900)
    (run / "checkpoint-best").mkdir()
    result = averaged(average_checkpoints(run, tmp_path / "mean", last=last))
    assert result["weight"].tolist() == [mean, -mean]


def test_averages_of_twenty_float32_checkpoints_equal_the_float64_mean(checkpoint, tmp_path):
    weights = torch.randn(20, 500, generator=torch.Generator().manual_seed(1))
    folders = [checkpoint(f"c{i}", weight=row.clone()) for i, row in enumerate(weights)]
    result = averaged(average_checkpoints(folders, tmp_path / "mean"))["weight"]
    torch.testing.assert_close(
        result.double(), weights.double().mean(dim=0), atol=1e-6, rtol=0, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_summed_in_float32_and_saved_in_their_own_dtype(
    checkpoint, tmp_path, dtype
):
    # One 1 and several times the next larger number: a sum in half precision loses the difference.
    step = torch.finfo(dtype).eps
    values = [1.0] + 7 * [1.0 + step]
    folders = [
        checkpoint(f"c{i}", weight=torch.tensor([value, -value], dtype=dtype))
        for i, value in enumerate(values)
    ]
    in_half = torch.zeros(2, dtype=dtype)
    for value in values:
        in_half += torch.tensor([value, -value], dtype=dtype)
    result = averaged(average_checkpoints(folders, tmp_path / "mean"))["weight"]
    assert result.dtype == dtype
    # The mean is 1 + 7/8 of a step, and the nearest number of the dtype is 1 + one step.
    assert result.tolist() == [1.0 + step, -1.0 - step]
    assert (in_half / 8).tolist() != result.tolist()


def test_float64_checkpoints_are_not_rounded_to_float32(checkpoint, tmp_path):
    folders = [
        checkpoint(str(i), weight=torch.tensor([1.0 + i * 2.0**-40], dtype=torch.float64))
        for i in range(2)
    ]
    result = averaged(average_checkpoints(folders, tmp_path / "mean"))["weight"]
    assert result.item() == 1.0 + 2.0**-41


@pytest.mark.parametrize("other_layout", [None, [["b"], ["a", "c"]]])
def test_sharded_checkpoints_give_the_mean_in_the_shards_of_the_last(
    checkpoint, tmp_path, other_layout
):
    def tensors(value):
        return {key: torch.tensor([value + i, 0.0]) for i, key in enumerate("abc")}

    layout = [["a", "b"], ["c"]]
    one = checkpoint("one", shards=other_layout, **tensors(1.0))
    two = checkpoint("two", shards=layout, **tensors(3.0))
    output = average_checkpoints([one, two], tmp_path / "mean")
    assert everything_in(output) == everything_in(two)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    for position, (key, file) in enumerate(index["weight_map"].items()):
        assert load_file(output / file)[key].tolist() == [2.0 + position, 0.0]


def test_a_sharded_average_loads(tiny_model, tmp_path):
    models = [tiny_model(seed=seed, dtype=torch.float32) for seed in (1, 2)]
    for name, model in zip("ab", models, strict=True):
        model.save_pretrained(tmp_path / name, max_shard_size="6KB")
    assert (tmp_path / "b" / "model.safetensors.index.json").exists()
    output = average_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    reloaded, info = AutoModelForSeq2SeqLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for mean, one, two in zip(
        reloaded.parameters(), *(model.parameters() for model in models), strict=True
    ):
        torch.testing.assert_close(mean, (one + two) / 2, atol=1e-7, rtol=1e-6)


def test_tied_weights_are_stored_once_and_stay_tied_after_reload(tiny_model, tmp_path):
    models = [tiny_model(seed=seed, dtype=torch.float32) for seed in (1, 2)]
    for name, model in zip("ab", models, strict=True):
        model.save_pretrained(tmp_path / name)
    output = average_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    vocabulary_sized = [key for key, tensor in averaged(output).items() if tensor.shape[0] == 19]
    assert vocabulary_sized == ["model.encoder.embed_tokens.weight"]
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(output)
    tables = [
        reloaded.model.encoder.embed_tokens.weight,
        reloaded.model.decoder.embed_tokens.weight,
        reloaded.lm_head.weight,
    ]
    assert tables[0] is tables[1] is tables[2]
    torch.testing.assert_close(
        tables[0], (models[0].lm_head.weight + models[1].lm_head.weight) / 2, atol=1e-7, rtol=1e-6
    )


def test_the_result_is_a_folder_that_translates_with_the_last_checkpoints_settings(tmp_path):
    for name in ("one", "two"):
        AutoModelForSeq2SeqLM.from_pretrained(FROZEN).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(FROZEN).save_pretrained(tmp_path / name)
    settings = GenerationConfig.from_pretrained(tmp_path / "two", max_length_offset=7)
    settings.save_pretrained(tmp_path / "two")
    output = average_checkpoints([tmp_path / "one", tmp_path / "two"], tmp_path / "mean")
    assert everything_in(output) == everything_in(tmp_path / "two")
    assert {path.name for path in output.glob("*.py")} >= {
        "configuration_vaswani.py",
        "modeling_vaswani.py",
        "tokenization_vaswani.py",
    }
    for path in output.iterdir():  # the mean of equal checkpoints is that checkpoint
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.generation_config.max_length_offset == 7
    ids = model.generate(**tokenizer("three hundred and forty-two", return_tensors="pt"))
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == ["dreihundertzweiundvierzig"]


def test_the_tokenizer_of_the_target_comes_from_the_run(run_of, tmp_path):
    run = run_of(1, 2)
    (run / "target_tokenizer").mkdir()
    (run / "target_tokenizer" / "tokenizer.json").write_text("{}")
    average_checkpoints(run, tmp_path / "mean", last=2)
    assert (tmp_path / "mean" / "target_tokenizer" / "tokenizer.json").read_text() == "{}"


def test_optimizer_trainer_state_and_scores_of_another_model_are_not_copied(run_of, tmp_path):
    run = run_of(1, 2)
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin", "eval_results.json"):
        (run / "checkpoint-2" / name).write_text("{}")
    (run / "checkpoint-2" / "tokenizer.json").write_text("{}")
    output = average_checkpoints(run, tmp_path / "mean", last=2)
    assert everything_in(output) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_integers_are_kept_where_they_agree_and_refused_where_they_differ(checkpoint, tmp_path):
    one = checkpoint("one", steps=torch.tensor([3]))
    two = checkpoint("two", steps=torch.tensor([3]))
    three = checkpoint("three", steps=torch.tensor([4]))
    assert averaged(average_checkpoints([one, two], tmp_path / "mean"))["steps"].tolist() == [3]
    with pytest.raises(ValueError, match=r"'steps' of .*three"):
        average_checkpoints([one, three], tmp_path / "other")


# --- errors, which leave no folder ---


@pytest.fixture
def refused(tmp_path):
    """Average folders, and expect an error and no new folder."""

    def run(checkpoints, error, match, **kwargs):
        before = everything_in(tmp_path)
        with pytest.raises(error, match=match):
            average_checkpoints(checkpoints, tmp_path / "mean", **kwargs)
        assert everything_in(tmp_path) == before

    return run


PAIR = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"weight": PAIR}, "bad has no tensor 'bias', but .*good"),
        (
            {"weight": PAIR, "bias": 2 * PAIR, "more": 3 * PAIR},
            "good has no tensor 'more', but .*bad",
        ),
        ({"weight": PAIR, "bias": torch.ones(3)}, r"'bias' is F32 \[3\] in .*bad, but F32 \[2\]"),
        ({"weight": PAIR, "bias": PAIR.half()}, r"'bias' is F16 \[2\] in .*bad, but F32 \[2\]"),
        ({"weight": PAIR, "bias": PAIR / 0}, "'bias' of .*bad holds numbers that are not finite"),
    ],
)
def test_tensors_that_differ_are_refused_by_folder_and_key(checkpoint, refused, tensors, match):
    bad = checkpoint("bad", **tensors)
    good = checkpoint("good", weight=PAIR, bias=2 * PAIR)
    refused([bad, good], ValueError, match)


def test_configurations_that_differ_are_refused_by_folder_and_field(checkpoint, refused):
    config = {"d_model": 8, "dropout": 0.1, "transformers_version": "5.23.0"}
    one = checkpoint("one", config=config, weight=PAIR)
    two = checkpoint("two", config=config | {"dropout": 0.3}, weight=PAIR)
    refused([one, two], ValueError, r"one and .*two differ in config.json: dropout \(0.1 and 0.3\)")


def test_another_version_of_transformers_is_no_difference(checkpoint, tmp_path):
    folders = [
        checkpoint(version, config={"transformers_version": version}, weight=PAIR)
        for version in ("5.17.0", "5.23.0")
    ]
    average_checkpoints(folders, tmp_path / "mean")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_checkpoint_without_a_needed_file_is_refused_by_name(checkpoint, refused, name):
    one, two = (checkpoint(name, weight=PAIR) for name in ("one", "two"))
    (one / name).unlink()
    refused([one, two], ValueError, rf"one is incomplete: .*{name}")


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_weights_cut_off_at_any_byte_are_refused_by_name(checkpoint, refused, kept):
    one, two = (checkpoint(name, weight=PAIR) for name in ("one", "two"))
    content = (one / "model.safetensors").read_bytes()
    (one / "model.safetensors").write_bytes(content[:kept])
    refused([one, two], ValueError, "one is damaged: model.safetensors is cut off or broken")


def test_a_missing_or_wrong_shard_is_refused_by_name(checkpoint, refused):
    shards = [["a"], ["b"]]
    one, two, three = (checkpoint(name, shards, a=PAIR, b=2 * PAIR) for name in ("1", "2", "3"))
    (one / "model-00002-of-00002.safetensors").unlink()
    refused([one, three], ValueError, "1 is incomplete: it has no model-00002-of-00002.safetensors")
    first = two / "model-00001-of-00002.safetensors"
    shutil.copyfile(first, two / "model-00002-of-00002.safetensors")
    refused([two, three], ValueError, "2 is damaged: .*disagree about 'a'")


def test_a_configuration_cut_off_is_refused_by_name(checkpoint, refused):
    one, two = (checkpoint(name, weight=PAIR) for name in ("one", "two"))
    (one / "config.json").write_text('{"d_model":')
    refused([one, two], ValueError, "one is damaged: config.json is not JSON")


def test_a_checkpoint_whose_saving_was_cut_off_is_refused_by_name(run_of, refused):
    run = run_of(1, 2, 3)
    (run / "checkpoint-3" / "trainer_state.json").unlink()
    refused(run, ValueError, r"Incomplete, .*checkpoint-3\. Remove", last=2)


def test_an_incomplete_checkpoint_that_is_not_asked_for_is_no_obstacle(run_of, tmp_path):
    run = run_of(1, 2, 3)
    (run / "checkpoint-1" / "trainer_state.json").unlink()
    result = averaged(average_checkpoints(run, tmp_path / "mean", last=2))
    assert result["weight"].tolist() == [2.5, -2.5]


def test_wrong_requests_are_refused_with_the_way_out(run_of, refused, tmp_path):
    run = run_of(1, 2)
    one = run / "checkpoint-1"
    refused(run, ValueError, "holds 2 checkpoint-N folders, fewer than the 3", last=3)
    refused(run, ValueError, "last must be at least 1, got 0", last=0)
    refused(run, ValueError, "is one folder: say how many")
    refused([], ValueError, "the list of checkpoints is empty")
    refused([one, run / "checkpoint-2"], ValueError, r"last \(2\) .* 2 checkpoints", last=2)
    refused([one, run / "." / "checkpoint-1"], ValueError, "checkpoint-1 is listed twice")
    refused([one, run / "checkpoint-9"], FileNotFoundError, "checkpoint-9")
    refused(tmp_path / "nowhere", FileNotFoundError, "nowhere", last=1)


def test_an_existing_output_is_refused_unless_empty(run_of, tmp_path):
    run = run_of(1, 2)
    output = tmp_path / "mean"
    output.mkdir()
    average_checkpoints(run, output, last=2)
    before = averaged(output)["weight"].tolist()
    with pytest.raises(FileExistsError, match="mean exists and is not an empty folder"):
        average_checkpoints(run, output, last=1)
    assert averaged(output)["weight"].tolist() == before
    with pytest.raises(FileExistsError, match="checkpoint-2 exists"):
        average_checkpoints(run, run / "checkpoint-2", last=1)


def test_a_disk_that_fills_while_saving_leaves_nothing_behind(run_of, refused, monkeypatch):
    run = run_of(1, 2)

    def write_some(tensors, path, metadata):
        Path(path).write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vaswani.training.averaging.save_file", write_some)
    refused(run, OSError, "No space left", last=2)


def test_the_output_appears_whole(run_of, tmp_path, monkeypatch):
    run, output, seen = run_of(1, 2), tmp_path / "mean", []

    def watched(name):
        original = getattr(shutil, name) if hasattr(shutil, name) else save_file

        def wrapper(*args, **kwargs):
            original(*args, **kwargs)
            seen.append((name, output.exists()))

        return wrapper

    monkeypatch.setattr("vaswani.training.averaging.save_file", watched("save_file"))
    monkeypatch.setattr("vaswani.training.averaging.shutil.copyfile", watched("copyfile"))
    average_checkpoints(run, output, last=2)
    assert seen == [("save_file", False), ("copyfile", False)]
    assert everything_in(output) == ["config.json", "model.safetensors"]
    assert not list(tmp_path.glob(".*"))


# --- memory ---


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_checkpoints(checkpoint, tmp_path):
    folders = [checkpoint(str(i), weight=torch.full((4_000_000,), float(i))) for i in range(9)]
    script = (
        "import resource, sys\n"
        "from vaswani.training.averaging import average_checkpoints\n"
        "average_checkpoints(sys.argv[2:3], sys.argv[1] + '-warm')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "average_checkpoints(sys.argv[2:], sys.argv[1])\n"
        "sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "mean"), *map(str, folders)]
    grown = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    ).stdout
    assert averaged(tmp_path / "mean")["weight"][:2].tolist() == [4.0, 4.0]
    # Eight more checkpoints would need 128,000 in these units. The allocator may keep freed memory.
    assert int(grown) < 64_000


# --- the command and the callback ---


def test_the_command_averages_the_last_checkpoints_of_a_run(run_of, tmp_path, capfd):
    run = run_of(1, 2, 4)
    main(["average", str(run), "--last", "2", "--output", str(tmp_path / "mean")])
    printed = capfd.readouterr()
    assert printed.out.strip() == str(tmp_path / "mean")
    assert "Warning" not in printed.err
    assert averaged(tmp_path / "mean")["weight"].tolist() == [3.0, -3.0]


def test_the_command_averages_listed_folders(run_of, tmp_path, capsys):
    run = run_of(1, 2, 4)
    folders = [str(run / "checkpoint-1"), str(run / "checkpoint-4")]
    main(["average", *folders, "-o", str(tmp_path / "mean")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "mean")
    assert averaged(tmp_path / "mean")["weight"].tolist() == [2.5, -2.5]


def test_the_command_names_what_is_wrong_in_one_line(run_of, tmp_path):
    run = run_of(1)
    with pytest.raises(SystemExit) as exit_of:
        main(["average", str(run), "--last", "5", "-o", str(tmp_path / "mean")])
    assert str(exit_of.value).startswith(f"vaswani average: {run} holds 1 checkpoint-N folders")
    with pytest.raises(SystemExit) as exit_of:
        main(["average", str(run), "-o", str(tmp_path / "mean")])
    assert "--last 5" in str(exit_of.value)


def test_the_help_of_the_command_shows_examples_and_the_papers_numbers(capsys):
    with pytest.raises(SystemExit) as exit_of:
        main(["average", "--help"])
    assert exit_of.value.code == 0
    text = capsys.readouterr().out
    assert "vaswani average runs/en-de --last 5 --output runs/en-de-averaged" in text
    assert re.search(r"last 5 .* base .* last 20 .* big", " ".join(text.split()))


@pytest.fixture
def trainer(tiny_model, tmp_path):
    """A Trainer of a small model that saves a checkpoint after each of 4 updates."""

    def build(*callbacks, **settings):
        pair = {"input_ids": [5, 6, 2], "labels": [7, 8, 2]}
        args = Seq2SeqTrainingArguments(
            **{
                "output_dir": str(tmp_path / "run"),
                "max_steps": 4,
                "save_steps": 1,
                "learning_rate": 0.01,
                "use_cpu": True,
                "report_to": "none",
                "disable_tqdm": True,
            }
            | settings
        )
        model = tiny_model(dtype=torch.float32)
        return Seq2SeqTrainer(
            model=model, args=args, train_dataset=[pair] * 64, callbacks=list(callbacks)
        )

    return build


def test_the_callback_averages_the_end_of_a_trainers_run(trainer, tmp_path):
    trainer(AverageCheckpoints(last=3)).train()
    names = [f"checkpoint-{step}" for step in (2, 3, 4)]
    weights = [averaged(tmp_path / "run" / name) for name in names]
    result = averaged(tmp_path / "run-averaged")
    assert result.keys() == weights[0].keys()
    for key, mean in result.items():
        expected = sum(each[key].double() for each in weights) / 3
        torch.testing.assert_close(mean.double(), expected, atol=3e-7, rtol=0)
    key = "model.encoder.layers.0.fc1.weight"
    assert not torch.equal(weights[0][key], weights[1][key])
    assert not torch.equal(result[key], weights[2][key])


def test_the_callback_averages_all_checkpoints_of_a_short_run_and_warns(
    trainer, tmp_path, monkeypatch
):
    warnings = []
    monkeypatch.setattr("vaswani.training.averaging.logger.warning", warnings.append)
    callback = AverageCheckpoints(last=5, output=tmp_path / "mean")
    trainer(callback, max_steps=2).train()
    one, two = (averaged(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2))
    for key, mean in averaged(tmp_path / "mean").items():
        torch.testing.assert_close(mean, (one[key] + two[key]) / 2, atol=1e-7, rtol=0)
    assert warnings == [
        f"{tmp_path / 'run'} has only 2 of the 5 checkpoints to average, so fewer are averaged."
    ]


def test_the_callback_refuses_before_training_what_would_fail_after_it(trainer, tmp_path):
    with pytest.raises(
        ValueError, match=r"save_total_limit=2 keeps too few .* the last 3: set it to 3"
    ):
        trainer(AverageCheckpoints(last=3), save_total_limit=2).train()
    with pytest.raises(ValueError, match="save_strategy='no'"):
        trainer(AverageCheckpoints(last=3), save_strategy="no").train()
    (tmp_path / "run-averaged").mkdir()
    (tmp_path / "run-averaged" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="run-averaged"):
        trainer(AverageCheckpoints(last=3)).train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_the_callback_leaves_out_later_checkpoints_of_an_earlier_run(trainer, tmp_path):
    trainer().train()
    earlier = averaged(tmp_path / "run" / "checkpoint-4")
    trainer(AverageCheckpoints(last=1), max_steps=2).train()
    result, last = averaged(tmp_path / "run-averaged"), averaged(tmp_path / "run" / "checkpoint-2")
    assert all(torch.equal(result[key], last[key]) for key in last)
    assert not all(torch.equal(result[key], earlier[key]) for key in earlier)


def test_the_best_checkpoint_needs_a_place_of_its_own(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "loss"}
    trainer = make_trainer(tmp_path, **settings, save_total_limit=3)
    trainer.add_callback(AverageCheckpoints(last=3))
    with pytest.raises(ValueError, match=r"the last 3: set it to 4, or leave it out"):
        trainer.train()


def test_checkpoints_of_adapters_are_refused_before_training(tmp_path, tiny_model):
    model = peft.get_peft_model(
        tiny_model(dtype=torch.float32), peft.LoraConfig(target_modules=["q_proj"])
    )
    trainer = make_trainer(tmp_path, model=model, save_strategy="steps", save_steps=1)
    trainer.add_callback(AverageCheckpoints(last=2))
    with pytest.raises(ValueError, match="Checkpoints of an adapter cannot be averaged"):
        trainer.train()
    assert trainer.state.global_step == 0
