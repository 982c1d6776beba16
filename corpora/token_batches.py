"""Batches of sentence pairs by a budget of tokens (section 5.1)."""

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from transformers.utils import logging

from ..configuration.errors import InputError
from .mixing import Mixture

logger = logging.get_logger(__name__)

# Random cuts tried per epoch. If none has few enough batches, the reference cut is used.
_DRAWS = 8
# A mixture of at most _FEW_PAIRS pairs counts the batches of several epochs.
_FEW_PAIRS, _EPOCHS_COUNTED = 2**17, 8
# Larger sort keys are not converted to 16 bits.
_MAX_KEY = 2**22


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of sentence pairs of similar length, limited by a number of tokens (section 5.1).

    The budget counts padded tokens. In every batch, the number of sentences times the length of the
    longest source is at most `max_source_tokens`, and likewise for the target.

    Every epoch has each pair once and the same number of batches, but it combines and orders the
    pairs differently. The plan depends only on the arguments and the epoch, so that all processes
    and a resumed run have the same batches.

    Larger budgets mix more lengths in a batch and thus need more padding. To reduce padding, choose
    a smaller budget and accumulate gradients.

    Pass the sampler to a DataLoader as `batch_sampler`, and the DataLoader to
    `accelerator.prepare`, which distributes the batches over the processes in turn. Then call
    `set_epoch` on the prepared loader, before `skip_first_batches`. VaswaniTrainer does all of
    this.

    Args:
        lengths: numbers of tokens of every pair as (source, target), of shape (N, 2).
        max_source_tokens: budget of source tokens per batch. The paper has about 25000.
        max_target_tokens: budget of target tokens per batch. None means `max_source_tokens`.
        seed: seed of the order.
        drop_oversize: leave out single pairs that exceed a budget. By default, each of them has a
            batch of its own. `oversize` lists them in both cases.
        batches_per_update: processes times accumulated batches. The largest batches are split until
            the number of batches is a multiple of it. If there are too few pairs for that, the last
            update is small, and Accelerate repeats batches so that all processes have the same
            number. An update has the same sentences for every split into processes and accumulated
            batches.
        mixture: draws the pairs of every epoch from several corpora. None takes each pair once.
        warn: count oversize pairs in a warning.

    Raises:
        ValueError: lengths are missing, negative, not integers or not pairs; a budget or
            `batches_per_update` is below 1; `mixture` has another number of pairs; all pairs are
            dropped.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]] | np.ndarray,
        max_source_tokens: int,
        max_target_tokens: int | None = None,
        seed: int = 0,
        drop_oversize: bool = False,
        batches_per_update: int = 1,
        mixture: Mixture | None = None,
        warn: bool = True,
    ) -> None:
        if max_target_tokens is None:
            max_target_tokens = max_source_tokens
        self.max_source_tokens = _integer_budget("max_source_tokens", max_source_tokens)
        self.max_target_tokens = _integer_budget("max_target_tokens", max_target_tokens)
        if batches_per_update < 1:
            raise InputError(f"batches_per_update must be at least 1, got {batches_per_update}.")
        self.seed = seed
        self.epoch = 0
        self.batches_per_update = batches_per_update
        self.mixture = mixture
        self._source, self._target = _source_and_target_lengths(lengths)
        if mixture is not None and sum(mixture.sizes) != len(self._source):
            raise InputError(
                f"The corpora of the mixture have {sum(mixture.sizes)} pairs, but lengths has "
                f"{len(self._source)}: give the number of pairs of each corpus."
            )
        fits = self._source <= self.max_source_tokens
        fits &= self._target <= self.max_target_tokens
        # int32 rows halve the memory of a plan.
        number = np.int32 if len(fits) < 2**31 else np.int64
        self._fitting = np.flatnonzero(fits).astype(number)
        self.oversize = np.flatnonzero(~fits).astype(number)
        if warn:
            self._report_oversize(drop_oversize)
        self._oversize_batches = self.oversize[:0] if drop_oversize else self.oversize
        self.num_sentences = sum(map(len, self._drawn()))
        if self.num_sentences == 0:
            raise InputError(
                f"All {len(self._source)} sentence pairs exceed max_source_tokens "
                f"({self.max_source_tokens}) or max_target_tokens ({self.max_target_tokens}) and "
                "drop_oversize=True drops them all: raise the budgets."
            )
        self._num_batches = self._count_batches()

    def __len__(self) -> int:
        """Return the number of batches of an epoch, which is the same in all epochs."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order, ends = self._plan(rng)
        starts = np.concatenate(([0], ends[:-1]))
        for batch in rng.permutation(len(ends)):
            yield order[starts[batch] : ends[batch]].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches the next iteration yields."""
        self.epoch = epoch

    @property
    def sampler(self) -> "TokenBatchSampler":
        """The sampler itself: with several processes, Accelerate calls `sampler.set_epoch`."""
        return self

    def _report_oversize(self, drop: bool) -> None:
        if len(self.oversize):
            more = ", ..." if len(self.oversize) > 5 else ""
            logger.warning(
                f"{len(self.oversize)} of {len(self._source)} sentence pairs exceed "
                f"max_source_tokens ({self.max_source_tokens}) or max_target_tokens "
                f"({self.max_target_tokens}) and are "
                f"{'dropped' if drop else 'alone in a batch'}. Their numbers, counted from 0: "
                f"{', '.join(map(str, self.oversize[:5]))}{more}"
            )

    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the epoch's pairs that fit into a batch, and its oversize rows."""
        if self.mixture is None:
            return self._fitting, self._oversize_batches
        return self.mixture.draw(self._fitting, self._oversize_batches, self.epoch)

    def _order(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Order the pairs so that neighbours have similar lengths. Equal lengths are shuffled.

        Pairs are sorted by their longer side, which fills the budget, then by the difference of the
        two sides. The difference rises for one length and falls for the next, so that neighbours
        of different lengths are similar too.
        """
        key = _ranks(_length_keys(self._source[rows], self._target[rows], int(rng.integers(2))))
        shuffled = rng.permutation(np.arange(len(rows), dtype=self._fitting.dtype))
        key = key[shuffled]
        return rows[shuffled[np.argsort(key, kind="stable")]]

    def _cut(self, order: np.ndarray, first: float = 1.0) -> np.ndarray:
        """Cut an order into batches as full as the budgets allow, and return where each ends.

        The first batch is shortened to the share `first`, which shifts all later batches.
        """
        largest = min(self.max_source_tokens, self.max_target_tokens, len(order))
        sizes = np.arange(1, largest + 1)
        ends = []
        start = 0
        while start < len(order):
            # The first sentence alone gives an upper bound of the size of the batch.
            limit = min(
                self.max_source_tokens // max(int(self._source[order[start]]), 1),
                self.max_target_tokens // max(int(self._target[order[start]]), 1),
            )
            rows = order[start : start + limit]
            padded_source, padded_target = (
                np.maximum.accumulate(np.maximum(side[rows], 1)) * sizes[: len(rows)]
                for side in (self._source, self._target)
            )
            fits = padded_source <= self.max_source_tokens
            fits &= padded_target <= self.max_target_tokens
            size = int(np.count_nonzero(fits))
            start += size if start else math.ceil(size * first)
            ends.append(start)
        return np.array(ends, dtype=np.int64)

    def _reference(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the order and cut from which the number of batches is derived."""
        order = self._order(rows, np.random.default_rng([self.seed]))
        return order, self._cut(order)

    def _count_batches(self) -> int:
        """Return the number of batches of every epoch.

        The reference cut gives the number. About 1% is added, because random cuts can need more.
        The pairs of a small mixture differ between epochs, so several epochs are cut.
        """
        _, oversize = self._drawn()
        needed = max(len(self._reference(rows)[1]) for rows in self._first_epochs())
        if needed > 1:
            needed += 1 + needed // 100
        # No epoch of a mixture has more oversize pairs than epoch 0.
        total = needed + len(oversize)
        total += -total % self.batches_per_update
        return min(total, self.num_sentences)

    def _first_epochs(self) -> Iterator[np.ndarray]:
        """Yield the pairs of the epochs that are cut to count batches."""
        if self.mixture is None or self.num_sentences > _FEW_PAIRS:
            yield self._drawn()[0]
            return
        for epoch in range(_EPOCHS_COUNTED):
            yield self.mixture.draw(self._fitting, self._oversize_batches, epoch)[0]

    def _plan(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return order and cut of one epoch, with the same number of batches as all epochs."""
        rows, oversize = self._drawn()
        count = self._num_batches - len(oversize)
        for _ in range(_DRAWS):
            order = self._order(rows, rng)
            ends = self._cut(order, first=1 - rng.random())
            if len(ends) <= count:
                break
        else:
            order, ends = self._reference(rows)
            # The sentences of a mixture differ between epochs, so an epoch may need more batches
            # than the counted epochs.
            needed, sentences = len(ends), len(order)
            order, ends = _limit_batches(order, ends, count, rng)
            if needed > count:
                logger.warning(
                    f"Epoch {self.epoch} of the mixture needs {needed} batches instead of {count}: "
                    f"{sentences - len(order)} of its {sentences} pairs are left out at random."
                )
        ends = _split_largest(ends, count)
        alone = np.arange(1, len(oversize) + 1) + len(order)
        return np.concatenate((order, oversize)), np.concatenate((ends, alone))


class PackedBatchSampler(TokenBatchSampler):
    """Batches of random sentence pairs for padding-free training, limited by their real tokens.

    In every batch, the sum of the source lengths is at most `max_source_tokens`, and likewise for
    the target. Arguments, epochs, processes and resumed runs work as in TokenBatchSampler.
    """

    def _order(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Order the pairs at random."""
        return rng.permutation(rows)

    def _cut(self, order: np.ndarray, first: float = 1.0) -> np.ndarray:
        """Cut an order into batches as full as the budgets allow, and return where each ends."""
        budgets = (self.max_source_tokens, self.max_target_tokens)
        totals = [np.cumsum(side[order], dtype=np.int64) for side in (self._source, self._target)]
        ends: list[int] = []
        start = 0
        while start < len(order):
            end = len(order)
            for total, budget in zip(totals, budgets, strict=True):
                before = int(total[start - 1]) if start else 0
                end = min(end, int(np.searchsorted(total, before + budget, side="right")))
            start = end if start else math.ceil(end * first)
            ends.append(start)
        return np.array(ends, dtype=np.int64)


def is_whole(number: Any, lowest: int) -> bool:
    """Tell whether a setting is an integer of at least `lowest`. 5.0 is an integer too."""
    numeric = isinstance(number, Real) and not isinstance(number, bool)
    return numeric and lowest <= number < math.inf and number == int(number)


def _integer_budget(name: str, number: Any) -> int:
    """Return a budget as an integer."""
    if not is_whole(number, 1):
        raise InputError(f"{name} must be an integer of at least 1, got {number!r}.")
    return int(number)


def _source_and_target_lengths(lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and the target lengths as two arrays.

    Raises:
        ValueError: lengths are missing, negative, or not pairs of integers.
    """
    try:
        pairs = np.asarray(lengths)
    except ValueError as error:
        raise InputError(f"lengths must be (source, target) pairs: {error}") from error
    if pairs.size == 0:
        raise InputError("lengths is empty: there is no sentence pair to batch.")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise InputError(
            f"lengths must be (source, target) pairs, of shape (N, 2); got shape {pairs.shape}."
        )
    if not np.issubdtype(pairs.dtype, np.integer):
        raise InputError(f"lengths must be integers, got {pairs.dtype}.")
    negative = np.flatnonzero((pairs < 0).any(axis=1))
    if len(negative):
        raise InputError(
            f"lengths must be 0 or more; sentence pair {negative[0]} has {pairs[negative[0]]}."
        )
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)


def _length_keys(source: np.ndarray, target: np.ndarray, parity: int) -> np.ndarray:
    """Return sort keys: the longer side first, then the difference, rising and falling in turn."""
    longer = np.maximum(source, target)
    longest = int(longer.max(initial=0))
    # int32 keys halve the memory of a plan.
    longer = longer.astype(np.int32 if longest < 2**15 else np.int64, copy=False)
    falls = (np.cumsum(np.bincount(longer) > 0) + parity) % 2 == 1
    key = (source - target).astype(longer.dtype, copy=False)
    np.negative(key, out=key, where=falls[longer])
    longer *= longer.dtype.type(2 * longest + 1)
    key += longer
    return key


def _ranks(key: np.ndarray) -> np.ndarray:
    """Return 16-bit numbers in the order of a key if they suffice, because they sort faster."""
    if key.max(initial=0) >= _MAX_KEY:
        return key
    ranks = np.cumsum(np.bincount(key) > 0) - 1
    return ranks.astype(np.uint16)[key] if ranks.max(initial=0) < 2**16 else key


def _limit_batches(
    order: np.ndarray, ends: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Drop batches at random until there are at most `count`."""
    if len(ends) <= count:
        return order, ends
    batches = np.split(order, ends[:-1])
    kept = [batches[number] for number in np.sort(rng.permutation(len(batches))[:count])]
    return np.concatenate(kept), np.cumsum([len(batch) for batch in kept])


def _split_largest(ends: np.ndarray, count: int) -> np.ndarray:
    """Halve the batches with the most sentences until there are `count` batches."""
    while len(ends) < count:
        sizes = np.diff(ends, prepend=0)
        largest = np.argsort(-sizes, kind="stable")[: count - len(ends)]
        largest = largest[sizes[largest] > 1]
        ends = np.sort(np.append(ends, ends[largest] - sizes[largest] // 2))
    return ends


__all__ = ["PackedBatchSampler", "TokenBatchSampler", "is_whole"]
