"""Launches of scripts in several processes on CPUs with gloo, with the flags of the docs."""

import contextlib
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import accelerate
from documents import ROOT, Page

# The launcher's flag for several processes. Without GPUs they run on CPUs.
SEVERAL = ("--multi_gpu",)
TRAIN = ("-m", "vaswani", "train")
# Where the text of torch's launcher begins when a process has failed, with the exit code before it.
_LAUNCHERS_TRACEBACK = 'Traceback (most recent call last):\n  File "<frozen runpy>"'

_CHANCE = random.SystemRandom()


def launch(processes, *words, flags=SEVERAL, paths=(), **variables):
    """Run a script or module with arguments in several processes, and return their output.

    `flags` are flags of `accelerate launch`, `paths` come first in PYTHONPATH, and `variables` are
    set in the environment.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += [*flags, "--num_processes", str(processes)]
    run = subprocess.run(
        [*command, *map(str, words)],
        cwd=ROOT,
        env=environment(paths, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    # Without the launcher's own traceback, the end of the text is the output of the processes.
    assert run.returncode == 0, run.stderr.partition(_LAUNCHERS_TRACEBACK)[0]
    return run.stdout


def environment(paths=(), **variables):
    """Return an environment with which a process imports package and tests from this checkout."""
    folders = (*paths, ROOT, ROOT / "tests")
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a process that a library aborts says where it was
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        **variables,
    }


def free_port():
    """Return a port that is free now. The system itself gives out only ports above this range."""
    while True:
        port = _CHANCE.randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def printed_flags(containing):
    """Return the flags of the `accelerate launch` command in docs/cluster.md with a given flag."""
    (command,) = Page(ROOT / "docs" / "cluster.md").commands("sh", containing)
    before, script, _ = command.partition(" -m vaswani train ")
    words = shlex.split(before)
    assert script
    assert words[:2] == ["accelerate", "launch"]
    number = words.index("--num_processes")
    return [*words[2:number], *words[number + 2 :]]


def accelerate_with_fsdp_on_cpus(folder):
    """Copy the installed Accelerate to a folder, and allow it to shard models on CPUs.

    On CPUs, Accelerate silently uses DDP instead of FSDP. The copy differs only in a list of device
    types, so that it runs the same code as on GPUs.
    """
    package = Path(folder) / "accelerate"
    shutil.copytree(Path(accelerate.__file__).parent, package)
    state = package / "state.py"
    source = state.read_text(encoding="utf-8")
    last_type = " " * 16 + "DistributedType.MULTI_NEURON,\n"
    closing = " " * 12 + "]:\n"
    assert source.count(last_type + closing) == 1
    added = last_type.replace("MULTI_NEURON", "MULTI_CPU")
    state.write_text(source.replace(last_type + closing, last_type + added + closing), "utf-8")
    return folder
