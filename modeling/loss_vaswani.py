"""Label-smoothed cross-entropy from hidden states (section 5.4), without the logits of a batch.

Shapes: N target tokens, D = d_model, V entries of the target vocabulary.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Logits of one chunk: few enough for a processor's cache, enough to keep an accelerator busy.
_CHUNK_ON_CPU, _CHUNK_ELSEWHERE = 2**21, 2**26


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of (1 - eps) * nll(target) + eps * mean over the vocabulary of nll.

    Logits live for one chunk of tokens at a time: the gradients, softmax(logits) minus the smoothed
    target, are taken while they are at hand, so that the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        epsilon: float,
    ) -> torch.Tensor:
        """Compute the loss of `hidden_states` (N, D) and `targets` (N,) under `weight` (V, D)."""
        vocab_size = weight.shape[0]
        on_cpu = hidden_states.device.type == "cpu"
        rows = max((_CHUNK_ON_CPU if on_cpu else _CHUNK_ELSEWHERE) // vocab_size, 1)
        exact = torch.promote_types(hidden_states.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden_states.device)
        hidden_gradient = torch.empty_like(hidden_states)
        weight_gradient = torch.zeros(weight.shape, dtype=exact, device=weight.device)
        for start in range(0, len(targets), rows):
            states, gold = hidden_states[start : start + rows], targets[start : start + rows, None]
            logits = (states @ weight.t()).to(exact)  # (rows, V)
            log_sum = logits.logsumexp(dim=-1, keepdim=True)  # (rows, 1)
            at_target = logits.gather(1, gold)
            at_average = logits.mean(dim=-1, keepdim=True)
            total += (log_sum - (1 - epsilon) * at_target - epsilon * at_average).sum()
            # From here on the same memory holds the gradient of the logits.
            gradient = logits.sub_(log_sum).exp_().sub_(epsilon / vocab_size)
            gradient.scatter_add_(1, gold, gradient.new_full(gold.shape, epsilon - 1))
            gradient = gradient.to(states.dtype)
            hidden_gradient[start : start + rows] = gradient @ weight.to(states.dtype)
            weight_gradient += gradient.t() @ states
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that the forward pass took."""
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            weight_gradient * scale.to(weight_gradient.dtype),
            None,
            None,
        )
