"""Products of states by packed weights, in compiled kernels.

Weights are copied to panels, from which the kernels multiply. A fingerprint tells whether a weight
has changed since.

Shapes: R rows of states; a layer maps `in` features to `out`.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from .fingerprints_vaswani import Fingerprints, fingerprint, in_parts
from .library_vaswani import COUNT, FLOATS, NUMBER, POINTER, address, as_stored, library
from .memory_vaswani import empty, empty_for_weights

_BYTES_OF_WORD = 4  # in a panel: a float, or bfloat16 of 2 inputs, or int8 of 4
_DIGITS = 3  # of a float, with 8 bits each
_INPUTS_OF_TILE, _ROWS_OF_TILE = 64, 16
_MOST_INPUTS = 2**14  # up to here, sums of products of digits are below 2^30 and fit int32


class Product(ctypes.Structure):
    """A linear layer, or several that read the same states."""

    _fields_ = (
        *((name, COUNT) for name in ("inputs", "outputs")),
        *((name, POINTER) for name in ("panels", "sums", "scale", "bias")),
        *((name, NUMBER) for name in ("largest", "relu", "halves", "digits")),
    )


class Rounded(ctypes.Structure):
    """Memory for rounded rows of states or their digits, and for the scale of each row (R,)."""

    _fields_ = (("states", POINTER), ("scales", POINTER))

    @staticmethod
    def make_room(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make memory for up to that many rows, and for layers with up to that many inputs."""
        in_tiles = math.ceil(rows / _ROWS_OF_TILE) * _ROWS_OF_TILE
        return empty((_DIGITS * in_tiles * inputs,), torch.int8), empty((rows,))


def can_pack(weight: torch.Tensor) -> bool:
    """Tell whether the kernels multiply by a weight (out, in) in floating point."""
    is_half = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return is_half or weight.dtype == torch.float32


