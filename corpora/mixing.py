"""Mixing of corpora: which pairs of each corpus an epoch contains."""

from collections.abc import Sequence

import numpy as np


class Mixture:
    """Draws the pairs of every epoch from several concatenated corpora.

    An epoch has as many pairs as all corpora together. Each corpus is read in shuffled passes, and
    an epoch continues where the previous epoch stopped. After any number of epochs, the pairs of a
    corpus have been seen equally often, give or take one.

    Args:
        sizes: number of pairs of each corpus.
        shares: relative number of pairs that an epoch takes from each corpus.
        seed: seed of the shuffled orders.

    Raises:
        ValueError: a share is negative, all shares are 0, or the number of shares differs from the
            number of corpora.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], seed: int = 0) -> None:
        if len(shares) != len(sizes):
            raise ValueError(f"{len(shares)} shares for {len(sizes)} corpora: give one for each.")
        if min(shares) < 0 or not sum(shares):
            raise ValueError(f"shares must be 0 or more, and one above 0, got {list(shares)}.")
        self.sizes, self.seed = list(sizes), seed
        total = sum(sizes)
        self.taken = [round(total * share / sum(shares)) for share in shares]

    def rows(self, fitting: np.ndarray, epoch: int) -> np.ndarray:
        """Return the rows of an epoch, chosen from the `fitting` rows, which fit into a batch."""
        rows = []
        start = 0
        for corpus, (size, taken) in enumerate(zip(self.sizes, self.taken, strict=True)):
            first, last = np.searchsorted(fitting, [start, start + size])
            start += size
            rows.append(self._rows_of_epoch(corpus, fitting[first:last], taken, epoch))
        return np.concatenate(rows)

    def _rows_of_epoch(self, corpus: int, rows: np.ndarray, taken: int, epoch: int) -> np.ndarray:
        """Return the window of an epoch in the endless shuffled passes over a corpus."""
        if not len(rows) or not taken:
            return rows[:0]
        begin, end = epoch * taken, (epoch + 1) * taken
        passes = range(begin // len(rows), -(-end // len(rows)))
        shuffled = [
            rows[np.random.default_rng([self.seed, corpus, number]).permutation(len(rows))]
            for number in passes
        ]
        offset = passes[0] * len(rows)
        return np.concatenate(shuffled)[begin - offset : end - offset]


def shares_of(
    sizes: Sequence[int], weights: Sequence[float | None], temperature: float | None
) -> list[float] | None:
    """Return the share of each corpus in an epoch, or None if an epoch has every pair once.

    Args:
        sizes: number of pairs of each corpus.
        weights: weights from the command line. If at least one is given, None means 1.
        temperature: shares are sizes to the power of 1 / temperature. With 1 the shares are the
            sizes, and large values make all corpora equally frequent.

    Raises:
        ValueError: both weights and a temperature are given.
    """
    weighted = any(weight is not None for weight in weights)
    if weighted and temperature:
        raise ValueError(
            "--temperature and weights (=WEIGHT) both set how often a corpus is seen: drop one."
        )
    if temperature:
        return [float(size) ** (1 / temperature) for size in sizes]
    return [1.0 if weight is None else weight for weight in weights] if weighted else None


__all__ = ["Mixture", "shares_of"]
