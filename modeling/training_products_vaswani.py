"""Products of float32 matrices in training, by a compiled kernel on CPUs with AMX.

The kernel splits floats into integers of 8 bits (`kernels/digits.h`). On normally distributed
values, its rounding errors are smaller than those of torch's products.

Shapes: R rows of states; a layer maps `in` features to `out`.
"""

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..generation.library_vaswani import (
    COUNT,
    NUMBER,
    POINTER,
    address,
    as_stored,
    can_train,
    is_as_stored,
    library,
    threads_of_training,
)
from ..generation.linear_vaswani import is_changed
from .dropout_vaswani import is_batched

_MOST_MATRICES = 3  # of a side
_ROWS_OF_TILE = 16
_MEMORY = 2**22  # bytes for digits of the right side, if a single group of inputs needs less
# Smaller products are as fast by torch.
_LEAST_MULTIPLICATIONS, _LEAST_SIZE = 2**27, 64


class _Kept(threading.local):
    """Memory that a thread uses again, because the first use of new memory takes time."""

    memory = torch.empty(0, dtype=torch.int8, device="cpu")


_kept = _Kept()


class _Side(ctypes.Structure):
    """`struct side` of matrices.c."""

    _fields_ = (
        ("values", POINTER * _MOST_MATRICES),
        ("rows", COUNT * _MOST_MATRICES),
        ("count", NUMBER),
        ("by_columns", NUMBER),
    )


class _Products(ctypes.Structure):
    """`struct products_of_matrices` of matrices.c."""

    _fields_ = (
        ("inputs", COUNT),
        ("left", _Side),
        ("right", _Side),
        ("bias", POINTER * _MOST_MATRICES),
        ("outputs", POINTER * _MOST_MATRICES),
        ("adds", NUMBER),
    )


def project(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Call a linear layer with states (..., in). See `project_each`."""
    return project_each([layer], states)[0]


def project_each(layers: Sequence[nn.Module], states: torch.Tensor) -> list[torch.Tensor]:
    """Call linear layers with states (..., in), in training by the kernel if it can compute them.

    The kernel computes neither layers with hooks nor subclasses of nn.Linear, such as an adapter's.
    Small products are left to torch.
    """
    if not _can_compute(layers, states):
        return [layer(states) for layer in layers]
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
    return list(_Linear.apply(states, *parameters))


def multiply_matrices(
    left: torch.Tensor, right: torch.Tensor, output: torch.Tensor | None = None, adds: bool = False
) -> torch.Tensor:
    """Multiply (R, in) by (in, out), by the kernel or by torch: (R, out), in `output` if given.

    With `adds`, the product is added to the output.
    """
    shape = len(left), right.shape[1]
    fit = left.shape[1] == right.shape[0]
    if output is not None:
        fit = fit and output.shape == shape and output.dtype == left.dtype
    if fit and _can_multiply(left, right) and _pays(len(left), left.shape[1], right.shape[1]):
        if output is None:
            output = left.new_empty(shape)
        _multiply([left], [right], [output], adds=adds)
        return output
    if adds and output is not None:
        return output.addmm_(left, right)
    return torch.mm(left, right, out=output)


def _can_compute(layers: Sequence[Any], states: torch.Tensor) -> bool:
    """Tell whether the kernel can compute the layers, and is faster than torch."""
    if _is_recorded() or states.dim() < 2 or not all(map(_is_plain, layers)):
        return False
    *shape, inputs = states.shape
    outs = [layer.out_features for layer in layers]
    if min(outs) < _LEAST_SIZE or not _pays(math.prod(shape), inputs, sum(outs)):
        return False
    tensors = [states]
    for layer, out in zip(layers, outs, strict=True):
        if layer.weight.shape != (out, inputs):
            return False
        tensors.append(layer.weight)
        if layer.bias is not None:
            if layer.bias.shape != (out,):
                return False
            tensors.append(layer.bias)
    return _can_multiply(*tensors)


def _is_plain(layer: nn.Module) -> bool:
    if not layer.training or type(layer) is not nn.Linear or is_changed(layer):
        return False
    return not layer._backward_hooks and not layer._backward_pre_hooks


def _is_recorded() -> bool:
    """Tell whether a program records calls of modules and operators."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.nn.modules.module._has_any_global_hook()
    )


def _pays(rows: int, inputs: int, outs: int) -> bool:
    is_large = rows * inputs * outs >= _LEAST_MULTIPLICATIONS
    return is_large and min(rows, inputs, outs) >= _LEAST_SIZE


