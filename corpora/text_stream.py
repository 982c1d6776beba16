"""A stream of the texts of corpora: weighted sampling, one share per reader, exact resume."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from .corpus import Corpus, refuse_pipe, tagged
from .encoding import TextEncoder
from .filtering import Rules
from .preparing import Tokenise
from .reading import DataError

Row = dict[str, Any]
State = dict[str, Any]
Shard = tuple[Corpus, tuple[str, ...]]

# Corpora are drawn in blocks, because one call of numpy for each draw would be slow.
_DRAWS = 1000


class TextStream(IterableDataset):
    """Texts of corpora, which are read, filtered and tokenised while the model trains.

    Corpora without weights are read one after another. Corpora with weights are sampled in
    proportion to their weights. A corpus that ends starts again, until each corpus has ended once.

    Args:
        corpora: corpora to read. If any corpus has a weight, the others have weight 1.
        tokenizer, target_tokenizer: tokenizers of the sources and of the targets.
        rules: rules that drop pairs. A stream cannot drop duplicates.
        seed: seed of the sampling.

    Raises:
        DataError: the rules drop duplicates, a script or the function is unknown, or a corpus is a
            pipe, which could be read only once.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        tokenizer: Any,
        target_tokenizer: Any,
        rules: Rules,
        seed: int,
    ) -> None:
        if rules.drop_duplicates:
            raise DataError(
                "drop_duplicates needs prepared data, because a stream does not remember earlier "
                "pairs: leave drop_duplicates out, or prepare the corpora."
            )
        for name in {name for corpus in corpora for shard in corpus.shards for name in shard}:
            refuse_pipe(name)
        encoders = TextEncoder(tokenizer), TextEncoder(target_tokenizer, target=True)
        self._tokenise = Tokenise(encoders, rules, tag=None)
        self._skip = rules.skip_unreadable
        self._seed = seed
        self._weights, self._groups = [1.0], [_shards_of(corpora)]
        if any(corpus.weight is not None for corpus in corpora):
            weights = [1.0 if corpus.weight is None else corpus.weight for corpus in corpora]
            drawn = [(w, corpus) for w, corpus in zip(weights, corpora, strict=True) if w]
            self._weights = [weight for weight, _ in drawn]
            self._groups = [_shards_of([corpus]) for _, corpus in drawn]

    def rows_of_process(self, process: int, processes: int) -> "_TextRows":
        """Return the rows of one process, as an iterable whose state can be saved."""
        return _TextRows(self._groups, self._weights, self._seed, process, processes)

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows_of_process(0, 1):
            yield from self.encode([row])

    def encode(self, rows: list[Row]) -> list[Row]:
        """Tokenise the rows that the rules keep, into `input_ids` and `labels`.

        Raises:
            DataError: a text cannot be read.
        """
        if not self._skip:
            for row in rows:
                if row["error"]:
                    raise DataError(row["error"])
        keeps = self._tokenise.text_filter.keeps
        # Filter before tagging, because filters see texts without a tag in prepared corpora too.
        pairs = [
            tagged([(row["source"], row["target"])], row["tag"])[0]
            for row in rows
            if not row["error"] and keeps(row["source"], row["target"])
        ]
        table, _, _ = self._tokenise.encode(pairs)
        return table.select(["input_ids", "labels"]).to_pylist()


class _TextRows:
    """The rows of one reader: a worker of a process, which samples from groups of shards."""

    def __init__(
        self,
        groups: list[list[Shard]],
        weights: list[float],
        seed: int,
        process: int,
        processes: int,
    ) -> None:
        self._groups, self._seed = groups, seed
        self._shares = np.array(weights) / sum(weights)
        self._process, self._processes = process, processes
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._drawn = epoch, 0
        self._places = [(0, 0)] * len(self._groups)
        self._ended = [False] * len(self._groups)

    def state_dict(self) -> State:
        return {"drawn": self._drawn, "places": [*self._places], "ended": [*self._ended]}

    def load_state_dict(self, state: State) -> None:
        self._drawn, self._ended = state["drawn"], [*state["ended"]]
        self._places = [(shard, line) for shard, line in state["places"]]

    def __iter__(self) -> Iterator[Row]:
        reader, readers = reader_of(self._process, self._processes)
        begin = [functools.partial(_texts, group, reader, readers) for group in self._groups]
        found = [texts(*place) for texts, place in zip(begin, self._places, strict=True)]
        for group in self._draws():
            if (next_row := next(found[group], None)) is None:
                self._ended[group] = True
                if all(self._ended):
                    return
                found[group] = begin[group]()
                next_row = next(found[group], None)
            if next_row is not None:
                row, self._places[group] = next_row
                yield row

    def _draws(self) -> Iterator[int]:
        """Sample groups. Each draw depends only on the seed, the pass and the draw's number."""
        while True:
            block, place = divmod(self._drawn, _DRAWS)
            generator = np.random.default_rng((self._seed, self._epoch, block))
            for group in generator.choice(len(self._groups), _DRAWS, p=self._shares)[place:]:
                self._drawn += 1
                yield int(group)


def reader_of(process: int, processes: int) -> tuple[int, int]:
    """Return the number of this worker among the workers of all processes, and their number."""
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    return process + processes * worker, processes * workers


def _shards_of(corpora: Sequence[Corpus]) -> list[Shard]:
    return [(corpus, shard) for corpus in corpora for shard in corpus.shards]


def _texts(
    group: list[Shard], reader: int, readers: int, first: int = 0, line: int = 0
) -> Iterator[tuple[Row, tuple[int, int]]]:
    """Yield the rows of a reader from a shard and line on, each with the place after the row."""
    if whole := len(group) % readers == 0:
        group = group[reader::readers]
    for number, (corpus, files) in enumerate(group[first:], first):
        start = line if number == first else 0
        for place, pair in enumerate(itertools.islice(corpus.pairs_of(files), start, None), start):
            if not whole and place % readers != reader:
                continue
            if isinstance(pair, DataError):
                row = {"source": "", "target": "", "error": str(pair)}
            else:
                row = {"source": pair[0], "target": pair[1], "error": ""}
            yield {**row, "tag": corpus.tag}, (number, place + 1)


__all__ = ["TextStream", "reader_of"]
