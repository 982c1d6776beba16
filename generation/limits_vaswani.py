"""How long each sentence may grow: a limit set by its own source, whatever shares its batch (6.1).

limit = max_length_factor * source length + max_length_offset, in tokens behind the decoder prompt.
"""

from typing import Any

import torch
from transformers.generation import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)


def length_limits(lengths: torch.Tensor, factor: float, offset: int) -> torch.Tensor:
    """The longest output of each source: factor * length + offset, rounded down, at least 1.

    Args:
        lengths: (B,) tokens of each source.
        factor: `max_length_factor`.
        offset: `max_length_offset`.
    """
    # In Python's float64, as fairseq and Marian compute theirs; some accelerators have no float64.
    limits = [max(int(factor * length + offset), 1) for length in lengths.tolist()]
    return torch.tensor(limits, device=lengths.device)


class SourceLengthCriteria(StoppingCriteria):
    """Stop each sentence at its own limit (6.1: input length + 50), whatever shares its batch.

    Args:
        max_lengths: (B,) longest output of each source sentence, decoder prompt included.
        padded: there is a pad token to fill up with.
    """

    def __init__(self, max_lengths: torch.Tensor, padded: bool = False) -> None:
        self.max_lengths = max_lengths
        if padded:
            # transformers pads finished rows only where a criterion has an attribute of this name.
            self.eos_token_id = torch.empty(0, dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Mark the rows of `input_ids` (B * hypotheses, T) that have reached their limit."""
        hypotheses = input_ids.shape[0] // self.max_lengths.shape[0]
        limits = self.max_lengths.to(input_ids.device).repeat_interleave(hypotheses)
        return input_ids.shape[1] >= limits


class ForcedEndAtOwnLimit(LogitsProcessor):
    """Force each sentence's end at its own limit, whatever shares its batch.

    Args:
        max_lengths: (B,) longest output of each source sentence, decoder prompt included.
        eos_token_id: the tokens to choose from.
    """

    def __init__(self, max_lengths: torch.Tensor, eos_token_id: torch.Tensor) -> None:
        self.max_lengths = max_lengths
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Leave no other choice in the rows of `scores` (B * hypotheses, V) at their last token."""
        hypotheses = input_ids.shape[0] // self.max_lengths.shape[0]
        limits = self.max_lengths.to(input_ids.device).repeat_interleave(hypotheses)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.eos_token_id] = 0
        return torch.where(limits[:, None] - 1 == input_ids.shape[1], forced, scores)


def forced_at_own_limit(processors: Any, criteria: Any) -> Any:
    """Let a forced end come at each sentence's own limit, where one of `criteria` sets such."""
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
