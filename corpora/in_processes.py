"""Apply a function to batches in several processes, in order and with bounded memory."""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any

from .reading import DataError

_ORPHANED = 3  # exit status of a process whose parent was killed
# With fewer batches, starting the processes takes longer than computing in this one.
_MIN_BATCHES = 10


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    function: Callable[[Any], Any], batches: Iterator[Any], processes: int
) -> Iterator[tuple[Any, Any]]:
    """Yield every batch with its result. The processes work a few batches ahead of the reader.

    Raises:
        DataError: a process was killed.
    """
    first = list(islice(batches, _MIN_BATCHES))
    batches = chain(first, batches)
    if processes == 1 or len(first) < _MIN_BATCHES:
        for batch in batches:
            yield batch, function(batch)
        return
    # Forked processes start at once and share the memory of the tokenizers. On macOS, a fork of a
    # process with threads may crash.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (function, os.getpid()))
    ahead: deque[tuple[Any, Future]] = deque()
    try:
        for batch in batches:
            ahead.append((batch, pool.submit(_call_function, batch)))
            if len(ahead) > 4 * processes:
                yield ahead[0][0], ahead[0][1].result()
                ahead.popleft()
        for batch, result in ahead:
            yield batch, result.result()
    except BrokenProcessPool as error:
        raise DataError(
            "A tokenising process was killed, perhaps because memory ran out. Start the command "
            "again: the preparation continues from where it was stopped."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any] | None = None


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: int) -> None:
    """End this process when its parent was killed, because nobody else would end it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(_ORPHANED)


def _call_function(batch: Any) -> Any:
    assert _function is not None
    return _function(batch)


__all__ = ["cores", "in_order"]
