"""Kills, full disks and NaN: training loses no complete checkpoint and reports the fault."""

import contextlib
import errno
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from forks import forked, in_child
from safetensors.torch import load_file
from test_batching import STEPS, assert_bit_for_bit, make_trainer, needs_resume_on_cpus, weights
from transformers import Seq2SeqTrainer, TrainerCallback, TrainerState, modeling_utils
from transformers.testing_utils import CaptureLogger
from vaswani.training import checkpoints, saving, trainer
from vaswani.training.averaging import AverageCheckpoints
from vaswani.training.checkpoints import last_complete_checkpoint
from vaswani.training.trainer import VaswaniTrainer

ROOT = Path(__file__).resolve().parent.parent
SAVING = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of an uninterrupted run."""
    run = make_trainer(tmp_path_factory.mktemp("whole"), **SAVING)
    run.train()
    assert run.state.global_step == STEPS
    return weights(run)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(owner, name, number, when):
    """Kill this process before, in or after the given call of a function."""
    function, calls = getattr(owner, name), []

    def deadly(*args, **kwargs):
        calls.append(name)
        if len(calls) < number:
            return function(*args, **kwargs)
        if when == "before":
            die()
        result = function(*args, **kwargs)
        if when == "half way":
            path = next(value for value in args if isinstance(value, str | os.PathLike))
            os.truncate(path, os.path.getsize(path) // 2)
        die()
        return result

    setattr(owner, name, deadly)


# A checkpoint calls save_file once, torch.save four times (settings, optimizer, schedule, random
# numbers), and each other function once. The second checkpoint is that of step 6.
MOMENTS = {
    "before the folder": (saving, "begin_checkpoint", 2, "before"),
    "in an empty folder": (saving, "begin_checkpoint", 2, "after"),
    "in the weights": (modeling_utils, "safe_save_file", 2, "half way"),
    "after the weights": (modeling_utils, "safe_save_file", 2, "after"),
    "in the settings": (torch, "save", 5, "half way"),
    "before the optimizer": (torch, "save", 6, "before"),
    "in the optimizer": (torch, "save", 6, "half way"),
    "in the schedule": (torch, "save", 7, "half way"),
    "before the random numbers": (torch, "save", 8, "before"),
    "in the random numbers": (torch, "save", 8, "half way"),
    "before the state": (TrainerState, "save_to_json", 2, "before"),
    "in the state": (TrainerState, "save_to_json", 2, "half way"),
    "before it is declared complete": (saving, "finish_checkpoint", 2, "before"),
    "when it is complete": (saving, "finish_checkpoint", 2, "after"),
    "while the one before is removed": (checkpoints.shutil, "rmtree", 1, "before"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_inside_a_save_resumes_and_ends_with_the_same_weights(moment, whole, tmp_path):
    def train_until_killed():
        die_in(*MOMENTS[moment])
        make_trainer(tmp_path, **SAVING).train()

    assert in_child(train_until_killed) == -signal.SIGKILL
    complete = moment in ("when it is complete", "while the one before is removed")
    with CaptureLogger(checkpoints.logger) as log:
        last = last_complete_checkpoint(tmp_path)
    assert last.name == ("checkpoint-6" if complete else "checkpoint-3")
    left_incomplete = not complete and moment != "before the folder"
    assert (f"{tmp_path / 'checkpoint-6'} is incomplete" in log.out) == left_incomplete
    resumed = make_trainer(tmp_path, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_bit_for_bit(weights(resumed), whole)
    # The remains of the killed save are removed.
    names = {path.name for path in tmp_path.iterdir() if "checkpoint" in path.name}
    assert names == {f"checkpoint-{STEPS}"}


def test_a_run_killed_between_saves_resumes_and_ends_with_the_same_weights(whole, tmp_path):
    def train_until_killed():
        die_in(VaswaniTrainer, "training_step", 11, "after")
        make_trainer(tmp_path, **SAVING).train()

    assert in_child(train_until_killed) == -signal.SIGKILL
    resumed, steps = make_trainer(tmp_path, **SAVING), []
    training_step = resumed.training_step

    def counted(*args, **kwargs):
        steps.append(resumed.state.global_step)
        return training_step(*args, **kwargs)

    resumed.training_step = counted
    resumed.train(resume_from_checkpoint=True)
    assert steps == list(range(9, STEPS))
    assert_bit_for_bit(weights(resumed), whole)


@pytest.mark.parametrize("steps", [7, 10])  # at the end of an epoch, and inside one
def test_a_run_killed_after_its_last_save_takes_no_further_step(steps, tmp_path):
    whole = make_trainer(tmp_path, **SAVING, max_steps=steps)
    whole.train()
    resumed = make_trainer(tmp_path, **SAVING, max_steps=steps)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == steps
    assert_bit_for_bit(weights(resumed), weights(whole))


class Stop(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_resumed_run_that_is_to_stop_takes_no_further_step(five_checkpoints, tmp_path):
    resumed = make_trainer(tmp_path, callbacks=[Stop()])
    resumed.train(resume_from_checkpoint=str(five_checkpoints / "checkpoint-9"))
    assert resumed.state.global_step == 9


@pytest.mark.parametrize("saved", [1, 2])
def test_resuming_in_another_number_of_processes_is_told(saved, five_checkpoints, tmp_path):
    checkpoint = tmp_path / "checkpoint-14"
    shutil.copytree(five_checkpoints / "checkpoint-14", checkpoint)
    (checkpoint / checkpoints._MANIFEST).unlink()
    if saved == 2:
        shutil.copy(checkpoint / "rng_state.pth", checkpoint / "rng_state_1.pth")
        (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    resumed = make_trainer(tmp_path / "run")
    with CaptureLogger(trainer.logger) as log:
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert ("was saved by 2 process(es), but this run has 1" in log.out) == (saved == 2)
    assert resumed.state.global_step == 14


def test_a_run_killed_in_its_first_save_says_that_there_is_nothing_to_resume(whole, tmp_path):
    def train_until_killed():
        die_in(TrainerState, "save_to_json", 1, "before")
        make_trainer(tmp_path, **SAVING).train()

    assert in_child(train_until_killed) == -signal.SIGKILL
    again = make_trainer(tmp_path, **SAVING)
    with pytest.raises(ValueError, match=f"no complete checkpoint in {tmp_path} to resume from"):
        again.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="checkpoint-3 is incomplete: it was being saved when"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    again = make_trainer(tmp_path, **SAVING)
    again.train()
    assert_bit_for_bit(weights(again), whole)


class DieSoon(TrainerCallback):
    """Kill the process at a random moment of its next few steps and their saves."""

    def __init__(self):
        self.chance = random.SystemRandom()
        self.steps = self.chance.randint(1, 3)

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps -= 1
        if self.steps == 0:
            threading.Timer(self.chance.uniform(0, 0.03), die).start()


@pytest.mark.slow
def test_a_run_killed_again_and_again_at_random_ends_with_the_same_weights(whole, tmp_path):
    def train_on(*callbacks):
        resumable = last_complete_checkpoint(tmp_path) is not None
        run = make_trainer(tmp_path, **SAVING | {"save_steps": 1}, callbacks=list(callbacks))
        run.train(resume_from_checkpoint=resumable or None)

    kills = 0
    while kills < 12 and in_child(lambda: train_on(DieSoon())) == -signal.SIGKILL:
        kills += 1
    assert kills > 1
    assert in_child(train_on) == 0
    model = load_file(last_complete_checkpoint(tmp_path) / "model.safetensors")
    assert last_complete_checkpoint(tmp_path).name == f"checkpoint-{STEPS}"
    assert_bit_for_bit({name: whole[name] for name in model}, model)


def finished_run(folder, **changes):
    run = make_trainer(folder, **(SAVING | {"save_total_limit": None} | changes))
    run.train()
    return folder


@pytest.fixture(scope="module")
def five_checkpoints(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_checkpoint_that_lost_a_file_or_its_end_is_named_and_passed_over(
    name, damage, five_checkpoints, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(five_checkpoints, run)
    path = run / "checkpoint-14" / name
    if damage == "missing":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, size // 2 if path.suffix == ".json" else size - 1)
    with CaptureLogger(checkpoints.logger) as log:
        assert last_complete_checkpoint(run) == run / "checkpoint-12"
    flaw = f"{name} is missing" if damage == "missing" else f"{name} has"
    assert f"{run / 'checkpoint-14'} is incomplete and ignored: {flaw}" in log.out


def test_a_damaged_list_of_files_is_named_too(five_checkpoints, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(five_checkpoints, run)
    (run / "checkpoint-14" / checkpoints._MANIFEST).write_text('{"model')
    with CaptureLogger(checkpoints.logger) as log:
        assert last_complete_checkpoint(run) == run / "checkpoint-12"
    assert "checkpoint_files.json is damaged" in log.out


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        (None, None),
        ("trainer_state.json", "trainer_state.json is cut off or broken"),
        ("model.safetensors", "model.safetensors is cut off or broken"),
        ("optimizer.pt", "optimizer.pt is cut off or broken"),
        ("rng_state.pth", "rng_state.pth is cut off or broken"),
    ],
)
def test_checkpoints_of_transformers_own_trainer_are_judged_by_their_files(tmp_path, name, flaw):
    changes = {"trainer_class": Seq2SeqTrainer, "max_steps": 4, "save_steps": 2}
    finished_run(tmp_path, **changes)
    if name is not None:
        path = tmp_path / "checkpoint-4" / name
        os.truncate(path, path.stat().st_size // 2)
    with CaptureLogger(checkpoints.logger) as log:
        last = last_complete_checkpoint(tmp_path)
    assert last.name == ("checkpoint-4" if name is None else "checkpoint-2")
    assert log.out == "" if name is None else flaw in log.out
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-2"


def test_checkpoints_of_no_run_are_none(tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, [14]), (3, [9, 12, 14]), (None, [3, 6, 9, 12, 14])]
)
def test_as_many_checkpoints_stay_as_the_settings_say(tmp_path, limit, kept):
    finished_run(tmp_path, save_total_limit=limit)
    assert [path.name for path in checkpoints.run_checkpoints(tmp_path)] == [
        f"checkpoint-{step}" for step in kept
    ]


def test_the_best_checkpoint_stays_beside_the_newest(five_checkpoints, tmp_path):
    for limit, kept in ((1, [3, 14]), (2, [3, 14]), (3, [3, 12, 14])):
        run = tmp_path / str(limit)
        shutil.copytree(five_checkpoints, run)
        best = str(run / "checkpoint-3")
        checkpoints.limit_checkpoints(run / "checkpoint-14", limit, best)
        names = [path.name for path in checkpoints.run_checkpoints(run)]
        assert names == [f"checkpoint-{step}" for step in kept]


def test_checkpoints_that_were_cut_off_do_not_count_as_kept_ones(five_checkpoints, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(five_checkpoints, run)
    os.truncate(run / "checkpoint-12" / checkpoints._MANIFEST, 0)
    checkpoints.limit_checkpoints(run / "checkpoint-14", 2)
    names = [path.name for path in checkpoints.run_checkpoints(run)]
    assert names == ["checkpoint-9", "checkpoint-14"]


class RemoveOptimizers(TrainerCallback):
    """Remove the optimizer of every checkpoint but the newest, to save disk space."""

    def on_save(self, args, state, control, **kwargs):
        for folder in checkpoints.run_checkpoints(Path(args.output_dir)):
            if folder.name != f"checkpoint-{state.global_step}":
                (folder / "optimizer.pt").unlink(missing_ok=True)


def test_checkpoints_without_optimizers_stay_and_are_averaged(tmp_path):
    run = make_trainer(
        tmp_path / "run",
        **(SAVING | {"save_total_limit": 3}),
        callbacks=[RemoveOptimizers(), AverageCheckpoints(3)],
    )
    run.train()
    kept = checkpoints.run_checkpoints(tmp_path / "run")
    assert [path.name for path in kept] == ["checkpoint-9", "checkpoint-12", "checkpoint-14"]
    weights = [load_file(path / "model.safetensors") for path in kept]
    mean = load_file(tmp_path / "run-averaged" / "model.safetensors")
    for name, tensor in mean.items():
        expected = torch.stack([tensors[name] for tensors in weights]).mean(dim=0)
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("damage", ["missing", "cut off", "edited"])
def test_a_checkpoint_without_its_config_is_not_averaged(five_checkpoints, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(five_checkpoints, run)
    config = run / "checkpoint-12" / "config.json"
    if damage == "missing":
        config.unlink()
    elif damage == "cut off":
        os.truncate(config, 9)
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dropout": 0.2}))
    folders = checkpoints.checkpoints_to_average(run, 14)
    assert [path.name for path in folders] == [f"checkpoint-{step}" for step in (3, 6, 9, 14)]


def test_a_checkpoint_whose_settings_were_edited_is_complete(five_checkpoints, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(five_checkpoints, run)
    settings = json.loads((run / "checkpoint-14" / "config.json").read_text())
    (run / "checkpoint-14" / "config.json").write_text(json.dumps(settings | {"dropout": 0.2}))
    assert last_complete_checkpoint(run) == run / "checkpoint-14"


def test_a_checkpoint_of_an_earlier_run_does_not_complete_one_of_the_same_number(
    five_checkpoints, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(five_checkpoints, run)
    shutil.rmtree(run / "checkpoint-14")

    def resume_until_killed():
        die_in(TrainerState, "save_to_json", 1, "before")
        make_trainer(run, **SAVING).train(resume_from_checkpoint=str(run / "checkpoint-9"))

    assert in_child(resume_until_killed) == -signal.SIGKILL
    assert last_complete_checkpoint(run) == run / "checkpoint-9"


@pytest.mark.parametrize("file", ["weights", "optimizer", "list"])
def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint(
    file, whole, five_checkpoints, tmp_path
):
    """A limit on the size of files makes writing fail as a full disk does."""
    sizes = json.loads((five_checkpoints / "checkpoint-3" / checkpoints._MANIFEST).read_text())
    assert sizes["model.safetensors"] < sizes["optimizer.pt"]
    output, message = tmp_path / "run", tmp_path / "message"

    def train_until_full():
        run = make_trainer(output, **SAVING)
        begin, limits = saving.begin_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)
        allowed = {
            "weights": sizes["model.safetensors"] // 2,
            "optimizer": sizes["model.safetensors"] + 2000,
            "list": limits[0],
        }

        def refuse(path):
            raise OSError(errno.ENOSPC, "No space left on device")

        def fill_disk(folder):
            begin(folder)
            if folder.name == "checkpoint-6":
                resource.setrlimit(resource.RLIMIT_FSIZE, (allowed[file], limits[1]))
                if file == "list":
                    checkpoints.flush = refuse

        saving.begin_checkpoint = fill_disk
        try:
            run.train()
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            message.write_text(str(error))

    assert in_child(train_until_full) == 0
    assert f"{output / 'checkpoint-6'} could not be saved" in message.read_text()
    assert f"last complete checkpoint is {output / 'checkpoint-3'}." in message.read_text()
    assert "MiB are free" in message.read_text()
    assert [path.name for path in checkpoints.run_checkpoints(output)] == ["checkpoint-3"]
    resumed = make_trainer(output, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_bit_for_bit(weights(resumed), whole)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_number_that_is_not_finite_ends_training_before_it_reaches_the_weights(
    what, accumulate, tmp_path
):
    changes = SAVING | {"gradient_accumulation_steps": accumulate}
    whole = make_trainer(tmp_path / "whole", **changes)
    whole.train()
    run, calls = make_trainer(tmp_path / "run", **changes), []
    compute_loss = run.compute_loss

    def diverging(model, *args, **kwargs):
        loss = compute_loss(model, *args, **kwargs)
        calls.append(loss)
        if len(calls) == 5 * accumulate:
            # The square root of 0 is finite, but its derivative is not.
            zero = 0 * next(model.parameters()).sum()
            return loss * float("nan") if what == "loss" else loss + zero.sqrt()
        return loss

    run.compute_loss = diverging
    message = f"{what} is nan in update 5.*checkpoint-3.*lower learning rate"
    with pytest.raises(FloatingPointError, match=message):
        run.train()
    assert run.state.global_step == 4
    assert all(value.isfinite().all() for value in weights(run).values())
    resumed = make_trainer(tmp_path / "run", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_bit_for_bit(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("what", "fate"),
    [
        ("loss", "The weights were not changed by this update"),
        ("gradient", "The optimizer lomo may already have changed the weights in this update"),
    ],
)
def test_a_backend_that_updates_in_the_backward_pass_is_not_said_to_keep_the_weights(
    what, fate, tmp_path
):
    run = make_trainer(tmp_path, optim="lomo", max_steps=4)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    seen = []

    def backward(loss, **kwargs):
        """Update at once, as the engine of DeepSpeed does."""
        seen.append(weights(run))
        if what == "gradient" and len(seen) == 3:
            loss = loss + (0 * next(run.model.parameters()).sum()).sqrt()
        loss.backward()
        run.optimizer.step()

    run.accelerator.backward = backward
    if what == "loss":
        run.training_objective = lambda model, inputs, update: (
            model(**inputs).loss * (math.nan if update.number == 2 else 1)
        )
    with pytest.raises(FloatingPointError, match=f"{what} is nan in update 3. {fate}"):
        run.train()
    kept = all(value.isfinite().all() for value in weights(run).values())
    assert kept == (what == "loss")


def test_the_message_about_a_gradient_names_deepspeed(tmp_path):
    run = make_trainer(tmp_path)
    run.is_deepspeed_enabled = True
    with pytest.raises(FloatingPointError, match="DeepSpeed may already have changed the weights"):
        run._get_grad_norm(run.model, grad_norm=math.inf)


def main(job, output):
    """Train as one of two processes."""
    run = make_trainer(output, **SAVING)
    assert run.accelerator.num_processes == 2
    if job == "killed" and run.args.process_index == 1:
        # This process saves only its random numbers.
        die_in(torch, "save", 2, "before")
    run.train(resume_from_checkpoint=True if job == "resumed" else None)
    run.save_model()


@needs_resume_on_cpus
@pytest.mark.slow
def test_of_two_processes_one_killed_before_its_part_of_a_save_costs_nothing(tmp_path):
    for job, folder, fails in (
        ("whole", "whole", False),
        ("killed", "run", True),
        ("resumed", "run", False),
    ):
        with pytest.raises(AssertionError) if fails else contextlib.nullcontext():
            forked(2, __file__, job, tmp_path / folder)
        if fails:
            assert last_complete_checkpoint(tmp_path / "run").name == "checkpoint-3"
    resumed, whole = (load_file(tmp_path / run / "model.safetensors") for run in ("run", "whole"))
    assert_bit_for_bit(resumed, whole)


if __name__ == "__main__":
    main(*sys.argv[1:])


def checkpoints_of(run):
    return sorted(folder.name for folder in run.glob("checkpoint-*"))


def test_a_limit_of_minus_1_keeps_every_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3,
                           save_total_limit=-1)  # fmt: skip
    trainer.train()
    assert checkpoints_of(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_limit_of_a_run_stands_in_its_saved_arguments(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2,
                           save_total_limit=1)  # fmt: skip
    trainer.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    saved = torch.load(folder / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == trainer.args.save_total_limit == 1


def test_a_best_checkpoint_of_another_run_takes_no_place(tmp_path):
    folders = [tmp_path / f"checkpoint-{update}" for update in (1, 2, 3)]
    for folder in folders:
        checkpoints.begin_checkpoint(folder)
        (folder / "trainer_state.json").write_text("{}")
        checkpoints.finish_checkpoint(folder)
    checkpoints.limit_checkpoints(folders[-1], 3, best="elsewhere/checkpoint-9")
    assert checkpoints_of(tmp_path) == [folder.name for folder in folders]
