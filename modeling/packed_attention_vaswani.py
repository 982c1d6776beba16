"""Attention inside the sentences of a packed batch (section 3.2).

Shapes: B sentences, N tokens of one side, G windows of a group, Q queries, K keys, H heads; d_k and
d_v as in the paper.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .backends_vaswani import attend_in_float32, is_slow_on_cpu
from .dropout_vaswani import drop_out
from .packing_vaswani import PackedMask
from .training_kernels_vaswani import attend_in_sentences
from .windows_vaswani import LONG


def attention_function(
    implementation: str, attention_mask: Any, query: torch.Tensor, eager_attention: Callable
) -> Callable:
    """Return the attention function of packed batches, or the one that transformers chooses.

    SDPA runs in float32 where it is slow in the dtype of `query`.
    """
    if isinstance(attention_mask, PackedMask):
        return functools.partial(packed_attention, implementation, eager_attention)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    if implementation == "sdpa" and is_slow_on_cpu(query):
        attention = functools.partial(attend_in_float32, attention)
    return attention


@torch.compiler.disable
def packed_attention(
    implementation: str,
    eager_attention: Callable,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention inside the sentences of a packed batch: (1, H, N, d_k) to (1, N, H, d_v).

    Without dropout, GPUs run torch's flash attention by cumulative lengths, if it supports the
    states. CPUs run a compiled kernel. Otherwise, attention is computed in windows of sentences,
    and scores have the dtype of the states. Only "eager" returns weights, of shape (B, H, Q, K).
    """
    mask = attention_mask
    # (1, H, N, d) to (N, H, d), the layout of the projections.
    states = [side.squeeze(0).transpose(0, 1) for side in (query, key, value)]
    if implementation == "eager":
        return _by_sentence(eager_attention, module, states, mask, scaling, dropout)
    if not dropout and _varlen_supports(*states):
        return _by_cumulative_lengths(states, mask, module.is_causal, scaling)[None], None
    output = attend_in_sentences(states, mask, module.is_causal, scaling, dropout)
    if output is not None:
        return output[None], None
    with torch.autocast(query.device.type, enabled=False):  # the states have their dtype already
        return _in_windows(states, mask, module.is_causal, scaling, dropout)[None], None


def _varlen_supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether torch's `varlen_attn` supports the device, the dtype and the head sizes."""
    return (
        query.is_cuda
        and "window_size" in inspect.signature(varlen_attn).parameters
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _by_cumulative_lengths(
    states: list[torch.Tensor], mask: PackedMask, causal: bool, scaling: float
) -> torch.Tensor:
    query, key, value = states
    output: Any = varlen_attn(
        query,
        key,
        value,
        mask.queries.cu_seq_lens,
        mask.keys.cu_seq_lens,
        mask.queries.max_length,
        mask.keys.max_length,
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    return output


def _in_windows(
    states: list[torch.Tensor], mask: PackedMask, causal: bool, scaling: float, dropout: float
) -> torch.Tensor:
    """Attend inside windows: (N, H, d) to (N, H, d_v)."""
    windows, heads = mask.windows, states[0].shape[1]
    sides = (windows.queries, windows.keys, windows.keys)
    groups = zip(*(side.divide(of) for side, of in zip(sides, states, strict=True)), strict=True)
    outputs = []
    for number, (query, key, value) in enumerate(groups):
        if max(query.shape[1], key.shape[1]) > LONG:
            query, key, value = (side.unflatten(0, (-1, heads)) for side in (query, key, value))
            real_keys = ~windows.padded_keys(number)[:, None, None]  # (G, 1, 1, K)
            output = _attend_long(query, key, value, real_keys, causal, scaling, dropout)
            output = output.flatten(0, 1)
        else:
            additive = windows.additive(number, causal, heads, query.dtype)
            scores = torch.baddbmm(additive, query, key.transpose(1, 2), alpha=scaling)
            output = drop_out(scores.softmax(dim=-1), dropout, training=True) @ value
        outputs.append(output)  # (G * H, Q, d_v)
    return windows.queries.join(outputs, heads)


def _attend_long(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real_keys: torch.Tensor,
    causal: bool,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attend by SDPA in windows of one sentence each: (G, H, Q or K, d) to (G, H, Q, d_v)."""
    dtype, exact = query.dtype, torch.float32 if is_slow_on_cpu(query) else query.dtype
    query, key, value = query.to(exact), key.to(exact), value.to(exact)
    # Padding follows the last query of a sentence, so a causal mask hides it.
    mask = None if causal else real_keys
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, is_causal=causal, scale=scaling
    ).to(dtype)


def _by_sentence(
    eager_attention: Callable,
    module: Any,
    states: list[torch.Tensor],
    mask: PackedMask,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as written in the paper, one sentence in a row: (1, N, H, d_v) and (B, H, Q, K)."""
    windows, heads = mask.sentences, states[0].shape[1]
    sides = (windows.queries, windows.keys, windows.keys)
    inputs = (side.divide(values) for side, values in zip(sides, states, strict=True))
    outputs, weights = [], []
    for number, (query, key, value) in enumerate(zip(*inputs, strict=True)):
        hidden = windows.hidden(number, module.is_causal)
        split = (side.unflatten(0, (-1, heads)) for side in (query, key, value))
        lowest = torch.finfo(query.dtype).min
        additive = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, lowest)
        output, weight = eager_attention(
            module, *split, additive[:, None], scaling=scaling, dropout=dropout
        )  # (G, Q, H, d_v), (G, H, Q, K)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        weights.append(weight)
    return windows.queries.join(outputs, heads)[None], _padded_weights(weights, mask)


def _padded_weights(weights: list[torch.Tensor], mask: PackedMask) -> torch.Tensor:
    """Join the weights of the groups (G, H, Q, K) to (B, H, Q, K), with 0 at padding."""
    sentences, heads = len(mask.queries.cu_seq_lens) - 1, weights[0].shape[1]
    sizes = (mask.queries.max_length, mask.keys.max_length)
    joined = weights[0].new_zeros(sentences, heads, *sizes)
    windows = mask.sentences
    paddings = windows.queries.of_groups(windows.queries.padding)
    for members, weight, padding in zip(windows.sentences, weights, paddings, strict=True):
        missing = (0, sizes[1] - weight.shape[3], 0, sizes[0] - weight.shape[2])
        own = weight.masked_fill(padding[:, None, :, None], 0.0)
        numbers = torch.tensor(members, device=weight.device)
        joined = joined.index_copy(0, numbers, F.pad(own, missing))
    return joined


__all__ = ["attention_function", "packed_attention"]