class Panels(NamedTuple):
    """A weight (out, in) in the layout of the kernels, in int8, bfloat16 or float32.

    CPUs with AMX multiply float32 by its digits (`kernels/digits.c`).
    """

    inputs: int
    dtype: torch.dtype
    panels: torch.Tensor  # (out / width, words, width) of 32 bits, with values of several inputs
    # Zeros pad the next two tensors to a whole panel.
    sums: torch.Tensor | None  # of each output's int8 weights
    scale: torch.Tensor | None  # of each output, for digits and (divided by `largest`) for int8
    outputs: int
    weight_scale: torch.Tensor | None  # (out,) as it was given
    fingerprints: list[torch.Tensor]  # of the weights as they were given, in parts

    @classmethod
    def pack(
        cls, weights: Sequence[torch.Tensor], scale: torch.Tensor | None = None, largest: int = 1
    ) -> "Panels":
        """Pack the weights (out, in) of layers that read the same states.

        Args:
            weights: weights of float32, of bfloat16 with an even number of inputs, or of int8 with
                a multiple of 4 inputs.
            scale: (out,) scales of all int8 weights, in float32.
            largest: states will be rounded to -largest ... largest, for weights in int8.
        """
        width = library().panel_width()
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        digits = weights[0].dtype == torch.float32 and _has_digits(inputs)
        size = inputs * (_DIGITS if digits else weights[0].itemsize)
        assert all(weight.shape[1] == inputs for weight in weights)
        assert size % _BYTES_OF_WORD == 0
        assert scale is None or scale.shape == (outputs,)
        missing = -outputs % width
        shape = (outputs + missing) // width, size // _BYTES_OF_WORD, width
        panels = empty_for_weights(shape)
        if missing:
            panels[-1] = 0
        sums = relative = None
        if digits:
            relative = torch.zeros(outputs + missing, **FLOATS)
        fingerprints = []
        first = 0
        for rows in in_parts(weights):
            # Fingerprint and pack one copy, because another thread may write to the weight in
            # between. Otherwise the panels could differ from their fingerprint.
            copied = rows.clone()
            fingerprints.append(fingerprint(copied))
            source, threads = (copied.data_ptr(), len(rows)), torch.get_num_threads()
            if relative is None:
                library().pack_rows(*source, shape[1], panels.data_ptr(), first, threads)
            else:
                place = panels.data_ptr(), first, relative[first:].data_ptr()
                library().pack_digits(*source, inputs, *place, threads)
            first += len(rows)
        if scale is not None:
            # Sum the panels and not the weights, which another thread may have changed meanwhile.
            by_input = panels.view(torch.int8).view(*shape, _BYTES_OF_WORD)
            sums = by_input.sum(dim=(1, 3), dtype=torch.int32).view(-1)
            scale = scale.clone()
            relative = F.pad(scale * torch.tensor(1 / largest, **FLOATS), (0, missing))
        return cls(inputs, weights[0].dtype, panels, sums, relative, outputs, scale, fingerprints)

    def holds(self, weights: Sequence[torch.Tensor], scale: torch.Tensor | None = None) -> bool:
        """Tell whether `pack` got weights of the same fingerprints, and the same scale."""
        if sum(map(len, weights)) != self.outputs or any(
            weight.dtype != self.dtype or weight.shape[1:] != (self.inputs,) for weight in weights
        ):
            return False
        if scale is not None and self.weight_scale is not None:
            same_shape = scale.shape == self.weight_scale.shape
            if not same_shape or not same_bytes(as_stored(scale), self.weight_scale):
                return False
        elif scale is not self.weight_scale:  # both are None in a float weight
            return False
        parts = list(in_parts(weights))  # keeps copies until they are compared
        return Fingerprints(parts, self.fingerprints).hold()

    def product(self, bias: torch.Tensor | None, largest: int = 0, relu: bool = False) -> Product:
        """Return a product, which is valid as long as these panels and the bias are.

        Args:
            bias: (out,) in float32.
            largest: states are rounded to -largest ... largest, for weights in int8.
            relu: whether ReLU is applied.
        """
        parts = self.panels, self.sums, self.scale, bias
        addresses = (None if part is None else part.data_ptr() for part in parts)
        halves = self.dtype == torch.bfloat16
        digits = self.dtype == torch.float32 and self.scale is not None
        return Product(self.inputs, self.outputs, *addresses, largest, relu, halves, digits)


def _has_digits(inputs: int) -> bool:
    """Tell whether the kernels multiply float32 weights with that many inputs by their digits."""
    fits = inputs % _INPUTS_OF_TILE == 0 and 0 < inputs <= _MOST_INPUTS
    return fits and bool(library().multiplies_digits())


def multiply(
    states: torch.Tensor,
    product: Product,
    output: torch.Tensor | None = None,
    memory: Rounded | None = None,
) -> torch.Tensor:
    """Multiply states (R, in) by a weight, and add a bias: (R, out), in `output` if it is given.

    Memory for R rounded rows is made if it is not given.

    Raises:
        RuntimeError: the states are not on the CPU, or have another width than the weight.
    """
    if not states.is_cpu:
        raise RuntimeError(
            f"The states are on {states.device}, but the model is on the CPU: move one of them."
        )
    states = as_stored(states)
    rows, inputs = states.shape
    if inputs != product.inputs:
        raise RuntimeError(
            f"The states have {inputs} values, but the layer takes {product.inputs}: their "
            f"shapes are {tuple(states.shape)} and {(product.outputs, product.inputs)}."
        )
    assert states.dtype == torch.float32
    if output is None:
        output = states.new_empty(rows, product.outputs)
    if memory is None:
        buffers = Rounded.make_room(rows, inputs)
        memory = Rounded(*map(address, buffers))
    library().multiply_states(
        *(ctypes.byref(product), states.data_ptr(), rows, ctypes.byref(memory)),
        *(output.data_ptr(), torch.get_num_threads()),
    )
    return output


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two contiguous tensors of one size have the same bytes."""
    sizes = left.nbytes, torch.get_num_threads()
    return bool(library().same_bytes(address(left), address(right), *sizes))


__all__ = ["Panels", "Product", "Rounded", "can_pack", "multiply", "same_bytes"]
