"""R-Drop: two passes under dropout that shall agree (Liang et al., 2021)."""

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..modeling.packing_vaswani import decoder_inputs
from .objective import Objective, ObjectiveError, Update, over

# Logits of a pass that are taken at a time: on a CPU as many as fit the cache of a core, for all
# that is done to them, elsewhere 2^28 bytes of them in float32.
_IN_CACHE, _ELSEWHERE = 2**18, 2**26


class RDrop(Objective):
    """The loss of two passes under dropout that shall agree (Liang et al., 2021, equation 4).

    Loss and gradients are those of `RDropLoss`. Cost: twice the passes of an update, and the logits
    of a batch exist.

    Args:
        alpha: weight of the disagreement; Liang et al. take 5 for translation.

    Raises:
        ObjectiveError: alpha is no finite number of at least 0.
    """

    def __init__(self, alpha: float = 5.0) -> None:
        if not 0 <= alpha < math.inf:
            raise ObjectiveError(f"alpha of R-Drop must be 0 or more, got {alpha}.")
        self.alpha = alpha

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        own, inputs = self.unwrap(model), dict(inputs)
        labels = inputs.pop("labels")
        if "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = decoder_inputs(own, labels, inputs)
        if "cu_seq_lens_q" in inputs:
            inputs["pad_outputs"] = False
        outputs = model(**twice(inputs), use_cache=False)
        total = RDropLoss.apply(outputs.logits, labels, self.alpha, own.config.label_smoothing)
        return over(total, update.tokens)


class RDropLoss(torch.autograd.Function):
    """Sum over tokens of two passes' mean loss (5.4), plus alpha / 2 times how far they are apart.

    Predictions p and q are as far apart as the mean of KL(p, q) and KL(q, p). In all that is half
    of Liang et al.'s equation 4, so that alpha = 0 leaves the loss of one pass. The gradient is
    taken where the probabilities are at hand: beside the logits, in the types of autocast, there is
    one more tensor of their size, and in float32 a slice.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, alpha: float, epsilon: float
    ) -> torch.Tensor:
        """Compute the loss of `logits` (2B, T, V), the first B of the first pass.

        `labels` are of shape (B, T), -100 where there is no token; `epsilon` is the smoothing's.
        Logits (1, 2N, V) of a packed batch have labels (1, N).
        """
        vocab_size = logits.shape[-1]
        exact = torch.promote_types(logits.dtype, torch.float32)
        first, second = logits.reshape(2, -1, vocab_size)
        gradient = torch.zeros_like(logits).view(2, -1, vocab_size)
        total = torch.zeros((), dtype=exact, device=logits.device)
        rows = (labels.flatten() != -100).nonzero().squeeze(1)
        size = max(1, (_IN_CACHE if logits.is_cpu else _ELSEWHERE) // vocab_size)
        for part in rows.split(size):
            gold = labels.flatten()[part, None]
            p, q = (side[part].to(exact).log_softmax(dim=-1) for side in (first, second))
            total += sum(_smoothed_loss(side, gold, epsilon) for side in (p, q)) / 2
            apart = p - q
            p, q = p.exp_(), q.exp_()
            to_q, to_p = _dot(p, apart), -_dot(q, apart)
            total += alpha / 4 * (to_q + to_p).sum()
            # KL(p, q) has the gradient p * (apart - KL(p, q)), KL(q, p) has p - q; and so for q.
            apart *= alpha / 2
            for number, mine, other, distance, sign in ((0, p, q, to_q, 1), (1, q, p, to_p, -1)):
                slope = torch.add(1 + alpha / 2 * (1 - distance), apart, alpha=sign).mul_(mine)
                slope.sub_(epsilon / vocab_size).sub_(other, alpha=alpha / 2)
                slope.scatter_add_(1, gold, slope.new_full(gold.shape, epsilon - 1))
                gradient[number, part] = slope.div_(2).to(logits.dtype)
        ctx.save_for_backward(gradient.view_as(logits))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradient that the forward pass took."""
        (gradient,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype), None, None, None


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Row by row: (C, V) and (C, V) to (C, 1)."""
    return (left * right).sum(dim=-1, keepdim=True)


def _smoothed_loss(
    log_probabilities: torch.Tensor, gold: torch.Tensor, epsilon: float
) -> torch.Tensor:
    at_target = log_probabilities.gather(1, gold).sum()
    return (epsilon - 1) * at_target - epsilon * log_probabilities.mean(dim=-1).sum()


def twice(inputs: dict[str, Any]) -> dict[str, Any]:
    """Repeat a batch for two passes in one: (B, ...) to (2B, ...), packed (1, N) to (1, 2N)."""
    if "cu_seq_lens_q" not in inputs:
        return {name: torch.cat((value, value)) for name, value in inputs.items()}
    return {name: _packed_twice(name, value) for name, value in inputs.items()}


def _packed_twice(name: str, value: Any) -> Any:
    if not torch.is_tensor(value):
        return value  # the longest sentence stays the longest
    if "cu_seq_lens" in name:
        return torch.cat((value, value[1:] + value[-1]))
    return torch.cat((value, value), dim=1)
