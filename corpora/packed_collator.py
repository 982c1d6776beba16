"""Batches without padding: the sentences of a batch are concatenated."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq

from ..configuration.errors import InputError


class DataCollatorForPackedSeq2Seq(DataCollatorForSeq2Seq):
    """DataCollatorForSeq2Seq without padding: every tensor of tokens is (1, N).

    The arguments are those of DataCollatorForSeq2Seq, and `packed` describes the result. With
    `pad_to_multiple_of`, spare sentences without loss fill up N, and outputs have rows for them.
    Translation models of this package take packed and padded batches alike, with the same loss and
    gradients. For a streaming data set in transformers' Trainer, also pass
    `accelerator_config={"dispatch_batches": False}`, because Accelerate would cut the tensors.
    """

    def __call__(self, features: Any, return_tensors: str | None = None) -> dict[str, Any]:
        """Make a batch of PyTorch tensors from `features`.

        Raises:
            ValueError: as `packed`. Also if the tokenizer pads on the left, or if `return_tensors`
                asks for other tensors.
        """
        if (kind := return_tensors or self.return_tensors) != "pt":
            raise ValueError(f"Packed batches are PyTorch tensors: return_tensors={kind!r}.")
        if self.tokenizer.padding_side != "right":
            raise ValueError(
                "Packing removes padding on the right, but the tokenizer pads on the "
                f"{self.tokenizer.padding_side}: set tokenizer.padding_side = 'right'."
            )
        return packed(super().__call__(features, return_tensors), self.pad_to_multiple_of)


class PackedCollator:
    """Wraps a collator of padded batches and removes their padding.

    Args:
        collate: makes a padded batch.
        pad_to_multiple_of: as in `packed`.
    """

    def __init__(
        self, collate: Callable[[Any], dict[str, Any]], pad_to_multiple_of: int | None = None
    ) -> None:
        self.collate = collate
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, features: Any) -> dict[str, Any]:
        """Make a batch of `features`."""
        return packed(self.collate(features), self.pad_to_multiple_of)


def packed(batch: Mapping[str, Any], pad_to_multiple_of: int | None = None) -> dict[str, Any]:
    """Remove the padding of a batch with `input_ids`, `attention_mask` and `labels`.

    A batch that is already packed is returned unchanged. With `pad_to_multiple_of`, sentences
    without loss follow, so that N is a multiple of it on both sides. B counts these sentences.

    Returns:
        `input_ids` and `labels` (1, N), and their boundaries under the names of transformers'
        DataCollatorWithFlattening: `position_ids` (1, N), `cu_seq_lens_q` and `cu_seq_lens_k`
        (B + 1,), `max_length_q` and `max_length_k`. The boundaries of the target have the prefix
        `decoder_`. `decoder_input_ids` are (1, N) if the batch has them.

    Raises:
        ValueError: the batch has no labels or no target tokens, a sentence has no source tokens, or
            its padding is not on the right.
    """
    if "cu_seq_lens_q" in batch:
        return dict(batch)
    if batch.get("labels") is None:  # transformers' collator returns None for rows without labels
        raise ValueError(
            "The batch has no labels. Packing needs labels, because they mark where target "
            "sentences end."
        )
    source = _real_source(batch)
    if batch["labels"].numel() == 0:
        raise ValueError(
            "No target of the batch has tokens, because labels have the shape "
            f"{tuple(batch['labels'].shape)}: give each target at least its end token."
        )
    # A -100 before the end of a target is a position without loss, not padding. A target of -100
    # alone keeps its first position.
    target = batch["labels"] != -100
    target = target.flip(1).cumsum(1).flip(1) > 0
    target[:, 0] = True
    flat: dict[str, Any] = {"input_ids": batch["input_ids"][source][None]}
    for name in ("decoder_input_ids", "labels"):
        if name in batch:
            flat[name] = batch[name][target][None]
    flat |= _boundaries(source, "") | _boundaries(target, "decoder_")
    return _with_spare_sentences(flat, pad_to_multiple_of) if pad_to_multiple_of else flat


def _with_spare_sentences(batch: dict[str, Any], multiple: int) -> dict[str, Any]:
    """Append sentences without loss to a packed batch. They are not longer than the others."""
    sides = {"": batch["input_ids"].shape[1], "decoder_": batch["labels"].shape[1]}
    missing = {prefix: -tokens % multiple for prefix, tokens in sides.items()}
    if not any(missing.values()):
        return batch
    longest = {prefix: batch[f"{prefix}max_length_q"] for prefix in sides}
    # Each spare sentence has at least one token on either side.
    while min(missing.values()) < (number := max(-(-missing[p] // longest[p]) for p in sides)):
        missing[min(missing, key=missing.__getitem__)] += multiple
    for prefix in sides:
        ends = batch[f"{prefix}cu_seq_lens_q"]
        device = ends.device  # and not torch's default device
        lengths = torch.full((number,), missing[prefix] // number, device=device)
        lengths[: missing[prefix] % number] += 1
        counts = [torch.arange(length, device=device) for length in lengths.tolist()]
        positions = torch.cat(counts)[None]
        ends = torch.cat((ends, ends[-1] + lengths.cumsum(0).to(ends.dtype)))
        batch |= {f"{prefix}cu_seq_lens_{side}": ends for side in "qk"}
        name = f"{prefix}position_ids"
        batch[name] = torch.cat((batch[name], positions), dim=1)
    for name, prefix in (
        ("input_ids", ""),
        ("decoder_input_ids", "decoder_"),
        ("labels", "decoder_"),
    ):
        if name in batch:
            fill = -100 if name == "labels" else batch[name][0, 0].item()
            more = batch[name].new_full((1, missing[prefix]), fill)
            batch[name] = torch.cat((batch[name], more), dim=1)
    return batch


def _real_source(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return a mask of the real source tokens: (B, S)."""
    given = batch.get("attention_mask")
    real = torch.ones_like(batch["input_ids"]) if given is None else given
    real = real.bool()
    if real.numel() == 0:
        raise InputError(
            "No source of the batch has tokens, because input_ids have the shape "
            f"{tuple(real.shape)}: give each source at least its end token."
        )
    if not real[:, 0].all():
        row = int((~real[:, 0]).nonzero()[0])
        raise InputError(
            f"Sentence {row} of the batch begins with padding: pad on the right "
            "(tokenizer.padding_side), and give each sentence at least its end token."
        )
    if (real[:, 1:] > real[:, :-1]).any():
        raise ValueError(
            "attention_mask has gaps: pad on the right (tokenizer.padding_side), with zeros only "
            "after the last token."
        )
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
