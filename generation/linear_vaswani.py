"""Linear layers prepared for decoding: packed weights, checked in every call.

On a CPU, PyTorch packs a weight into oneDNN's layout for each product. With a few rows of states,
packing takes longer than the product itself. Decoding therefore multiplies by packed copies, with
oneDNN or with the compiled kernels.

The copies are immutable and shared by all calls. A call compares the values of a weight, or their
fingerprint, with those that were packed. The compiled kernels skip memory that Linux reports as
unwritten.

`prepare` turns layers into a function. `prepared_copy` puts such functions into a copy of a model's
structure. The model itself and its layers are never changed.

Shapes: R rows of states; a layer maps `in` features to `out`.
"""

import functools
import platform
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .coverage_vaswani import class_replaced
from .int8_vaswani import Int8Linear, PackedInt8, compiled_rounding, multiplies_exactly
from .library_vaswani import as_stored, cpu_description, library
from .products_vaswani import Panels, Product, can_pack, same_bytes
from .snapshots_vaswani import Snapshot

_FEW_ROWS = 3  # up to here, MKL on Intel's CPUs is as fast with weights that are not packed
_WORTH_PACKING = 2**14  # values; packing a smaller matrix saves no time

Multiply = Callable[[torch.Tensor], torch.Tensor]  # (R, in) to (R, out)


class _PackedForTorch:
    """Copied weights of layers (out, in), and the same values packed for torch's operators.

    int8 weights have scales (out,) too.
    """

    def __init__(self, weights: list[torch.Tensor], scale: torch.Tensor | None) -> None:
        # The copy is packed, because another thread may write to the weights meanwhile.
        self.values, self.scale = torch.cat(weights), None if scale is None else scale.clone()
        self.packed: Any
        if self.scale is not None and multiplies_exactly():
            self.packed = PackedInt8(self.values, self.scale)
        else:  # int8 is packed in float32 if this CPU cannot multiply it exactly
            values = self.values if self.scale is None else self.values * self.scale[:, None]
            self.packed = torch.ops.mkldnn._reorder_linear_weight(values)

    def holds(self, weights: list[torch.Tensor], scale: torch.Tensor | None) -> bool:
        """Tell whether these are the weights, bit for bit, and the scale."""
        if not _same_values(self.values, weights):
            return False
        return scale is None or (self.scale is not None and _same_values(self.scale, [scale]))


# Packed weights by the first of their layers, then by layout and number of layers. The keys are
# weak, so packed weights are freed with their layer. A copy of a layer is another key.
_packed_of: weakref.WeakKeyDictionary[nn.Linear, dict[tuple[Callable, int], Any]] = (
    weakref.WeakKeyDictionary()
)


def prepare(*linears: nn.Linear, activation: nn.Module | None = None) -> Multiply:
    """Return a function that applies layers to the same states and concatenates their outputs.

    The function applies `activation` to the outputs, if there is one. ReLU is part of the product,
    with the same result.

    The function serves one call of `generate`. A single layer in floating point that was never
    packed computes its first product of several rows without packing. A second product shows that
    the layer is used in every step, so packing pays. Layers of the encoder compute one product
    only. Joined layers and int8 weights are packed for their first product. On Intel's CPUs,
    float32 products of up to `_FEW_ROWS` rows never use packed weights.
    """
    layers = originals(linears)
    product: Multiply
    if not all(map(_can_prepare, layers)) or len(set(map(type, layers))) > 1:
        product = functools.partial(_apply, layers)
    else:
        prepared = _prepare_int8 if isinstance(layers[0], Int8Linear) else _prepare_float
        if type(activation) is nn.ReLU and not is_changed(activation):
            return prepared(layers, relu=True)
        product = prepared(layers)
    return product if activation is None else lambda states: activation(product(states))


def originals(linears: tuple[nn.Linear, ...]) -> tuple[nn.Linear, ...]:
    """Return the original of each prepared layer, and other layers unchanged."""
    return tuple(
        linear.original if isinstance(linear, PreparedLinear) else linear for linear in linears
    )


