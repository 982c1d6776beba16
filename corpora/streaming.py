"""Batches by tokens from pairs that are read as they come, and never counted (section 5.1)."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..configuration.extras import needs
from .corpus import Corpus, tagged
from .encoding import TextEncoder
from .filtering import Rules
from .preparing import Tokenise
from .reading import DataError
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


class TextStream(IterableDataset):
    """Texts of corpora that are read, filtered and tokenised as they come.

    Files are the shards that are dealt out to processes and workers. If their number is no multiple
    of the processes, each process reads all of them and takes every so many rows.

    Args:
        corpora: read one after another. Where one has a weight, rows are drawn from all in these
            shares.
        tokenizer, target_tokenizer: of sources and targets.
        rules: which pairs to leave out.
        seed: of the draws.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        tokenizer: Any,
        target_tokenizer: Any,
        rules: Rules,
        seed: int,
    ) -> None:
        encoders = TextEncoder(tokenizer), TextEncoder(target_tokenizer, target=True)
        self._tokenise = Tokenise(encoders, rules, tag=None)
        self._skip = rules.skip_unreadable
        if all(corpus.weight is None for corpus in corpora):
            self.rows = _rows_of(corpora)
            return
        weights = [1.0 if corpus.weight is None else corpus.weight for corpus in corpora]
        self.rows = datasets.interleave_datasets(
            [_rows_of([corpus]) for corpus in corpora],
            probabilities=[weight / sum(weights) for weight in weights],
            seed=seed,
            stopping_strategy="all_exhausted",
        )

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            yield from self.encode([row])

    def encode(self, rows: list[Row]) -> list[Row]:
        """Return the rows that the rules keep, with `input_ids` and `labels`.

        Raises:
            DataError: a text could not be read.
        """
        if not self._skip:
            for row in rows:
                if row["error"]:
                    raise DataError(row["error"])
        table, _, _ = self._tokenise(
            [(row["source"], row["target"]) for row in rows if not row["error"]]
        )
        return table.select(["input_ids", "labels"]).to_pylist()


def rows_of_process(data: Any, process: int, processes: int) -> Any:
    """Return the rows of one process, with a state that can be saved.

    Args:
        data: a TextStream, a `datasets.IterableDataset` or any other iterable of rows.
        process: number of this process.
        processes: how many there are.
    """
    rows = data.rows if isinstance(data, TextStream) else data
    if isinstance(rows, datasets.IterableDataset):
        return split_dataset_by_node(rows, process, processes)
    return _CountedRows(rows, process, processes)


class _CountedRows:
    """Every so many rows of an iterable; to continue, it is read again from its start."""

    def __init__(self, rows: Any, process: int, processes: int) -> None:
        self._rows, self._process, self._processes = rows, process, processes
        self._read = 0

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        readers = self._processes * (info.num_workers if info else 1)
        reader = self._process + self._processes * (info.id if info else 0)
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


def _rows_of(corpora: Sequence[Corpus]) -> Any:
    found = [(corpus, shard) for corpus in corpora for shard in corpus.shards]
    shards = {"corpus": [corpus for corpus, _ in found], "shard": [shard for _, shard in found]}
    columns = dict.fromkeys(("source", "target", "error"), datasets.Value("string"))
    return datasets.IterableDataset.from_generator(
        _texts, datasets.Features(columns), gen_kwargs=shards
    )


def _texts(corpus: list[Corpus], shard: list[tuple[str, ...]]) -> Iterator[Row]:
    for one, files in zip(corpus, shard, strict=True):
        for pair in one.pairs_of(files):
            if isinstance(pair, DataError):
                yield {"source": "", "target": "", "error": str(pair)}
            else:
                ((source, target),) = tagged([pair], one.tag)
                yield {"source": source, "target": target, "error": ""}


__all__ = ["BUFFER", "TextStream", "TokenBatchStream", "rows_of_process"]
