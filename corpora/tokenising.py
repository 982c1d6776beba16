"""Tokenise a small set of pairs in memory, such as a validation set."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..configuration.extras import needs
from .reading import Pair

with needs("vaswani[train]"):
    from datasets import Dataset


def tokenised(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
) -> Dataset:
    """Encode pairs into `input_ids`, `labels` and `length`, the length of the longer side."""
    sources, targets = map(list, zip(*pairs, strict=True))
    ids = tokenizer(sources)["input_ids"]
    labels = target_tokenizer(text_target=targets)["input_ids"]
    lengths = [max(map(len, pair)) for pair in zip(ids, labels, strict=True)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": lengths})


__all__ = ["tokenised"]
