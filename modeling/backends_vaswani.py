"""Casts around an attention backend that is slow in some dtypes."""

from collections.abc import Callable
from typing import Any

import torch


def is_slow_on_cpu(query: torch.Tensor) -> bool:
    """Tell whether SDPA's backward pass is several times slower: on CPUs, in bfloat16."""
    return query.is_cpu and query.dtype == torch.bfloat16 and query.requires_grad


def attend_in_float32(
    attention: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call `attention` in float32, without autocast, and cast the output back."""
    if torch.is_tensor(attention_mask) and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        output, weights = attention(
            module, query.float(), key.float(), value.float(), attention_mask, **kwargs
        )
    return output.to(query.dtype), weights


__all__ = ["attend_in_float32", "is_slow_on_cpu"]