def _prepare_float(layers: tuple[Any, ...], relu: bool = False) -> Multiply:
    """Return a function for layers with weights in floating point, as `prepare` does."""
    few_values = _few_rows(layers[0].weight.dtype) * layers[0].in_features
    weight: Any = None
    bias: torch.Tensor | None = None
    in_use = len(layers) > 1 or (_PackedForTorch, len(layers)) in _packed_of.get(layers[0], {})

    def product(states: torch.Tensor) -> torch.Tensor:
        nonlocal weight, bias, in_use
        if states.numel() <= few_values:
            output = _apply(layers, states)
            return output.relu_() if relu else output
        # A single row that gets here is packed, because products without packing round differently.
        if not in_use and states.numel() > layers[0].in_features:
            in_use = True
            return _multiply(states, layers[0].weight, layers[0].bias, relu)
        if weight is None:
            weight = _pack(_PackedForTorch, layers, _weights_of(layers)).packed
            bias = _joined_bias(layers)
        return _multiply(states, weight, bias, relu)

    return product


def _prepare_int8(layers: tuple[Any, ...], relu: bool = False) -> Multiply:
    """Return a function for layers with int8 weights, as `prepare` does."""
    prepared: Multiply | None = None

    def product(states: torch.Tensor) -> torch.Tensor:
        nonlocal prepared
        if prepared is None:
            weight = _pack(
                _PackedForTorch, layers, _weights_of(layers), _joined_scale(layers)
            ).packed
            bias = _joined_bias(layers)
            if isinstance(weight, PackedInt8):
                prepared = functools.partial(weight.multiply, bias=bias, relu=relu)
            else:
                prepared = functools.partial(_multiply_float32, weight, bias, relu)
        return prepared(states)

    return product


def _multiply_float32(
    weight: torch.Tensor, bias: torch.Tensor | None, relu: bool, states: torch.Tensor
) -> torch.Tensor:
    """Multiply states of any dtype by a weight in float32."""
    bias = None if bias is None else bias.float()
    return _multiply(states.float(), weight, bias, relu).to(states.dtype)


def _apply(layers: tuple[nn.Linear, ...], states: torch.Tensor) -> torch.Tensor:
    """Apply layers as they are."""
    if len(layers) == 1:
        return layers[0](states)
    return torch.cat([layer(states) for layer in layers], dim=-1)


def _multiply(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, relu: bool = False
) -> torch.Tensor:
    """Multiply by a weight with oneDNN, packed or not."""
    after = "relu" if relu else "none"
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, after, [], "")


class PreparedLinear(nn.Linear):
    """A linear layer in a prepared copy of a model. It shares the parameters of its original."""

    original: nn.Linear
    product: Multiply

    def __init__(self, linear: nn.Linear) -> None:
        vars(self).update(_registries(linear), original=linear, product=prepare(linear))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply by the prepared weight: (R, in) to (R, out)."""
        # Inductor cannot compile products with packed weights.
        multiply = self.original if torch.compiler.is_compiling() else self.product
        return multiply(input)


def prepared_copy(
    module: Any,
    can_copy: Callable[[nn.Module], bool],
    replace: Callable[[nn.Module, Callable[[], Any]], Any] = lambda module, copied: None,
) -> Any:
    """Copy the structure of a model, with its linear layers prepared; share all parameters.

    Args:
        module: a model that runs without gradients, or a module of it.
        can_copy: tells whether a module runs the `forward` of its class and nothing else. Other
            modules are used as they are, with layers that are not prepared.
        replace: maps a module that can be copied, and a function that copies it, to what takes its
            place; None means the copy.

    Returns:
        The copy, or `module` itself if there is nothing to prepare.
    """
    copied, is_prepared = _copy(module, can_copy, replace)
    return copied if is_prepared else module


def _copy(
    module: Any,
    can_copy: Callable[[nn.Module], bool],
    replace: Callable[[nn.Module, Callable[[], Any]], Any],
) -> tuple[Any, bool]:
    """Copy a module as `prepared_copy` does, and tell whether anything in it is prepared.

    Modules without anything to prepare are copied too. Otherwise hooks that record the outputs of a
    copy would be put on the modules of the original.
    """
    if _can_prepare(module):
        return PreparedLinear(module), True
    if not module._modules or not (type(module) is nn.ModuleList or can_copy(module)):
        return module, False
    replaced = replace(module, lambda: _copy_children(module, can_copy, replace)[0])
    return (replaced, True) if replaced else _copy_children(module, can_copy, replace)


def _copy_children(
    module: Any,
    can_copy: Callable[[nn.Module], bool],
    replace: Callable[[nn.Module, Callable[[], Any]], Any],
) -> tuple[Any, bool]:
    """Copy a module with all modules in it, as `_copy` does."""
    children, is_prepared = {}, False
    for name, child in module._modules.items():
        has_prepared = False
        if child is not None:  # a module that torch.compile wrapped has no truth value
            child, has_prepared = _copy(child, can_copy, replace)
        children[name] = child
        is_prepared = is_prepared or has_prepared
    copied = object.__new__(type(module))
    vars(copied).update(_registries(module), _modules=children)
    return copied, is_prepared


def _registries(module: nn.Module) -> dict[str, Any]:
    """Copy a module's attributes and registries, so that the copy has its own hooks."""
    return {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in vars(module).items()
    }


