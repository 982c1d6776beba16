"""Label-smoothed cross-entropy from hidden states (section 5.4), without the logits of a batch.

Shapes: N target tokens, D = d_model, V entries of the target vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Bytes of a chunk's logits. Each chunk adds to the gradient of the whole vocabulary matrix, so that
# one of fewer tokens than D would spend more on this than on its own product.
_CHUNK_ON_CPU, _CHUNK_ELSEWHERE = 2**27, 2**28
# Logits that fit the cache of a CPU core, for all that is done to them between the products.
_IN_CACHE = 2**18


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of (1 - eps) * nll(target) + eps * mean over the vocabulary of nll.

    Logits live for one chunk of tokens at a time: the gradients, softmax(logits) minus the smoothed
    target, are taken while they are at hand, so that the backward pass only scales them. Products
    are computed in the type of autocast or of the hidden states, sums at least in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        epsilon: float,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the loss of `targets` (N,) after `hidden_states` (N, D).

        Logits are `hidden_states` times `weight` (V, D), plus `bias` (V,) if there is one.
        """
        device, dtype = hidden_states.device, hidden_states.dtype
        exact = torch.promote_types(dtype, torch.float32)
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        total = torch.zeros((), dtype=exact, device=device)
        hidden_gradient = torch.empty_like(hidden_states)
        weight_gradient = torch.zeros(weight.shape, dtype=exact, device=device)
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=exact)
        with torch.autocast(device.type, enabled=False):
            states, matrix = hidden_states.to(dtype), weight.to(dtype)  # once, not in every chunk
            chunk_size = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ELSEWHERE
            rows = chunk_size // (len(weight) * dtype.itemsize)
            for chunk in _slices(len(targets), rows):
                logits = states[chunk] @ matrix.t()  # (C, V)
                if bias is not None:
                    logits += bias.to(dtype)
                total += _loss_and_gradient(logits, targets[chunk, None], epsilon, exact)
                hidden_gradient[chunk] = logits @ matrix
                if dtype == exact:
                    weight_gradient.addmm_(logits.t(), states[chunk])
                else:
                    weight_gradient += logits.t() @ states[chunk]
                if bias_gradient is not None:
                    bias_gradient += logits.sum(dim=0, dtype=exact)
                del logits  # before the next are made
        if bias is not None and bias_gradient is not None:
            bias_gradient = bias_gradient.to(bias.dtype)
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype), bias_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that the forward pass took."""
        hidden_gradient, weight_gradient, bias_gradient = ctx.saved_tensors
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            weight_gradient * scale.to(weight_gradient.dtype),
            None,
            None,
            None if bias_gradient is None else bias_gradient * scale.to(bias_gradient.dtype),
        )


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, epsilon: float, exact: torch.dtype
) -> torch.Tensor:
    """Sum the loss of `logits` (C, V), `targets` (C, 1); put its gradient in the logits' place."""
    total = torch.zeros((), dtype=exact, device=logits.device)
    tokens, vocab_size = logits.shape
    for part in _slices(tokens, _IN_CACHE // vocab_size if logits.is_cpu else tokens):
        values, gold = logits[part].to(exact), targets[part]  # the logits themselves, or a copy
        at_target, at_average = values.gather(1, gold), values.mean(dim=-1, keepdim=True)
        highest = values.amax(dim=-1, keepdim=True)
        sums = values.sub_(highest).exp_().sum(dim=-1, keepdim=True)
        total += (highest + sums.log() - (1 - epsilon) * at_target - epsilon * at_average).sum()
        values.div_(sums).sub_(epsilon / vocab_size)
        values.scatter_add_(1, gold, values.new_full(gold.shape, epsilon - 1))
        if values.dtype != logits.dtype:
            logits[part] = values
    return total


def _slices(number: int, size: int) -> list[slice]:
    """Cut `number` rows into pieces of `size`, of one where this is less."""
    return [slice(start, start + max(size, 1)) for start in range(0, number, max(size, 1))]
