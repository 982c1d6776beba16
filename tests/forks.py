"""Forks, which start with the libraries imported.

Importing the libraries takes most of the time of a short training. Tests of launchers and of
start-up use `launches` instead.
"""

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import traceback
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
from documents import ROOT
from torch.distributed import TCPStore
from tqdm import tqdm

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["datasets", "peft", "vaswani.training.trainer"])


def in_child(function):
    """Run a function in a child process and return its exit code, -9 if it was killed.

    Skips the test if this process uses a GPU, which a forked process cannot use.
    """
    if torch.cuda.is_initialized():
        pytest.skip("a forked process cannot use a GPU: CUDA_VISIBLE_DEVICES= runs this test")
    if not (pid := os.fork()):
        # All forks share the lock of this process, and a child killed in it would never release it.
        tqdm.set_lock(threading.RLock())
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(processes, *words):
    """Run a script or module with arguments in several processes, and return their output.

    They are forks of a process that only imports, and get the variables of torch's launcher.
    """
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    words = list(map(str, words))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(processes)]
        for log in logs:
            log.touch()
        store = TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
        ranks = [
            FORKS.Process(target=_run, args=(words, _variables(rank, processes, store.port), log))
            for rank, log in enumerate(logs)
        ]
        for rank in ranks:
            rank.start()
        alive = list(ranks)
        while alive and not any(rank.exitcode for rank in ranks):
            connection.wait([rank.sentinel for rank in alive])
            alive = [rank for rank in ranks if rank.is_alive()]
        for rank in alive:  # they would wait for the one that failed
            rank.kill()
        outputs = [log.read_text(encoding="utf-8") for log in logs]
    assert not any(rank.exitcode for rank in ranks), "\n".join(outputs)
    return "".join(outputs)


def _variables(rank, processes, port):
    if processes == 1:
        return {}
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store of the parent, as with torchrun
    }
    return {name: str(value) for name, value in variables.items()}


def _run(words, variables, log):
    """Become `python WORDS`, with both outputs in a file."""
    gc.freeze()  # Accelerate collects garbage often
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