def _can_prepare(module: Any) -> bool:
    """Tell whether a module is a plain linear layer, of a dtype that oneDNN packs."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False  # oneDNN's products record no gradients and ignore autocast
    if not is_plain(module) or module.weight.numel() < _WORTH_PACKING:
        return False
    return bool(torch.backends.mkldnn.enabled) and module.weight.dtype in _packed_dtypes()


def is_plain(module: Any) -> bool:
    """Tell whether a module is a linear layer on a CPU, and computes nothing else.

    Its bias and its scale have a value for each output.
    """
    if type(module) not in (nn.Linear, Int8Linear) or is_changed(module):
        return False
    weight = module.weight
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.dim() != 2:
        return False
    # torch broadcasts a bias of one value. The kernels would read past its end.
    by_output = (module.bias, getattr(module, "weight_scale", None))
    if any(part is not None and not _fits_kernels(part, weight.shape[:1]) for part in by_output):
        return False
    if (weight.dtype == torch.int8) != isinstance(module, Int8Linear):
        return False
    return type(weight.data) is torch.Tensor


def _fits_kernels(values: torch.Tensor, shape: torch.Size) -> bool:
    plain = type(values.data) is torch.Tensor
    return plain and values.device.type == "cpu" and values.shape == shape


def is_changed(module: nn.Module) -> bool:
    """Tell whether a module has hooks, a `forward` of its own, or a monkey-patched class."""
    hooks = module._forward_pre_hooks or module._forward_hooks
    return bool("forward" in vars(module) or hooks or class_replaced(type(module)))


def _pack(
    layout: Callable[..., Any],
    layers: tuple[Any, ...],
    weights: list[torch.Tensor],
    scale: torch.Tensor | None = None,
    *settings: int,
) -> Any:
    """Return the weights of layers in a layout; pack them again if any value has changed.

    Args:
        layout: `_PackedForTorch` or `Panels.pack`.
        layers: layers that read the same states.
        weights: their weights.
        scale: (out,) of int8 weights.
        settings: further arguments of `layout`, which this machine determines.
    """
    packed_of_first = _packed_of.setdefault(layers[0], {})
    key = layout, len(layers)
    packed = packed_of_first.get(key)
    if packed is not None and not packed.holds(weights, scale):
        packed = None
        packed_of_first.clear()  # free the old copies before the new ones are made
    if packed is None:
        packed = packed_of_first[key] = layout(weights, scale, *settings)
    return packed


def compiled_product(
    *linears: nn.Linear, snapshot: Snapshot, relu: bool = False
) -> tuple[Product, Any]:
    """Prepare layers for the compiled kernels.

    Args:
        linears: layers that read the same states, and that the kernels support (`is_supported`).
        snapshot: remembers what is read.
        relu: whether ReLU is applied to their outputs.

    Returns:
        The product, and what must be kept for as long as it is used.
    """
    layers: tuple[Any, ...] = originals(linears)
    bias = _joined_bias(layers, snapshot.copy)
    bias = None if bias is None else bias.float()
    largest, weights = 0, _weights_of(layers)
    if isinstance(layers[0], Int8Linear):
        rounding = compiled_rounding(weights[0].shape[1])
        assert rounding is not None
        largest, scale = rounding, _joined_scale(layers, snapshot.copy)
        panels = _pack(Panels.pack, layers, weights, scale, largest)
    else:
        panels = _pack(Panels.pack, layers, weights)
    snapshot.add(weights, panels.fingerprints)
    return panels.product(bias, largest, relu), (panels, bias)


def is_supported(*linears: nn.Linear) -> bool:
    """Tell whether the compiled kernels can multiply by layers that read the same states."""
    layers: tuple[Any, ...] = originals(linears)
    if not all(map(is_plain, layers)) or len(set(map(type, layers))) > 1:
        return False
    weights = [layer.weight for layer in layers]
    if len({weight.shape[1] for weight in weights}) > 1:
        return False  # the states fit one of them only
    if isinstance(layers[0], Int8Linear):
        return compiled_rounding(weights[0].shape[1]) is not None
    return all(map(can_pack, weights)) and len({weight.dtype for weight in weights}) == 1


def _weights_of(layers: tuple[Any, ...]) -> list[torch.Tensor]:
    return [layer.weight.detach() for layer in layers]


def _joined_scale(layers: tuple[Any, ...], read: Callable = torch.detach) -> torch.Tensor:
    """Concatenate the scales of layers with int8 weights, in float32."""
    scales = [read(layer.weight_scale).float() for layer in layers]
    return scales[0] if len(scales) == 1 else torch.cat(scales)


def _joined_bias(
    layers: tuple[nn.Linear, ...], read: Callable = torch.detach
) -> torch.Tensor | None:
    """Copy the biases of layers into one; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else read(layer.bias)
            for layer in layers
        ]
    )


