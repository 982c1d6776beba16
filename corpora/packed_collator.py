"""Batches without padding: the sentences of a batch one behind the other."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq


class DataCollatorForPackedSeq2Seq(DataCollatorForSeq2Seq):
    """DataCollatorForSeq2Seq without padding: every tensor of tokens is (1, N).

    The arguments are those of DataCollatorForSeq2Seq. `packed` describes the result, which a model
    of this package takes as it takes a padded batch. Loss and gradients are the same.
    """

    def __call__(self, features: Any, return_tensors: str | None = None) -> dict[str, Any]:
        """Make a batch of `features`; PyTorch tensors are the only kind."""
        return packed(super().__call__(features, return_tensors))


class PackedCollator:
    """Any collator of padded batches, whose padding is taken out again."""

    def __init__(self, collate: Callable[[Any], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, features: Any) -> dict[str, Any]:
        """Make a batch of `features`."""
        return packed(self.collate(features))


def packed(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Take the padding out of a padded batch with `input_ids`, `attention_mask` and `labels`.

    Returns:
        `input_ids` and `labels` (1, N), and their boundaries under the names of transformers'
        DataCollatorWithFlattening: `position_ids` (1, N), `cu_seq_lens_q` and `cu_seq_lens_k`
        (B + 1,), `max_length_q` and `max_length_k`. Those of the target have the prefix
        `decoder_`. `decoder_input_ids` are (1, N) where the batch has them.

    A batch that is packed comes back as it is.

    Raises:
        ValueError: the batch has no labels, a sentence has no source tokens, or its padding is not
            on the right.
    """
    if "cu_seq_lens_q" in batch:
        return dict(batch)
    if "labels" not in batch:
        raise ValueError("A packed batch needs labels, which bound the target sentences.")
    source = _real_source(batch)
    # -100 inside a target is a position without a loss. A target of such positions keeps one.
    target = batch["labels"] != -100
    target = target.flip(1).cumsum(1).flip(1) > 0
    target[:, 0] = True
    flat: dict[str, Any] = {"input_ids": batch["input_ids"][source][None]}
    for name in ("decoder_input_ids", "labels"):
        if name in batch:
            flat[name] = batch[name][target][None]
    return flat | _boundaries(source, "") | _boundaries(target, "decoder_")


def _real_source(batch: Mapping[str, Any]) -> torch.Tensor:
    """Mark the real source tokens: (B, S)."""
    given = batch.get("attention_mask")
    real = torch.ones_like(batch["input_ids"]) if given is None else given
    real = real.bool()
    if not real[:, 0].all():
        row = int((~real[:, 0]).nonzero()[0])
        raise ValueError(
            f"Sentence {row} of the batch begins with padding: pad on the right "
            "(tokenizer.padding_side), and give each sentence at least its end token."
        )
    if (real[:, 1:] > real[:, :-1]).any():
        raise ValueError("An attention_mask has gaps: packed sentences are padded on the right.")
    return real


def _boundaries(real: torch.Tensor, prefix: str) -> dict[str, Any]:
    lengths = real.sum(dim=1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)[real][None]
    boundaries = {
        "position_ids": positions,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return {prefix + name: value for name, value in boundaries.items()}


__all__ = ["DataCollatorForPackedSeq2Seq", "PackedCollator", "packed"]
