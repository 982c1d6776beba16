"""R-Drop: a loss that makes two passes with dropout agree (Liang et al., 2021)."""

import math
from typing import Any

import torch
from torch import nn

from .objective import Objective, ObjectiveError, Update


class RDrop(Objective):
    """The loss of two passes with dropout, plus their divergence (Liang et al., 2021, equation 4).

        L = (nll_1 + nll_2) / 2 + alpha / 4 * (KL(P_1 || P_2) + KL(P_2 || P_1))

    The loss is half of equation 4, so that alpha = 0 gives the loss of one pass. Cost: twice the
    passes. The model computes loss and gradients in chunks, as without R-Drop.

    Args:
        alpha: weight of the divergence. Liang et al. use 5 for translation.

    Raises:
        ObjectiveError: alpha is negative or not finite.
    """

    translates = True

    def __init__(self, alpha: float = 5.0) -> None:
        if not 0 <= alpha < math.inf:
            raise ObjectiveError(f"alpha of R-Drop must be 0 or more, got {alpha}.")
        self.alpha = alpha

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        outputs = model(
            **repeated_batch(inputs),
            r_drop=self.alpha,
            num_items_in_batch=2 * update.tokens,
            use_cache=False,
            return_dict=True,
        )
        return outputs.loss


def repeated_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Repeat a batch to compute two passes in one: (B, ...) to (2B, ...), (1, N) to (1, 2N)."""
    if "cu_seq_lens_q" not in inputs:
        return {name: torch.cat((value, value)) for name, value in inputs.items()}
    return {name: _repeated_tokens(name, value) for name, value in inputs.items()}


def _repeated_tokens(name: str, value: Any) -> Any:
    if not torch.is_tensor(value):
        return value  # the length of the longest sentence
    if "cu_seq_lens" in name:
        return torch.cat((value, value[1:] + value[-1]))
    return torch.cat((value, value), dim=1)
