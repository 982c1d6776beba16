"""Token batches from streamed pairs, whose number is unknown (section 5.1)."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker
from transformers.utils import logging

from ..configuration.extras import needs
from .reading import DataError
from .text_stream import TextStream, reader_of
from .token_batches import TokenBatchSampler

with needs("vaswani[train]"):
    import datasets
    from datasets.distributed import split_dataset_by_node

logger = logging.get_logger(__name__)

Row = dict[str, Any]
State = dict[str, Any]

# Default number of rows in a buffer.
BUFFER = 20_000
# A buffer's shuffle has the number `buffer * _MAX_WORKERS + worker`, which is unique in a process.
_MAX_WORKERS = 2**16
_BEGIN = {"pass": 0, "rows": None, "block": 0, "given": 0, "total": 0}


class TokenBatchStream(IterableDataset):
    """Endless token batches: the stream fills a buffer with rows and makes batches of the buffer.

    After the last row, the stream starts again from the first row. Each batch comes with the state
    of the stream after the batch. A resumed run continues in the middle of a pass, and reads at
    most one buffer twice.

    Pass the stream to a DataLoader with `batch_size=None`. With several workers, `rows` must give
    each worker its own rows, as the rows of `rows_of_process` do.

    Args:
        rows: rows of this process, from `rows_of_process`.
        max_source_tokens, max_target_tokens: those of TokenBatchSampler.
        collate: makes a batch of rows.
        encode: turns the rows of a buffer into rows with `input_ids` and `labels`. None if the
            rows have both already.
        sampler: TokenBatchSampler or PackedBatchSampler, which makes the batches of a buffer.
        seed: seed of the order of batches.
        buffer: number of rows in a buffer.
        states: state of each worker to resume from. Workers without a state start at the beginning.
        drop_oversize: leave out single pairs that exceed a budget, as TokenBatchSampler does.
    """

    def __init__(
        self,
        rows: Any,
        max_source_tokens: int,
        max_target_tokens: int | None,
        collate: Callable[[list[Row]], Row],
        encode: Callable[[list[Row]], list[Row]] | None = None,
        sampler: type[TokenBatchSampler] = TokenBatchSampler,
        seed: int = 0,
        buffer: int = BUFFER,
        states: dict[int, State] | None = None,
        drop_oversize: bool = False,
    ) -> None:
        self.rows, self.collate, self.encode = rows, collate, encode
        self.budgets = (max_source_tokens, max_target_tokens)
        self.sampler, self.seed, self.buffer = sampler, seed, buffer
        self.states, self.drop_oversize = states or {}, drop_oversize
        # All workers share this memory, so that only the first of them warns.
        self._warned = torch.zeros(1, dtype=torch.bool).share_memory_()

    def __iter__(self) -> Iterator[tuple[Row | None, tuple[int, State]]]:
        """Yield each batch with the number of the worker and the worker's state after the batch.

        A resumed stream first yields None for each batch before the resume, because trainers skip
        these batches.

        Raises:
            DataError: a whole pass gave no batch, for example because there are no rows, or the
                rules drop all pairs; rows are not tokenized.
        """
        info = get_worker_info()
        worker = info.id if info else 0
        rows = copy.deepcopy(self.rows)
        state = self.states.get(worker, _BEGIN)
        for _ in range(state["total"]):
            yield None, (worker, state)
        for passes in itertools.count(state["pass"]):
            before = state
            read = 0
            for start, block, content in self._blocks(rows, passes, state):
                read += len(content)
                given = state["given"] if block == state["block"] else 0
                for place, batch in enumerate(self._batches(content, worker, block)):
                    if place >= given:
                        state = {
                            "pass": passes,
                            "rows": start,
                            "block": block,
                            "given": place + 1,
                            "total": state["total"] + 1,
                        }
                        yield self.collate(batch), (worker, state)
            if not read and passes:
                raise DataError(
                    "The training data have no rows in a second pass: pass an iterable that starts "
                    "again from its beginning, or fewer updates (max_steps)."
                )
            if not read and (info is None or info.num_workers == 1):
                raise DataError("The training data have no rows: check the files or the iterable.")
            if not read:
                return  # this worker has no shard
            if state is before and before["rows"] is None and not before["given"]:
                budgets = " or raise the budgets of tokens" if self.drop_oversize else ""
                raise DataError(
                    f"All {read} pairs of the stream were dropped, so that no batch can be made: "
                    f"loosen the filters{budgets}, or check that the files hold sources and "
                    "targets."
                )
            state = {**state, "rows": None, "block": state["block"] + 1, "given": 0}

    def _blocks(
        self, rows: Any, passes: int, state: State
    ) -> Iterator[tuple[State | None, int, list[Row]]]:
        """Yield each buffer of the rest of a pass, with the state before it and its number."""
        rows.set_epoch(passes)
        if state["rows"] is not None:
            rows.load_state_dict(state["rows"])
        start, found = state["rows"], iter(rows)
        for number in itertools.count(state["block"]):
            if not (content := list(itertools.islice(found, self.buffer))):
                return
            yield start, number, content
            start = rows.state_dict()

    def _batches(self, block: list[Row], worker: int, number: int) -> list[list[Row]]:
        """Make the batches of a buffer, in the order of the seed and the buffer's number."""
        if self.encode:
            block = self.encode(block)
        if not block:
            return []
        for row in block:
            _check_row(row)
        lengths = [(len(row["input_ids"]), len(row["labels"])) for row in block]
        sampler = self.sampler(lengths, *self.budgets, seed=self.seed, warn=False)
        sampler.set_epoch(number * _MAX_WORKERS + worker)
        if len(sampler.oversize):
            self._warn_of_oversize(*lengths[sampler.oversize[0]])
        # The sampler cannot drop oversize pairs itself, because it refuses a buffer without others.
        dropped = set(sampler.oversize.tolist()) if self.drop_oversize else set()
        return [[block[row] for row in batch] for batch in sampler if batch[0] not in dropped]

    def _warn_of_oversize(self, source: int, target: int) -> None:
        if not self._warned:
            self._warned.fill_(True)
            source_budget, target_budget = self.budgets
            logger.warning(
                f"The stream has sentence pairs that exceed max_source_tokens ({source_budget}) or "
                f"max_target_tokens ({target_budget or source_budget}). These pairs are "
                f"{'dropped' if self.drop_oversize else 'alone in a batch'}. The first one has "
                f"{source} source tokens and {target} target tokens."
            )


