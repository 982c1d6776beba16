"""Pairs of lines become token ids."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..configuration.extras import needs
from .bpe_dropout import BpeDropout
from .reading import DataError, Pair

with needs("vaswani[train]"):
    from datasets import Dataset

# Turns texts into token ids.
Encoder = Callable[[list[str]], list[list[int]]]


def encoders(
    tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase
) -> tuple[Encoder, Encoder]:
    """Return the functions that encode sources and targets."""
    return (
        lambda sources: tokenizer(sources)["input_ids"],
        lambda targets: target_tokenizer(text_target=targets)["input_ids"],
    )


def dropout_encoders(
    tokenizer: Any, target_tokenizer: Any, dropout: float, seed: int
) -> tuple[Encoder, Encoder]:
    """Return functions that skip merges at random (Provilkov et al., 2020).

    Raises:
        DataError: a tokenizer has no merges, or others than `BpeDropout` knows.
    """
    try:
        return (
            BpeDropout(tokenizer, dropout, 2 * seed),
            BpeDropout(target_tokenizer, dropout, 2 * seed + 1, target=True),
        )
    except ValueError as error:
        raise DataError(f"--bpe-dropout: {error}") from error


def tokenised(
    pairs: Sequence[Pair], encoders: tuple[Encoder, Encoder], max_length: int | None = None
) -> Dataset:
    """Encode pairs into columns `input_ids`, `labels` and `length`, that of the longer side.

    Args:
        pairs: lines of source and target.
        encoders: of source and target.
        max_length: drop pairs with more tokens on either side.

    Raises:
        DataError: no pair is left.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        sources, labels = encoders[0](batch["source"]), encoders[1](batch["target"])
        lengths = [max(map(len, pair)) for pair in zip(sources, labels, strict=True)]
        return {"input_ids": sources, "labels": labels, "length": lengths}

    sources, targets = zip(*pairs, strict=True)
    data = Dataset.from_dict({"source": sources, "target": targets})
    data = data.map(encode, batched=True, remove_columns=["source", "target"], desc="Tokenizing")
    if max_length is None:
        return data
    kept = data.filter(
        lambda lengths: [n <= max_length for n in lengths], input_columns="length", batched=True
    )
    if not len(kept):
        raise DataError(f"All {len(data)} pairs are longer than --max-length {max_length}.")
    return kept


__all__ = ["Encoder", "dropout_encoders", "encoders", "tokenised"]
