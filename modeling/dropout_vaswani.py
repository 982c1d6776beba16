"""Dropout (section 5.4) whose random numbers cost little on a CPU."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

# PyTorch draws a number for each element on a CPU, one after the other, which takes longer than
# a layer's products. One of 64 bits serves four elements here, 16 bits for each.
_CHANCES = 2**16


class _CheapDropout(torch.autograd.Function):
    """Keep an element with a probability of `kept` in 2^16, and scale those that are kept."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, kept: int) -> torch.Tensor:
        number = states.numel()
        bits = torch.empty(-(-number // 4), dtype=torch.int64).random_(-(2**63), None)
        chances = bits.view(torch.int16)[:number]  # -2^15 to 2^15 - 1
        # As 0 and 1 in int8: PyTorch turns these into floating-point numbers faster than booleans.
        mask = torch.empty(states.shape, dtype=torch.int8)
        torch.lt(chances, kept - _CHANCES // 2, out=mask.view(-1))
        ctx.save_for_backward(mask)
        ctx.scale = _CHANCES / kept
        return mask.to(states.dtype).mul_(states).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        return mask.to(gradient.dtype).mul_(gradient).mul_(ctx.scale), None


def drop_out(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Set elements to 0 with probability `p` in training, and divide the others by 1 - p (5.4).

    On a CPU `p` is rounded to a multiple of 2^-16; the scale is that of the rounded one.
    """
    if not training:
        return states
    kept = round((1 - p) * _CHANCES)
    if not states.is_cpu or kept in (0, _CHANCES) or torch.compiler.is_compiling():
        return F.dropout(states, p)
    return _CheapDropout.apply(states, kept)