def _check_row(row: Row) -> None:
    for name in ("input_ids", "labels"):
        tokens = row.get(name)
        if tokens is None:
            raise DataError(
                f"A row of the stream has no {name!r}, only {', '.join(row)}: tokenize the rows."
            )
        if not hasattr(tokens, "__len__"):
            raise DataError(
                f"A row of the stream has {tokens!r} as {name!r}, not a list of tokens: tokenize "
                "the rows."
            )
        if not len(tokens):
            raise DataError(f"A row of the stream has no tokens in {name!r}: leave the row out.")


def rows_of_process(data: Any, process: int, processes: int) -> Any:
    """Return the rows of one process, as an iterable whose state can be saved.

    Args:
        data: a TextStream, a `datasets.IterableDataset` or any other iterable of rows.
        process: rank of this process.
        processes: number of processes.

    Raises:
        DataError: the data set has been divided among processes before.
    """
    if isinstance(data, TextStream):
        return data.rows_of_process(process, processes)
    if isinstance(data, datasets.IterableDataset):
        divided = getattr(data, "_distributed", None)
        if divided is not None and divided.world_size > 1:
            raise DataError(
                "The training data have been divided by split_dataset_by_node, and would be "
                "divided among processes again: pass the whole data set."
            )
        own = split_dataset_by_node(data, process, processes)
        # The state of a shuffled data set does not have the rows in its shuffle buffer.
        return _CountedRows(own) if _is_shuffled(getattr(data, "_ex_iterable", None)) else own
    return _CountedRows(data, process, processes)


def _is_shuffled(rows: Any) -> bool:
    """Tell whether an iterable of `datasets`, or one inside it, has a shuffle buffer."""
    if type(rows).__name__ == "BufferShuffledExamplesIterable":
        return True
    parts = [getattr(rows, "ex_iterable", None), *(getattr(rows, "ex_iterables", None) or ())]
    return any(_is_shuffled(part) for part in parts if part is not None)


def _as_one_reader(rows: Any) -> Iterator[Row]:
    """Read all rows of an iterable, even if it divides its rows among the workers of a loader."""
    found, info = None, loader_worker._worker_info
    while True:
        loader_worker._worker_info = None
        try:
            found = iter(rows) if found is None else found
            row = next(found)
        except StopIteration:
            return
        finally:
            loader_worker._worker_info = info
        yield row


class _CountedRows:
    """Every n-th row of an iterable, for n readers. Resuming reads the iterable from its start.

    `processes=None` means that the iterable gives each reader its own rows.
    """

    def __init__(self, rows: Any, process: int = 0, processes: int | None = None) -> None:
        self._rows, self._process, self._processes = rows, process, processes
        self._read = 0

    def __iter__(self) -> Iterator[Row]:
        reader, readers = 0, 1
        if self._processes is not None:
            reader, readers = reader_of(self._process, self._processes)
        before, self._read = self._read, 0
        rows = iter(self._rows) if self._processes is None else _as_one_reader(self._rows)
        for number, row in enumerate(rows):
            self._read = number + 1
            if number % readers == reader and number >= before:
                yield row
        self._read = 0

    def __deepcopy__(self, memo: Any) -> "_CountedRows":
        copied = copy.copy(self)  # rows of a user may hold an open file
        if isinstance(self._rows, datasets.IterableDataset):
            # All workers would share the memory of its epoch.
            copied._rows = copy.deepcopy(self._rows, memo)
        return copied

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)

    def state_dict(self) -> State:
        return {"read": self._read}

    def load_state_dict(self, state: State) -> None:
        self._read = state["read"]


__all__ = ["BUFFER", "TokenBatchStream", "rows_of_process"]
