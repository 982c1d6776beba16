"""Compiled kernels of training on CPUs: attention of packed batches, and sums with LayerNorm.

Each kernel makes one pass in each direction, where torch needs a dozen operators and their memory.
Random bits of dropout come from a seed, which torch draws, so no mask is kept.

Shapes: N tokens of one side, H heads, R rows of states, D = d_model; d_k and d_v as in the paper.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import nn

from ..generation.library_vaswani import (
    COUNT,
    FLOAT,
    FLOATS,
    NUMBER,
    POINTER,
    address,
    as_stored,
    can_train,
    is_transformed,
    library,
    threads_of_training,
)
from ..generation.linear_vaswani import is_changed
from .dropout_vaswani import is_batched
from .packing_vaswani import PackedMask

_LANES = 16  # floats of the widest vector


class _Dropout(ctypes.Structure):
    """`struct dropout` of random.h."""

    _fields_ = (("seed", ctypes.c_uint64), ("kept", ctypes.c_uint32))


class _Sides(ctypes.Structure):
    """`struct sides` of packed.c."""

    _fields_ = (
        ("query_starts", POINTER),
        ("key_starts", POINTER),
        *((name, COUNT) for name in ("sentences", "heads", "d_k", "d_v")),
        ("scaling", FLOAT),
        ("is_causal", NUMBER),
        ("is_half", NUMBER),
        ("dropout", _Dropout),
    )


class _Norm(ctypes.Structure):
    """`struct norm` of residual.c."""

    _fields_ = (
        ("rows", COUNT),
        ("width", COUNT),
        ("weight", POINTER),
        ("bias", POINTER),
        ("epsilon", FLOAT),
        ("is_half", NUMBER),
        ("dropout", _Dropout),
    )


def attend_in_sentences(
    states: list[torch.Tensor], mask: PackedMask, causal: bool, scaling: float, dropout: float
) -> torch.Tensor | None:
    """Attend inside the sentences of a packed batch: (N, H, d_k) to (N, H, d_v).

    Return None if the kernel cannot compute it, such as on a GPU or with long sentences.
    """
    query, key, value = states
    if dropout >= 1 or not can_train(query, key, value) or not mask.fits_kernels:
        return None
    tokens, same = mask.lengths.sum(dim=0).tolist(), mask.lengths[:, 0].equal(mask.lengths[:, 1])
    heads, d_k = query.shape[1:]
    shapes = (tokens[0], heads, d_k), (tokens[1], heads, d_k), (tokens[1], heads, value.shape[2])
    if any(side.shape != shape for side, shape in zip(states, shapes, strict=True)):
        return None
    if causal and not same:
        return None
    output: torch.Tensor = _Attention.apply(query, key, value, mask, causal, scaling, dropout)
    return output


def add_and_normalize(
    states: torch.Tensor, output: torch.Tensor, dropout: float, norm: nn.Module
) -> torch.Tensor | None:
    """Compute LayerNorm(x + Dropout(Sublayer(x))) from states and a sublayer's output (..., D).

    Return None if the kernel cannot compute it, such as on a GPU or with hooks on the norm. Layers
    with "eager" attention do not ask for it, because it has no second derivative.
    """
    if type(norm) is not nn.LayerNorm or norm.normalized_shape != states.shape[-1:]:
        return None
    if is_changed(norm) or norm._backward_hooks or norm._backward_pre_hooks or dropout >= 1:
        return None
    weights = (norm.weight, norm.bias)
    if any(each is None or each.shape != states.shape[-1:] for each in weights):
        return None
    if any(each.dtype != torch.float32 for each in (*weights, states)):
        return None
    if states.shape != output.shape or not can_train(states, *weights) or not can_train(output):
        return None
    normalized: torch.Tensor = _SumAndNorm.apply(states, output, *weights, norm.eps, dropout)
    return normalized


def _refuse_second_derivative(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled() or is_transformed() or is_batched(gradient):
        raise RuntimeError(
            "The compiled kernels of training have no second derivatives (create_graph=True) and "
            "no batched gradients (is_grads_batched=True): set attn_implementation='eager', which "
            "does not use these kernels."
        )


def _dropout_with_new_seed(dropout: float) -> _Dropout:
    """Return dropout with a newly drawn seed."""
    if not dropout:
        return _Dropout(0, 0)
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    return _Dropout(int(seed) % 2**64, max(round((1 - dropout) * 2**32), 1))


class _Attention(torch.autograd.Function):
    """Attention(Q, K, V) of each sentence of a packed batch (section 3.2.1, equation 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: PackedMask,
        causal: bool,
        scaling: float,
        dropout: float,
    ) -> torch.Tensor:
        states = [as_stored(each) for each in (query, key, value)]
        tokens, heads, d_k = query.shape
        d_v = value.shape[2]
        output = states[0].new_empty(tokens, heads, d_v)
        log_sums = torch.empty(tokens, heads, **FLOATS)
        # The backward pass reads copies, because a program may reuse the memory of its boundaries.
        layout = torch.contiguous_format
        sides = (mask.queries, mask.keys)
        starts = [side.cu_seq_lens.clone(memory_format=layout) for side in sides]
        ctx.sides = _Sides(
            *map(address, starts),
            *(len(starts[0]) - 1, heads, d_k, d_v, scaling, causal),
            query.dtype == torch.bfloat16,
            _dropout_with_new_seed(dropout),
        )
        ctx.room = _room_of_thread(*mask.lengths.amax(dim=0).tolist(), d_k, d_v)
        ctx.starts = starts
        _run("attend_packed", ctx, *states, output, log_sums)
        ctx.save_for_backward(*states, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second_derivative(gradient)
        *states, log_sums = ctx.saved_tensors
        gradients = [torch.empty_like(each) for each in states]
        _run("attend_packed_backward", ctx, *states, as_stored(gradient), log_sums, *gradients)
        return *gradients, None, None, None, None


def _run(kernel: str, ctx: Any, *tensors: torch.Tensor) -> None:
    threads = threads_of_training()
    room = torch.empty(threads, ctx.room, **FLOATS)
    run = getattr(library(), kernel)
    run(ctypes.byref(ctx.sides), *map(address, tensors), address(room), ctx.room, threads)


@functools.lru_cache
def _room_of_thread(queries: int, keys: int, d_k: int, d_v: int) -> int:
    """Return how many floats one thread needs for one head of the longest sentence."""
    queries, keys, d_k, d_v = (-(-size // _LANES) * _LANES for size in (queries, keys, d_k, d_v))
    widest = max(d_k, d_v)
    of_states = queries * d_k + keys * d_k + keys * widest + keys * d_v + queries * d_v
    return of_states + 2 * keys + 2 * queries * keys + max(queries, keys) * widest


class _SumAndNorm(torch.autograd.Function):
    """LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        output: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        epsilon: float,
        dropout: float,
    ) -> torch.Tensor:
        states, output = as_stored(states), as_stored(output)
        width = states.shape[-1]
        rows = states.numel() // width
        sums, normalized = torch.empty_like(states), torch.empty_like(states)
        moments = torch.empty(rows, 2, **FLOATS)
        weights = as_stored(weight), as_stored(bias)
        is_half = output.dtype == torch.bfloat16
        norm = _Norm(
            rows, width, *map(address, weights), epsilon, is_half, _dropout_with_new_seed(dropout)
        )
        library().add_and_normalize(
            ctypes.byref(norm),
            *map(address, (states, output, sums, moments, normalized)),
            threads_of_training(),
        )
        ctx.norm, ctx.dtype = norm, output.dtype
        ctx.save_for_backward(sums, moments, *weights)
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second_derivative(gradient)
        sums, moments, weight, bias = ctx.saved_tensors
        ctx.norm.weight, ctx.norm.bias = address(weight), address(bias)
        threads = threads_of_training()
        gradient = as_stored(gradient)  # a copy must live until the kernel has read it
        of_states = torch.empty_like(sums)
        of_output = torch.empty_like(sums, dtype=ctx.dtype)
        of_norm = torch.zeros(threads, 2, len(weight), **FLOATS)
        library().add_and_normalize_backward(
            ctypes.byref(ctx.norm),
            *map(address, (gradient, sums, moments, of_states, of_output, of_norm)),
            threads,
        )
        of_weight, of_bias = of_norm.sum(0)
        return of_states, of_output, of_weight, of_bias, None, None


__all__ = ["add_and_normalize", "attend_in_sentences"]
