"""Unattended runs: if processes and machines die at random moments, the weights are the same."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from documents import ROOT
from forks import forked
from launches import environment, free_port
from safetensors.torch import load_file

TRAIN = ("-m", "vaswani", "train")
SIZES = ["d_model=32", "encoder_layers=1", "decoder_layers=1", "encoder_attention_heads=4"]
SIZES += ["decoder_attention_heads=4", "encoder_ffn_dim=64", "decoder_ffn_dim=64"]
RESTARTS = 10
KILLS = 3
MINUTES = 8
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Arguments of a run of a few seconds with dropout and many saves, without the output."""
    folder = tmp_path_factory.mktemp("data")
    random.seed(4)
    for side in ("source", "target"):
        words = [random.choices("abcdefgh", k=random.randint(1, 9)) for _ in range(150)]
        (folder / side).write_text("".join(" ".join(line) + "\n" for line in words))
    return [
        *TRAIN, "--train", folder / "source", folder / "target", "--vocab-size", 300,
        "--steps", 120, "--eval-steps", 10, "--warmup", 20, "--max-source-tokens", 200,
        "--set", *SIZES, "--resume", "auto",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """The weights of an uninterrupted run of two processes."""
    output = tmp_path_factory.mktemp("whole")
    forked(2, *arguments, "--output", output)
    return load_file(output / "model.safetensors")


def launcher(flags, arguments, output):
    """Start torch's launcher in a separate session, with its log beside the output of the run."""
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *arguments]
    with open(f"{output}.log", "ab") as log:
        return subprocess.Popen(
            [*map(str, command), "--output", str(output)],
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def workers(run):
    """Return the training processes, without the launcher and the processes of data loaders."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            child for child in psutil.Process(run.pid).children() if TRAIN[1] in child.cmdline()
        ]
    return []


def saved_updates(output):
    """Return the updates of the last checkpoint, 0 if there is none."""
    saved = [path.name.partition("-")[2] for path in output.glob("checkpoint-*")]
    return max((int(updates) for updates in saved if updates.isdigit()), default=0)


def assert_same_weights(output, whole):
    weights = load_file(output / "model.safetensors")
    assert weights.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in weights.items())


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_killed_at_random_moments_change_no_weight(arguments, whole, tmp_path, seed):
    chance, output, kills = random.Random(seed), tmp_path / "run", 0
    flags = ["--standalone", "--nproc_per_node", 2, "--max-restarts", RESTARTS]
    run = launcher(flags, arguments, output)
    end, kill_after = time.monotonic() + 60 * MINUTES, chance.randrange(30)
    while run.poll() is None and time.monotonic() < end:
        time.sleep(chance.uniform(0, 0.2))
        alive = workers(run)
        if kills < KILLS and alive and saved_updates(output) >= kill_after:
            chance.choice(alive).kill()
            kills += 1
            kill_after += chance.randrange(10, 40)
    assert run.wait(1) == 0, output.with_suffix(".log").read_text()
    assert kills == KILLS
    assert_same_weights(output, whole)


def test_a_machine_of_two_that_dies_and_comes_back_changes_no_weight(arguments, whole, tmp_path):
    """Each machine restarts its launcher until it succeeds, as a cluster manager does."""
    chance, output, kills = random.Random(5), tmp_path / "run", 0
    flags = ["--nnodes", 2, "--nproc_per_node", 1, "--max-restarts", RESTARTS]
    flags += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    # The other machine notices a death after 5 seconds. By default, it waits for 15.
    flags += ["--rdzv_id", "run", "--rdzv_conf", "keep_alive_interval=1,keep_alive_max_attempt=5"]
    machines = [launcher(flags, arguments, output) for _ in range(2)]
    end, kill_after = time.monotonic() + 60 * MINUTES, chance.randrange(30)
    try:
        while any(run.poll() != 0 for run in machines) and time.monotonic() < end:
            time.sleep(chance.uniform(0, 0.2))
            alive = [run for run in machines if run.poll() is None]
            if kills < KILLS and alive and saved_updates(output) >= kill_after:
                die(chance.choice(alive))
                kills += 1
                kill_after += chance.randrange(10, 40)
            machines = [
                launcher(flags, arguments, output) if run.poll() not in (None, 0) else run
                for run in machines
            ]
    finally:
        for run in machines:
            die(run)
    assert all(run.returncode == 0 for run in machines), (tmp_path / "run.log").read_text()
    assert kills == KILLS
    assert_same_weights(output, whole)


def die(run):
    """Kill a launcher and its processes at once, as in the failure of a machine."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(run.pid).children(recursive=True)]
    if run.poll() is None:
        run.send_signal(signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)
    run.wait()
