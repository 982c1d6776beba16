"""R-Drop: a loss that makes two passes with dropout agree (Liang et al., 2021)."""

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..modeling.packing_vaswani import decoder_inputs
from .objective import Objective, ObjectiveError, Update, over

# Number of logits of a pass that are processed at a time. On a CPU they fit into the cache of a
# core with their intermediate results. On other devices they take 2^28 bytes in float32.
_IN_CACHE, _ON_DEVICE = 2**18, 2**26


class RDrop(Objective):
    """The loss of two passes with dropout, plus their divergence (Liang et al., 2021, equation 4).

    `RDropLoss` computes loss and gradients. Cost: an update has twice the passes, and the logits of
    a whole batch are in memory.

    Args:
        alpha: weight of the divergence. Liang et al. use 5 for translation.

    Raises:
        ObjectiveError: alpha is negative or not finite.
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
    """The mean loss (5.4) of two passes plus alpha / 2 times their divergence, summed over tokens.

    The divergence of the predictions p and q is the mean of KL(p, q) and KL(q, p). The result is
    half of equation 4 of Liang et al., so that alpha = 0 gives the loss of one pass.

    The forward pass also computes the gradient, because it has the probabilities. Memory holds the
    logits, one more tensor of the same size and type, and a slice in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, alpha: float, epsilon: float
    ) -> torch.Tensor:
        """Compute the loss of `logits` (2B, T, V), whose first B rows are the first pass.

        `labels` have the shape (B, T) and are -100 at padding. `epsilon` is the label smoothing. A
        packed batch has logits (1, 2N, V) and labels (1, N).
        """
        vocab_size = logits.shape[-1]
        exact = torch.promote_types(logits.dtype, torch.float32)
        first, second = logits.reshape(2, -1, vocab_size)
        gradient = torch.zeros_like(logits).view(2, -1, vocab_size)
        total = torch.zeros((), dtype=exact, device=logits.device)
        rows = (labels.flatten() != -100).nonzero().squeeze(1)
        size = max(1, (_IN_CACHE if logits.is_cpu else _ON_DEVICE) // vocab_size)
        for part in rows.split(size):
            gold = labels.flatten()[part, None]
            p, q = (side[part].to(exact).log_softmax(dim=-1) for side in (first, second))
            total += sum(_smoothed_loss(side, gold, epsilon) for side in (p, q)) / 2
            log_ratio = p - q
            p, q = p.exp_(), q.exp_()
            kl_pq, kl_qp = _dot(p, log_ratio), -_dot(q, log_ratio)
            total += alpha / 4 * (kl_pq + kl_qp).sum()
            # The gradient by the logits of p is p * (log_ratio - KL(p, q)) for KL(p, q), and p - q
            # for KL(q, p). The gradient by the logits of q has p and q exchanged.
            log_ratio *= alpha / 2
            sides = ((0, p, q, kl_pq, 1), (1, q, p, kl_qp, -1))
            for number, probability, opposite, divergence, sign in sides:
                slope = torch.add(1 + alpha / 2 * (1 - divergence), log_ratio, alpha=sign)
                slope.mul_(probability)
                slope.sub_(epsilon / vocab_size).sub_(opposite, alpha=alpha / 2)
                slope.scatter_add_(1, gold, slope.new_full(gold.shape, epsilon - 1))
                gradient[number, part] = slope.div_(2).to(logits.dtype)
        ctx.save_for_backward(gradient.view_as(logits))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradient that the forward pass computed."""
        (gradient,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype), None, None, None


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the dot product of each row: (C, V) and (C, V) to (C, 1)."""
    return (left * right).sum(dim=-1, keepdim=True)


def _smoothed_loss(
    log_probabilities: torch.Tensor, gold: torch.Tensor, epsilon: float
) -> torch.Tensor:
    at_target = log_probabilities.gather(1, gold).sum()
    return (epsilon - 1) * at_target - epsilon * log_probabilities.mean(dim=-1).sum()


def twice(inputs: dict[str, Any]) -> dict[str, Any]:
    """Repeat a batch to compute two passes in one: (B, ...) to (2B, ...), (1, N) to (1, 2N)."""
    if "cu_seq_lens_q" not in inputs:
        return {name: torch.cat((value, value)) for name, value in inputs.items()}
    return {name: _packed_twice(name, value) for name, value in inputs.items()}


def _packed_twice(name: str, value: Any) -> Any:
    if not torch.is_tensor(value):
        return value  # the length of the longest sentence
    if "cu_seq_lens" in name:
        return torch.cat((value, value[1:] + value[-1]))
    return torch.cat((value, value), dim=1)
