"""Pairs that get different tokens in every epoch, by BPE-dropout."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .bpe_dropout import BpeDropout
from .encoding import TextEncoder
from .mapped import MappedPairs

# Number of random splits tried before a text gets the tokenizer's own tokens.
_DRAWS = 4
# Limit of a text's tokens beyond the average growth: a factor, and tokens added for short texts.
_GROWTH_MARGIN, _EXTRA_TOKENS = 1.1, 3
_SAMPLE = 300


class OnTheFlyPairs(Dataset):
    """Pairs that are tokenised when a batch is made, differently in every epoch.

    The tokens of a pair depend only on the seed, the epoch and the line. Any number of processes
    and loader workers, and a resumed run, get the same tokens.

    Batches are planned before their pairs are tokenised. `lengths` holds the limits of each pair.
    A split with more tokens is drawn again, so that batches stay within their budgets.

    Args:
        pairs: columns `source`, `target`, `source_length` and `target_length`.
        encoders: encoders of sources and targets, without BPE-dropout.
        dropouts: encoders of sources and targets with BPE-dropout.
        repeats: number of times that an epoch has each pair.
    """

    def __init__(
        self,
        pairs: MappedPairs,
        encoders: tuple[TextEncoder, TextEncoder],
        dropouts: tuple[BpeDropout, BpeDropout],
        repeats: int = 1,
    ) -> None:
        self._pairs, self._encoders, self._dropouts = pairs, encoders, dropouts
        self._repeats = repeats
        # The epoch is in shared memory, so that the workers of a loader see its changes.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.lengths = np.tile(self._length_limits(), (repeats, 1))

    def __len__(self) -> int:
        return self._repeats * len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        """Tokenise the pairs of a batch."""
        rows = self._pairs.__getitems__([index % len(self._pairs) for index in indices])
        return [self._tokens(row, index) for row, index in zip(rows, indices, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that decides the tokens of the next batches."""
        self._epoch.fill_(epoch)

    def _tokens(self, row: dict[str, Any], index: int) -> dict[str, list[int]]:
        return {
            "input_ids": self._ids_within_limit(0, row["source"], index),
            "labels": self._ids_within_limit(1, row["target"], index),
        }

    def _ids_within_limit(self, side: int, text: str, index: int) -> list[int]:
        for draw in range(_DRAWS):
            ids = self._dropouts[side].at(text, int(self._epoch), index, draw)
            if len(ids) <= self.lengths[index, side]:
                return ids
        encoder = self._encoders[side]
        return np.frombuffer(encoder([text])[0], encoder.dtype).tolist()

    def _length_limits(self) -> np.ndarray:
        """Return the largest allowed token counts of each pair. Nearly all splits have fewer."""
        lengths = self._pairs.select_columns(["source_length", "target_length"])
        own = np.stack([np.asarray(lengths.data[name]) for name in lengths.column_names], axis=1)
        growth = [self._growth(side) for side in (0, 1)]
        return np.ceil(own * np.array(growth) * _GROWTH_MARGIN).astype(np.int32) + _EXTRA_TOKENS

    def _growth(self, side: int) -> float:
        """Return the average ratio of tokens with and without BPE-dropout, from a sample."""
        name = ("source", "target")[side]
        rows = np.linspace(0, len(self._pairs) - 1, min(_SAMPLE, len(self._pairs)), dtype=int)
        sample = self._pairs.select_columns([name, f"{name}_length"]).select(rows)[:]
        splits = [self._dropouts[side].at(text, -1, row) for row, text in enumerate(sample[name])]
        return sum(map(len, splits)) / max(sum(sample[f"{name}_length"]), 1)


__all__ = ["OnTheFlyPairs"]