def _same_values(values: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Compare all values by their bits. NaN equals itself, and 0 differs from -0."""
    rows = [len(weight) for weight in weights]
    width = weights[0].shape[1:]
    if (sum(rows), *width) != values.shape or any(
        weight.dtype != values.dtype or weight.shape[1:] != width for weight in weights
    ):
        return False
    equal = _equal_bits if values.device.type != "cpu" or library() is None else same_bytes
    return all(
        equal(part, as_stored(weight))
        for part, weight in zip(values.split(rows), weights, strict=True)
    )


def _equal_bits(values: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.equal(_bits(values), _bits(others))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """View values as the widest integers that fit, because wide integers are compared fastest."""
    flat = values.view(-1)
    offset = flat.storage_offset() * flat.itemsize
    for integer in (torch.int64, torch.int32, torch.int16):
        if offset % integer.itemsize == 0 and flat.nbytes % integer.itemsize == 0:
            return flat.view(integer)
    return flat.view(torch.int8)


@functools.cache
def _few_rows(dtype: torch.dtype) -> int:
    """Return the number of rows up to which a product without packing is as fast."""
    if dtype != torch.float32 or not torch.backends.mkl.is_available():
        return 0
    return _FEW_ROWS if "GenuineIntel" in (cpu_description() or platform.processor()) else 0


@functools.cache
def _packed_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():
        return ()
    try:  # operators of torch.compile's CPU backend, which torch may rename
        torch.ops.mkldnn._linear_pointwise  # noqa: B018
        bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except AttributeError:
        return ()
    dtypes = (torch.float32, torch.int8)
    return (*dtypes, torch.bfloat16) if bfloat16 else dtypes


__all__ = [
    "PreparedLinear",
    "compiled_product",
    "is_changed",
    "is_supported",
    "originals",
    "prepare",
    "prepared_copy",
]
