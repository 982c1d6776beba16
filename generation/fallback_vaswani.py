"""Beam search of transformers, for calls that the fast search does not cover (section 6.1).

It gets two corrections: the paper's length penalty, and the target's vocabulary size.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin

from .beam_vaswani import FILL
from .rules_vaswani import length_penalty as length_penalty_of


class TargetSide:
    """A model for transformers' searches, whose config gives the size of the target vocabulary.

    transformers counts transition scores, and before 5.18 beams, by `config.vocab_size`. This is
    the size of the source vocabulary.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)


class _WithPaperPenalty(TargetSide):
    """The same model, whose beam search divides by lp(Y) (6.1).

    transformers divides log-probabilities by length ** length_penalty in two methods. This
    class passes log-probabilities that are already divided, with exponent 0, to both methods.
    """

    def _update_finished_beams(
        self,
        *,
        topk_log_probs: torch.Tensor,
        cur_len: int,
        decoder_prompt_len: int,
        length_penalty: float,
        **state: Any,
    ) -> Any:
        penalty = length_penalty_of(cur_len + 1 - decoder_prompt_len, length_penalty, "gnmt")
        return self.model._update_finished_beams(
            topk_log_probs=topk_log_probs / penalty,
            cur_len=cur_len,
            decoder_prompt_len=decoder_prompt_len,
            length_penalty=0.0,
            **state,
        )

    def _check_early_stop_heuristic(
        self,
        *,
        running_beam_scores: torch.Tensor,
        cur_len: int,
        max_length: int,
        decoder_prompt_len: int,
        early_stopping: bool | str,
        length_penalty: float,
        **state: Any,
    ) -> torch.Tensor:
        # A positive exponent favours long hypotheses, so the longest has the best chance.
        grows = early_stopping == "never" and length_penalty > 0
        longest = (max_length if grows else cur_len) - decoder_prompt_len
        penalty = length_penalty_of(longest, length_penalty, "gnmt")
        return self.model._check_early_stop_heuristic(
            running_beam_scores=running_beam_scores / penalty,
            cur_len=cur_len,
            max_length=max_length,
            decoder_prompt_len=decoder_prompt_len,
            early_stopping=early_stopping,
            length_penalty=0.0,
            **state,
        )


def fallback_beam_search(
    model: Any, input_ids: Any, processors: Any, criteria: Any, config: Any, **kwargs: Any
) -> Any:
    """Run transformers' beam search; arguments are those of `GenerationMixin._beam_search`."""
    pad = config._pad_token_tensor
    if pad is not None:
        # transformers fills finished rows with `pad or eos`, and takes a pad id of 0 for none.
        config._pad_token_tensor = torch.full_like(pad, FILL)
    paper = getattr(config, "length_penalty_type", None) == "gnmt"
    searched = (_WithPaperPenalty if paper else TargetSide)(model)
    search: Callable = GenerationMixin._beam_search  # it reads a few methods of the model only
    output = search(searched, input_ids, processors, criteria, config, **kwargs)
    if pad is not None:
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        sequences.masked_fill_(sequences == FILL, int(pad))
    return output


__all__ = ["TargetSide", "fallback_beam_search"]
