"""How long each translation may become (section 6.1).

The limit depends only on the sentence's own source, not on the other sentences of its batch:
limit = max_length_factor * source length + max_length_offset, in tokens after the decoder prompt.
"""

from typing import Any

import torch
from transformers.generation import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)

from .settings_vaswani import checked_factor, checked_offset


def length_rule(factor: Any, offset: Any) -> tuple[float, int] | None:
    """Read `max_length_factor` and `max_length_offset`; None if the source sets no limit.

    Args:
        factor: None means 1.
        offset: None means 0. Without a factor, 0 switches the rule off.

    Raises:
        ValueError: one of them is not a valid number.
    """
    offset = 0 if offset is None else checked_offset(offset)
    if not (offset or factor):
        return None
    return 1.0 if factor is None else checked_factor(factor), offset


def length_limits(lengths: torch.Tensor, factor: float, offset: int) -> torch.Tensor:
    """Return the limit of each translation: factor * length + offset, rounded down, at least 1.

    Args:
        lengths: (B,) tokens of each source.
        factor: `max_length_factor`.
        offset: `max_length_offset`.
    """
    # Python computes in float64, as fairseq and Marian do. Some accelerators have no float64.
    limits = [max(int(factor * length + offset), 1) for length in lengths.tolist()]
    return torch.tensor(limits, device=lengths.device)


def real_tokens(
    tokens: torch.Tensor, ends: list[int] | int, limits: torch.Tensor | None
) -> torch.Tensor:
    """Mark generated tokens (B, T) up to the first end token, or up to the sentence's limit.

    Args:
        tokens: (B, T) tokens after the decoder prompt.
        ends: the end tokens. The first one in a sentence is marked too.
        limits: (B,) as `length_limits` returns them; None means no limits.
    """
    is_end = torch.isin(tokens, torch.as_tensor(ends, dtype=torch.long, device=tokens.device))
    real = is_end.cumsum(dim=1) - is_end.long() == 0
    if limits is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        real &= places < limits.to(tokens.device)[:, None]
    return real


def check_position_limit(sentence: str, length: int, limit: int | None) -> None:
    """Refuse a sentence that has more tokens than the model has learned positions.

    Args:
        sentence: its name in the error, such as "Line 3".
        length: its tokens.
        limit: `config.position_limit`.

    Raises:
        ValueError: names the sentence, its length and the limit.
    """
    if limit is not None and length > limit:
        raise ValueError(
            f"{sentence} has {length} tokens, more than the {limit} learned positions of the model "
            "(max_position_embeddings): shorten or split it."
        )


class SourceLengthCriteria(StoppingCriteria):
    """Stop each sentence at its own limit (6.1: input length + 50).

    Args:
        max_lengths: (B,) longest output of each source, decoder prompt included.
        padded: whether there is a pad token for finished rows.
    """

    def __init__(self, max_lengths: torch.Tensor, padded: bool = False) -> None:
        self.max_lengths = max_lengths
        if padded:
            # transformers pads finished rows only if a criterion has an attribute of this name.
            self.eos_token_id = torch.empty(0, dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Mark the rows of `input_ids` (B * hypotheses, T) that have reached their limit."""
        return input_ids.shape[1] >= _limits_of_rows(self.max_lengths, input_ids)


class ForcedEndAtOwnLimit(LogitsProcessor):
    """Force the end token at each sentence's own limit.

    Args:
        max_lengths: (B,) longest output of each source, decoder prompt included.
        eos_token_id: the tokens that may end the sentence.
    """

    def __init__(self, max_lengths: torch.Tensor, eos_token_id: torch.Tensor) -> None:
        self.max_lengths = max_lengths
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Allow end tokens only, in the rows of `scores` (B * hypotheses, V) at their limit."""
        limits = _limits_of_rows(self.max_lengths, input_ids)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.eos_token_id] = 0
        return torch.where(limits[:, None] - 1 == input_ids.shape[1], forced, scores)


def _limits_of_rows(max_lengths: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Repeat the limits (B,) for the rows of `input_ids` (B * hypotheses, T)."""
    hypotheses = input_ids.shape[0] // max_lengths.shape[0]
    return max_lengths.to(input_ids.device).repeat_interleave(hypotheses)


def force_end_at_own_limit(processors: Any, criteria: Any) -> Any:
    """Let a forced end token come at each sentence's own limit, if `criteria` set such limits."""
    limits = [
        criterion.max_lengths for criterion in criteria if type(criterion) is SourceLengthCriteria
    ]
    if not limits:
        return processors
    return LogitsProcessorList(
        ForcedEndAtOwnLimit(limits[0].clamp(max=processor.max_length), processor.eos_token_id)
        if type(processor) is ForcedEOSTokenLogitsProcessor
        else processor
        for processor in processors
    )


__all__ = [
    "ForcedEndAtOwnLimit",
    "SourceLengthCriteria",
    "check_position_limit",
    "force_end_at_own_limit",
    "length_limits",
    "length_rule",
    "real_tokens",
]