def _can_multiply(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernel can multiply these tensors on this CPU."""
    return (
        tensors[0].dtype == torch.float32
        and can_train(*tensors)
        and not torch.is_autocast_enabled("cpu")
        and bool(library().multiplies_matrices())
    )


def _multiply(
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    adds: bool = False,
) -> None:
    """Multiply each left matrix (R, in) by each right one (in, out), and add a bias (out,).

    At least one side has a single matrix.
    """
    inputs = left[0].shape[1]
    left, left_side = _side(left)
    right, right_side = _side([matrix.t() for matrix in right])
    products = _Products(inputs, left_side, right_side, adds=adds)
    stored = [None if bias is None else as_stored(bias) for bias in biases]
    products.bias[: len(stored)] = [None if bias is None else address(bias) for bias in stored]
    products.outputs[: len(outputs)] = list(map(address, outputs))
    rows = sum(-(-right_side.rows[i] // _ROWS_OF_TILE) * _ROWS_OF_TILE for i in range(len(right)))
    threads = threads_of_training()
    memory = _memory(threads, rows * library().bytes_of_row())
    library().multiply_matrices(*(ctypes.byref(products), address(memory), len(memory), threads))


def _memory(threads: int, needed: int) -> torch.Tensor:
    """Return memory for threads, and at least `needed` bytes for digits of the right side.

    A thread of Python keeps memory for `_MEMORY` bytes of digits.
    """
    size = threads * library().bytes_of_thread() + max(needed, _MEMORY)
    if needed > _MEMORY:
        return torch.empty(size, dtype=torch.int8, device="cpu")
    if len(_kept.memory) != size:
        _kept.memory = torch.empty(size, dtype=torch.int8, device="cpu")
    return _kept.memory


def _side(matrices: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _Side]:
    """Describe matrices (rows, in). Return the tensors that the description points to, too."""
    by_columns = all(is_as_stored(matrix.t()) for matrix in matrices)
    stored = [matrix.t() if by_columns else as_stored(matrix) for matrix in matrices]
    side = _Side(count=len(matrices), by_columns=by_columns)
    side.values[: len(matrices)] = list(map(address, stored))
    side.rows[: len(matrices)] = list(map(len, matrices))
    return stored, side


class _Linear(torch.autograd.Function):
    """x W^T + b of several layers: (..., in) to (..., out) of each."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Compute from weights (out, in), followed by as many biases (out,) or None."""
        count = len(parameters) // 2
        weights: list[Any] = list(parameters[:count])
        of_states, *of_weights = ctx.needs_input_grad[: count + 1]
        ctx.save_for_backward(
            states if any(of_weights) else None, *(weights if of_states else [None] * count)
        )
        outputs = [states.new_empty(*states.shape[:-1], len(weight)) for weight in weights]
        rows = [output.flatten(0, -2) for output in outputs]
        transposed = [weight.t() for weight in weights]
        _multiply([states.flatten(0, -2)], transposed, rows, parameters[count:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients that are needed from the gradients of the outputs (..., out)."""
        states, *weights = ctx.saved_tensors
        needs_states, *needs = ctx.needs_input_grad
        of_rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in above]
        wanted = [i for i in range(len(weights)) if needs[i]]  # weights with a gradient
        of_states: Any = None
        of_weights: dict[int, torch.Tensor] = {}
        # With `create_graph`, torch's operators record the second derivative.
        if torch.is_grad_enabled() or not can_train(*above) or any(map(is_batched, above)):
            if needs_states:
                pairs = zip(of_rows, weights, strict=True)
                of_states = sum(gradient @ weight for gradient, weight in pairs)
            if wanted:
                rows = states.reshape(-1, states.shape[-1])
                of_weights = {i: of_rows[i].t() @ rows for i in wanted}
        else:
            if needs_states:
                of_states = of_rows[0].new_empty(len(of_rows[0]), weights[0].shape[1])
                for i, weight in enumerate(weights):
                    _multiply([of_rows[i]], [weight], [of_states], adds=i > 0)
            if wanted:
                rows = states.flatten(0, -2)
                of_weights = {i: rows.new_empty(of_rows[i].shape[1], rows.shape[1]) for i in wanted}
                _multiply([of_rows[i].t() for i in wanted], [rows], list(of_weights.values()))
        if of_states is not None:
            of_states = of_states.reshape(*above[0].shape[:-1], -1)
        of_biases = [
            gradient.sum(0) if needed else None
            for gradient, needed in zip(of_rows, needs[len(weights) :], strict=True)
        ]
        return of_states, *map(of_weights.get, range(len(weights))), *of_biases


__all__ = ["multiply_matrices", "project", "project_each"]
