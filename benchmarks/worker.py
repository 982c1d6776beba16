"""Jobs in separate processes, so that libraries do not share threads or memory."""

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
    """A process that builds a function once, and then calls it for every job.

    Args:
        make: called in the process with `arguments`. It returns the function for the jobs, or
            raises RuntimeError or ValueError if this machine cannot run it.
    """

    def __init__(self, make: Callable[..., Callable], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_end = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(child_end, make, arguments), daemon=True)
        self._process.start()
        child_end.close()

    def wait(self) -> None:
        """Wait until the function is built.

        Raises:
            RuntimeError: this machine cannot run it. The message gives the reason.
        """
        self._receive()

    def __call__(self, *job: Any) -> Any:
        """Run a job in the process and return its result."""
        with contextlib.suppress(BrokenPipeError):  # `_receive` says that the process ended
            self._pipe.send(job)
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def _receive(self) -> Any:
        try:
            error, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            error = f"its process ended with exit code {self._process.exitcode}"
        if error is not None:
            raise RuntimeError(error)
        return answer


def _serve(pipe: Any, make: Callable[..., Callable], arguments: tuple) -> None:
    """Build the function, and run the jobs from the pipe until it is closed."""
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
    """Memory of this process in MB: from /proc on a CPU, from torch's allocator on a GPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def now(self) -> float:
        """Return the current memory, after freed memory was returned to the system."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated() / 2**20
        with contextlib.suppress(OSError, AttributeError):
            # glibc keeps freed memory. Other C libraries do not have this function.
            ctypes.CDLL(None).malloc_trim(0)
        return _resident("VmRSS")

    def forget(self) -> None:
        """Reset the peak."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        """Return the peak since the last reset."""
        if self.on_gpu:
            synchronize()
            return torch.cuda.max_memory_allocated() / 2**20
        return _resident("VmHWM")


def _resident(field: str) -> float:
    """Return a memory field of this process in MB: "VmRSS" is current, "VmHWM" is the peak.

    `ru_maxrss` would not do, because a child process inherits the value of its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def synchronize() -> None:
    """Wait for the queue of a GPU. On a CPU, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds of a call, including work on a GPU."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


__all__ = ["PeakMemory", "Worker", "synchronize", "timed"]
