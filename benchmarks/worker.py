"""Jobs in processes of their own, so that no library's threads or memory come near another's."""

import contextlib
import ctypes
import gc
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Worker:
    """A process that makes something once, and then does jobs with it.

    Args:
        make: called in the process with `arguments`; returns what does the jobs. May raise
            RuntimeError or ValueError, if this machine cannot run it.
    """

    def __init__(self, make: Callable[..., Callable], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, make, arguments), daemon=True)
        self._process.start()
        other.close()

    def wait(self) -> None:
        """Wait until all is made.

        Raises:
            RuntimeError: this machine cannot run it, with the reason.
        """
        self._receive()

    def __call__(self, *job: Any) -> Any:
        """Do a job; what it returns comes back."""
        self._pipe.send(job)
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def _receive(self) -> Any:
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            error = f"its process ended with exit code {self._process.exitcode}"
        if error is not None:
            raise RuntimeError(error)
        return answer


def _serve(pipe: Any, make: Callable[..., Callable], arguments: tuple) -> None:
    """Make what does the jobs, and do those that come through the pipe until it is closed."""
    try:
        work = make(*arguments)
    except (RuntimeError, ValueError) as error:
        pipe.send((str(error), None))
        return
    pipe.send((None, None))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send((None, work(*pipe.recv())))


class PeakMemory:
    """Memory of this process in MB, from /proc or, on a GPU, from torch's allocator."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def now(self) -> float:
        """Memory at this moment, after what was freed has gone back to the system."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated() / 2**20
        with contextlib.suppress(OSError, AttributeError):
            # glibc keeps what is freed; other C libraries lack this function.
            ctypes.CDLL(None).malloc_trim(0)
        return _resident("VmRSS")

    def forget(self) -> None:
        """Begin a new peak."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        """Return the peak since it was last forgotten."""
        if self.on_gpu:
            synchronize()
            return torch.cuda.max_memory_allocated() / 2**20
        return _resident("VmHWM")


def _resident(field: str) -> float:
    """This process's memory in MB: "VmRSS" now, "VmHWM" its peak since it was last reset.

    Not `ru_maxrss`: that of a child begins at its parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def synchronize() -> None:
    """Wait for a GPU's queue; nothing elsewhere."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[[], Any]) -> float:
    """Seconds of a call, a GPU's work included."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


__all__ = ["PeakMemory", "Worker", "synchronize", "timed"]
