"""Batches by tokens from pairs that are read as they come, and never counted (section 5.1)."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..configuration.extras import needs
from .text_stream import TextStream, reader_of
from .token_batches import TokenBatchSampler

with needs("vaswani[train]"):
    import datasets
    from datasets.distributed import split_dataset_by_node

Row = dict[str, Any]
State = dict[str, Any]

# Pairs of which batches are made at a time.
BUFFER = 20_000
_MOST_WORKERS = 2**16
_BEGIN = {"pass": 0, "rows": None, "block": 0, "given": 0, "total": 0}


class TokenBatchStream(IterableDataset):
    """Batches of at most so many tokens, made from one buffer of rows after another.

    The stream has no end: after its last row it starts again from the first. Each batch comes with
    the state of the stream after it, so that a run continues in the middle of a pass without
    reading again what it has seen, but for one buffer.

    Pass it to a DataLoader with `batch_size=None`. With workers, `rows` has to deal its rows out to
    them, as data sets of Hugging Face `datasets` do.

    Args:
        rows: rows of this process, from `rows_of_process`.
        max_source_tokens, max_target_tokens: those of TokenBatchSampler.
        collate: makes a batch of rows.
        encode: turns the rows of a buffer into rows with `input_ids` and `labels`; None if they
            have them.
        sampler: makes batches of a buffer, TokenBatchSampler or PackedBatchSampler.
        seed: another seed is another order of batches.
        buffer: rows of which batches are made at a time.
        states: of every worker, from which to continue.
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
    ) -> None:
        self.rows, self.collate, self.encode = rows, collate, encode
        self.budgets = (max_source_tokens, max_target_tokens)
        self.sampler, self.seed, self.buffer = sampler, seed, buffer
        self.states = states or {}

    def __iter__(self) -> Iterator[tuple[Row | None, tuple[int, State]]]:
        """Yield batches with the number of the worker and its state after them.

        A stream that continues yields None in place of each batch before, since trainers skip the
        batches that they had.
        """
        info = get_worker_info()
        worker = info.id if info else 0
        rows = copy.deepcopy(self.rows)
        state = self.states.get(worker, _BEGIN)
        for _ in range(state["total"]):
            yield None, (worker, state)
        for passes in itertools.count(state["pass"]):
            empty = True
            for start, block, content in self._blocks(rows, passes, state):
                empty = False
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
            if empty:
                return  # this worker has no shard
            state = {**state, "rows": None, "block": state["block"] + 1, "given": 0}

    def _blocks(
        self, rows: Any, passes: int, state: State
    ) -> Iterator[tuple[State | None, int, list[Row]]]:
        """Yield the buffers of the rest of a pass, with the state before them and their number."""
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
        """Make the batches of a buffer, in an order that depends on the seed and its number."""
        if self.encode:
            block = self.encode(block)
        if not block:
            return []
        lengths = [(len(row["input_ids"]), len(row["labels"])) for row in block]
        sampler = self.sampler(lengths, *self.budgets, seed=self.seed)
        sampler.set_epoch(number * _MOST_WORKERS + worker)
        return [[block[row] for row in batch] for batch in sampler]


def rows_of_process(data: Any, process: int, processes: int) -> Any:
    """Return the rows of one process, with a state that can be saved.

    Args:
        data: a TextStream, a `datasets.IterableDataset` or any other iterable of rows.
        process: number of this process.
        processes: how many there are.
    """
    if isinstance(data, TextStream):
        return data.rows_of_process(process, processes)
    if isinstance(data, datasets.IterableDataset):
        return split_dataset_by_node(data, process, processes)
    return _CountedRows(data, process, processes)


class _CountedRows:
    """Every so many rows of an iterable; to continue, it is read again from its start."""

    def __init__(self, rows: Any, process: int, processes: int) -> None:
        self._rows, self._process, self._processes = rows, process, processes
        self._read = 0

    def __iter__(self) -> Iterator[Row]:
        reader, readers = reader_of(self._process, self._processes)
        before, self._read = self._read, 0
        for number, row in enumerate(self._rows):
            self._read = number + 1
            if number % readers == reader and number >= before:
                yield row
        self._read = 0

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)

    def state_dict(self) -> State:
        return {"read": self._read}

    def load_state_dict(self, state: State) -> None:
        self._read = state["read"]


__all__ = ["BUFFER", "TokenBatchStream", "rows_of_process"]
