"""Dropout (section 5.4) with cheap random numbers on CPUs."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ..generation.library_vaswani import is_transformed

# On a CPU, PyTorch draws a random number for each element, which takes longer than the products of
# a layer. Here, a number of 64 bits serves four elements, with 16 bits each.
_CHANCES = 2**16


class _CheapDropout(torch.autograd.Function):
    """Keep each element with probability `kept` / 2^16, and scale the kept elements."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, kept: int) -> torch.Tensor:
        number = states.numel()
        device = states.device  # and not torch's default device
        bits = torch.empty(-(-number // 4), dtype=torch.int64, device=device)
        bits.random_(-(2**63), None)
        chances = bits.view(torch.int16)[:number]  # -2^15 to 2^15 - 1
        # The mask is int8, because PyTorch casts int8 to floating point faster than booleans.
        mask = torch.empty(states.shape, dtype=torch.int8, device=device)
        torch.lt(chances, kept - _CHANCES // 2, out=mask.view(-1))
        ctx.save_for_backward(mask)
        ctx.scale = _CHANCES / kept
        return mask.to(states.dtype).mul_(states).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        kept = mask.to(gradient.dtype)
        if is_batched(gradient):  # `mul_` cannot multiply such gradients
            return kept * gradient * ctx.scale, None
        return kept.mul_(gradient).mul_(ctx.scale), None


def is_batched(gradient: torch.Tensor) -> bool:
    """Tell whether a gradient stands for several (`is_grads_batched=True`), and has no memory."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def drop_out(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Set elements to 0 with probability `p` in training, and divide the others by 1 - p (5.4).

    On a CPU, `p` is rounded to a multiple of 2^-16. The scale belongs to the rounded value.
    """
    if not training:
        return states
    kept = round((1 - p) * _CHANCES)
    if (
        not states.is_cpu
        or kept in (0, _CHANCES)
        or torch.compiler.is_compiling()
        or is_transformed(states)
    ):
        return F.dropout(states, p)
    return _CheapDropout.apply(states, kept)
