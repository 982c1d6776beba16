"""A lock that lets one process of a machine work while the others wait."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout


class MachineLock:
    """Hold a lock on a file of this machine during a `with` block.

    A process that has to wait prints a message, and waits without a time limit. The system releases
    the lock of a process that is killed.

    Args:
        path: file of the lock.
        say: function that receives the message.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._lock, self._say = FileLock(path), say

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._say("Another process prepares these data: waiting for it.")
            self._lock.acquire(timeout=-1, poll_interval=0.2)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


__all__ = ["MachineLock"]
