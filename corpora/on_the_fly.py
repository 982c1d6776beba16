"""Pairs that become other tokens at every look, by BPE-dropout."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .bpe_dropout import BpeDropout
from .encoding import TextEncoder
from .mapped import MappedPairs

# Draws of a pair before it keeps the tokenizer's own tokens.
_DRAWS = 4
# Room beyond the average growth: in proportion, and for short texts.
_ROOM, _MORE = 1.1, 3
_SAMPLE = 300


class OnTheFlyPairs(Dataset):
    """Pairs that are tokenised when a batch is made, differently in every epoch.

    The tokens of a pair depend on seed, epoch and line alone, so that any number of processes and
    loader workers, and a resumed run, get the same.

    A batch is planned before its pairs are tokenised. `lengths` is what each pair is allowed: a
    split with more tokens is drawn again, so that batches keep their budgets.

    Args:
        pairs: columns `source`, `target`, `source_length` and `target_length`.
        encoders: of sources and targets, as the tokenizers encode.
        dropouts: of sources and targets.
        looks: how many times an epoch has each pair.
    """

    def __init__(
        self,
        pairs: MappedPairs,
        encoders: tuple[TextEncoder, TextEncoder],
        dropouts: tuple[BpeDropout, BpeDropout],
        looks: int = 1,
    ) -> None:
        self._pairs, self._encoders, self._dropouts = pairs, encoders, dropouts
        self._looks = looks
        # Workers of a loader see a change of the epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.lengths = np.tile(self._allowed(), (looks, 1))

    def __len__(self) -> int:
        return self._looks * len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        """Tokenise the pairs of a batch."""
        rows = self._pairs.__getitems__([index % len(self._pairs) for index in indices])
        return [self._tokens(row, index) for row, index in zip(rows, indices, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose tokens the next batches have."""
        self._epoch.fill_(epoch)

    def _tokens(self, row: dict[str, Any], index: int) -> dict[str, list[int]]:
        return {
            "input_ids": self._side(0, row["source"], index),
            "labels": self._side(1, row["target"], index),
        }

    def _side(self, side: int, text: str, index: int) -> list[int]:
        for draw in range(_DRAWS):
            ids = self._dropouts[side].at(text, int(self._epoch), index, draw)
            if len(ids) <= self.lengths[index, side]:
                return ids
        encoder = self._encoders[side]
        return np.frombuffer(encoder([text])[0], encoder.dtype).tolist()

    def _allowed(self) -> np.ndarray:
        """Return the most tokens that a pair may become: nearly all splits have fewer."""
        lengths = self._pairs.select_columns(["source_length", "target_length"])
        own = np.stack([np.asarray(lengths.data[name]) for name in lengths.column_names], axis=1)
        growth = [self._growth(side) for side in (0, 1)]
        return np.ceil(own * np.array(growth) * _ROOM).astype(np.int32) + _MORE

    def _growth(self, side: int) -> float:
        """Return how many times as many tokens the splits have on average, from a sample."""
        name = ("source", "target")[side]
        rows = np.linspace(0, len(self._pairs) - 1, min(_SAMPLE, len(self._pairs)), dtype=int)
        sample = self._pairs.select_columns([name, f"{name}_length"]).select(rows)[:]
        splits = [self._dropouts[side].at(text, -1, row) for row, text in enumerate(sample[name])]
        return sum(map(len, splits)) / max(sum(sample[f"{name}_length"]), 1)


__all__ = ["OnTheFlyPairs"]
