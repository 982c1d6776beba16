"""Mixing of corpora: which pairs of each corpus an epoch contains."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Mixture:
    """Draws the pairs of every epoch from several concatenated corpora.

    An epoch has about as many pairs as all corpora together, and at least one pair of each corpus
    with a share above 0. Each corpus is read in shuffled passes, and an epoch continues where the
    previous epoch stopped. After any number of epochs, the pairs of a corpus have been seen equally
    often, give or take one.

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
        self.sizes, self.seed = [int(size) for size in sizes], int(seed)
        self.shares = [float(share) for share in shares]
        total = sum(self.sizes)
        # Rounding could drop a small share.
        self.taken = [
            max(round(total * share / sum(self.shares)), int(share > 0 and size > 0))
            for share, size in zip(self.shares, self.sizes, strict=True)
        ]

    def settings(self) -> dict[str, Any]:
        """Return the arguments in JSON types."""
        return {"sizes": self.sizes, "shares": self.shares, "seed": self.seed}

    def draw(
        self, fitting: np.ndarray, oversize: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the fitting and the oversize rows of an epoch.

        The two kinds keep their proportion in every corpus. The number of oversize rows per corpus
        differs by at most one between epochs, and epoch 0 has the largest number.

        Args:
            fitting: sorted rows that fit into a batch.
            oversize: sorted rows that do not.
            epoch: number of the epoch.
        """
        drawn: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        start = 0
        for corpus, (size, taken) in enumerate(zip(self.sizes, self.taken, strict=True)):
            small, large = (
                rows[slice(*np.searchsorted(rows, [start, start + size]))]
                for rows in (fitting, oversize)
            )
            start += size
            if not len(small) + len(large):
                continue
            begin, end = epoch * taken, (epoch + 1) * taken
            # The first `end` draws of a corpus contain `last` oversize rows, rounded up.
            first, last = (
                -(-draws * len(large) // (len(small) + len(large))) for draws in (begin, end)
            )
            drawn[0].append(self._window(small, begin - first, end - last, corpus))
            drawn[1].append(self._window(large, first, last, corpus, 1))
        return np.concatenate([fitting[:0], *drawn[0]]), np.concatenate([oversize[:0], *drawn[1]])

    def _window(
        self, rows: np.ndarray, begin: int, end: int, corpus: int, *seeds: int
    ) -> np.ndarray:
        """Return the draws `begin` to `end` of the endless shuffled passes over some rows."""
        if begin == end:
            return rows[:0]
        passes = range(begin // len(rows), -(-end // len(rows)))
        shuffled = [
            rows[np.random.default_rng([self.seed, corpus, number, *seeds]).permutation(len(rows))]
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
        temperature: shares are proportional to sizes to the power of 1 / temperature. Large values
            make all corpora equally frequent.

    Raises:
        ValueError: both weights and a temperature are given.
    """
    weighted = any(weight is not None for weight in weights)
    if weighted and temperature:
        raise ValueError(
            "--temperature and weights (=WEIGHT) both set how often a corpus is seen: drop one."
        )
    if temperature:
        return [(size / max(1, *sizes)) ** (1 / temperature) for size in sizes]
    return [1.0 if weight is None else weight for weight in weights] if weighted else None


__all__ = ["Mixture", "shares_of"]
