"""Linear layers and embeddings with int8 weights, and their products on CPUs.

Each row of a weight, which is an output channel, has a scale: the weight is its int8 values times
that scale. A product rounds each row of states to int8 too, with a scale of its own.

The sums of a product are exact integers. The result for a row therefore depends neither on the
other rows nor on the kernel that computes it.

Shapes: R rows of states; a layer maps `in` features to `out`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_LARGEST = 127  # -128 is not used, so that rounding is symmetric
_ZERO_POINT = 128  # of states as unsigned integers
_SMALLEST = 1e-30  # largest value of a row of states, so that zeros are not divided by zero
_BEYOND_CACHE = 2**23  # bytes of weights that push each other out of a core's cache
# A float of this size has no bits for fractions. Adding it rounds a number to an integer, which is
# then found in the low bits of the sum.
_NO_FRACTIONS = 1.5 * 2**23
# Operands as tensors, because torch casts a number of Python in each operation, which takes longer
# than the operation.
_STEPS, _STEP, _TO_SIGNED, _TO_UNSIGNED = (
    torch.tensor(number, dtype=torch.float32, device="cpu")
    for number in (_LARGEST, 1 / _LARGEST, _NO_FRACTIONS, _NO_FRACTIONS + _ZERO_POINT)
)


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of a weight (out, in): int8 values (out, in) and scales (out,)."""
    scale = (weight.abs().amax(dim=1).float() / _LARGEST).to(weight.dtype)
    scale = scale.masked_fill(scale == 0, 1)  # a row of zeros must not divide by zero
    # A scale of 16 bits is rounded itself, so values may exceed the range a little.
    values = (weight.float() / scale.float()[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return values.to(torch.int8), scale


class _Int8Weight(nn.Module):
    """A module whose weight is int8, with a scale for each row."""

    weight: nn.Parameter
    weight_scale: nn.Parameter

    def take_weight(self, weight: torch.Tensor, rounded: dict[torch.Tensor, Any]) -> None:
        """Round a weight, unless it is among the `rounded` ones: tied weights stay tied."""
        if weight not in rounded:
            rounded[weight] = tuple(
                nn.Parameter(values, requires_grad=False)
                for values in round_weight(weight.detach())
            )
        self.weight, self.weight_scale = rounded[weight]

    def float_weight(self) -> torch.Tensor:
        """Return the weight in floating point (out, in)."""
        return self.weight * self.weight_scale[:, None]


class Int8Linear(_Int8Weight, nn.Linear):
    """A linear layer with int8 weights, made from `linear`."""

    def __init__(self, linear: nn.Linear, rounded: dict[torch.Tensor, Any]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.take_weight(linear.weight, rounded)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight: (..., in) to (..., out)."""
        self._refuse_training(input)
        if input.device.type != "cpu" or not multiplies_exactly():
            return F.linear(input, self.float_weight().to(input.dtype), self.bias)
        return multiply(input, self.weight, self.weight_scale, self.bias)

    def _refuse_training(self, states: torch.Tensor) -> None:
        if torch.is_grad_enabled() and (self.training or states.requires_grad):
            raise ValueError(
                "int8 weights cannot be trained: train the model that they were rounded from, or "
                "call model.dequantize() first."
            )


class Int8Embedding(_Int8Weight, nn.Embedding):
    """An embedding with int8 weights, made from `embedding`."""

    def __init__(self, embedding: nn.Embedding, rounded: dict[torch.Tensor, Any]) -> None:
        nn.Module.__init__(self)
        for name in nn.Embedding.__constants__:
            setattr(self, name, getattr(embedding, name))
        self.take_weight(embedding.weight, rounded)
        self.train(embedding.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up tokens (...): (..., D)."""
        return F.embedding(input, self.weight) * F.embedding(input, self.weight_scale[:, None])


class Int8Product:
    """A product with an int8 weight that is used in many steps.

    Args:
        values: (out, in) int8 values.
        packed: the same in oneDNN's layout.
        scale: (out,) of the weight, in float32.
        bias: (out,).
    """

    def __init__(
        self,
        values: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        self.values, self.packed, self.scale, self.bias = values, packed, scale * _STEP, bias
        self.zeros = torch.zeros(len(scale), dtype=torch.int64)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Round states (..., in), and multiply them by the weight: (..., out)."""
        single = states.numel() == states.shape[-1]
        if single and _is_faster_unpacked(*self.values.shape, torch.get_num_threads()):
            return _multiply_rounded(states, self.plain_sums, self.bias)
        return _multiply_rounded(states, self.packed_sums, self.bias)

    def plain_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows by the weight that is not packed, as `_multiply_rounded` asks."""
        return _plain_sums(rows, self.values, self.scale)

    def packed_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows by the packed weight, as `_multiply_rounded` asks."""
        return _packed_sums(rows, self.packed, self.scale, self.zeros)


def multiply(
    states: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Round states (..., in), and multiply them by a weight that is not packed: (..., out).

    Args:
        states: (..., in).
        values: (out, in) int8 values.
        scale: (out,) of the weight.
        bias: (out,).
    """
    scale = scale.float() * _STEP
    return _multiply_rounded(states, lambda rows: _plain_sums(rows, values, scale), bias)


def _multiply_rounded(
    states: torch.Tensor, sums: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Scale each row of states (..., in) to -127 ... 127, round it, and multiply: (..., out).

    Args:
        states: (..., in).
        sums: rounds scaled rows (R, in), which it may overwrite, and maps them to sums (R, out) in
            float32, times the weight's scale / 127.
        bias: (out,).
    """
    rows = states if states.dim() == 2 else states.reshape(-1, states.shape[-1])
    rows = rows if rows.dtype == torch.float32 else rows.float()
    scaled = rows.abs()
    largest = scaled.amax(1, True).clamp_min_(_SMALLEST)
    output = sums(torch.mul(rows, _STEPS / largest, out=scaled))
    if bias is None:
        output.mul_(largest)
    else:
        torch.addcmul(bias, output, largest, out=output)
    output = output if output.dtype == states.dtype else output.to(states.dtype)
    return output if states.dim() == 2 else output.view(*states.shape[:-1], output.shape[1])


def pack(values: torch.Tensor) -> torch.Tensor:
    """Return int8 values (out, in) in oneDNN's layout."""
    return torch.ops.onednn.qlinear_prepack(values, None)


def _plain_sums(rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round rows (R, in) in place, and multiply them by int8 values (out, in) and their scale."""
    rounded = rows.add_(_TO_SIGNED).view(torch.int32).to(torch.int8)
    return torch._int_mm(rounded, values.t()) * scale


def _packed_sums(
    rows: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Do the same with a packed weight: (R, out)."""
    # oneDNN is fast on all CPUs with unsigned states only.
    rounded = rows.add_(_TO_UNSIGNED).view(torch.int32).to(torch.uint8)
    number, none = torch.float32, "none"
    return torch.ops.onednn.qlinear_pointwise(
        rounded, 1.0, _ZERO_POINT, packed, scale, zeros, None, 1.0, 0, number, none, [], ""
    )


@functools.cache
def _is_faster_unpacked(outputs: int, inputs: int, threads: int) -> bool:
    """Measure whether a single row is multiplied faster by a weight that is not packed.

    The answer depends on the CPU and on the threads. It changes no result, because the sums of both
    products are exact. A step of a model multiplies by many weights, so no weight stays in the
    cache of a core, and none does here.
    """
    weights = max(1, _BEYOND_CACHE // (outputs * inputs))
    products = [_example(outputs, inputs) for _ in range(weights)]
    states = torch.ones(1, inputs)

    def all_products(name: str) -> None:
        for product in products:
            _multiply_rounded(states, getattr(product, name), None)

    plain = _shortest_time(lambda: all_products("plain_sums"))
    return plain < _shortest_time(lambda: all_products("packed_sums"))


def _example(outputs: int, inputs: int) -> Int8Product:
    values = torch.ones(outputs, inputs, dtype=torch.int8)
    return Int8Product(values, pack(values), torch.ones(outputs), None)


def _shortest_time(compute: Callable[[], None]) -> float:
    """Return the shortest of several times, which other processes disturb least."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return min(times)


@functools.cache
def multiplies_exactly() -> bool:
    """Tell whether this CPU adds products of int8 without overflow.

    CPUs without VNNI or AMX add pairs of products in 16 bits, which overflow.
    """
    rows = torch.full((2, 64), float(_LARGEST))
    values = torch.full((16, 64), _LARGEST, dtype=torch.int8)
    expected = 64 * _LARGEST**2
    try:
        sums = _plain_sums(rows.clone(), values, torch.ones(16))
        zeros = torch.zeros(16, dtype=torch.int64)
        same = _packed_sums(rows.clone(), pack(values), torch.ones(16), zeros)
    except (AttributeError, RuntimeError):
        return False
    return bool((sums == expected).all() and (same == expected).all())


__all__ = [
    "Int8Embedding",
    "Int8Linear",
    "Int8Product",
    "multiplies_exactly",
    "multiply",
    "pack",
    "round_weight",
]
