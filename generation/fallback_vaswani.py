"""transformers' beam search, the fallback of ours, with the paper's length penalty (6.1)."""

from typing import Any

import torch
from transformers import GenerationMixin

from .search_vaswani import FILL, length_penalty


class GnmtLengthPenalty(float):
    """The exponent alpha: transformers computes `length ** penalty`, which becomes lp(Y) (6.1)."""

    def __rpow__(self, length: int) -> float:
        return length_penalty(length, float(self), "gnmt")


class TargetSide:
    """A model whose configuration speaks of the target's vocabulary where the two differ.

    transformers counts transition scores, and before 5.18 beams, by the source's vocabulary.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)


def fallback_beam_search(
    model: Any, input_ids: Any, processors: Any, criteria: Any, config: Any, **kwargs: Any
) -> Any:
    """Run transformers' beam search; arguments are those of `GenerationMixin._beam_search`."""
    if getattr(config, "length_penalty_type", None) == "gnmt":
        config.length_penalty = GnmtLengthPenalty(config.length_penalty)
    pad = config._pad_token_tensor
    if pad is not None:
        # transformers fills finished rows with `pad or eos`, and takes a pad id of 0 for none.
        config._pad_token_tensor = torch.full_like(pad, FILL)
    target: Any = TargetSide(model)
    output: Any = GenerationMixin._beam_search(
        target, input_ids, processors, criteria, config, **kwargs
    )
    if pad is not None:
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        sequences.masked_fill_(sequences == FILL, int(pad))
    return output


__all__ = ["GnmtLengthPenalty", "TargetSide", "fallback_beam_search"]
