"""One process of a machine works, and the others wait for it."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout


class OnlyOne:
    """Hold a lock of the machine while the block runs.

    A process that has to wait says so, and waits without a time limit. The system takes the lock
    from a process that is killed.

    Args:
        path: file of the lock.
        say: receives the message.
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


__all__ = ["OnlyOne"]
