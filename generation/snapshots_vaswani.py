"""Prepared weights of a model, kept for later calls until something changes.

Preparing weights for the kernels takes longer than some calls of `generate`. A `Snapshot` remembers
what was read: attributes of modules, and fingerprints of weights. A later call compares both, and
prepares again only if one of them differs. It skips memory that Linux reports as unwritten.
"""

import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .coverage_vaswani import class_replaced
from .fingerprints_vaswani import Fingerprints, fingerprint, in_parts
from .library_vaswani import as_stored, is_as_stored

# Types of attributes that are compared by value.
_VALUES = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, nn.Parameter)  # their subclasses may have their values elsewhere

# Prepared objects and their snapshots, by module. The keys are weak, so an entry is freed with its
# module.
_prepared_of: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, "Snapshot", Any]] = (
    weakref.WeakKeyDictionary()
)


class _Attributes:
    """The attributes of a module, its registries of torch, and where its weights are."""

    def __init__(self, module: nn.Module) -> None:
        own = vars(module)
        self.kind, self.names = type(module), list(own)
        self.is_hooked = _is_hooked(own)
        public = {name: value for name, value in own.items() if name[0] != "_"}
        plain = {name: value for name, value in public.items() if _is_plain(value)}
        self.plain_names, self.values = list(plain), list(plain.values())
        # A tensor or a list can change without a trace here, so it counts as changed in every call.
        others = {name: value for name, value in public.items() if name not in plain}
        self.can_hold = all(map(_is_compared_by_identity, others.values()))
        self.other_names = list(others)
        self.others = [_reference(value) for value in others.values() if self.can_hold]
        self.child_names = list(own["_modules"])
        self.children = list(map(_reference, own["_modules"].values()))
        self.weight_names = _names_of_weights(own)
        self.places = list(map(_place, _weights(own)))

    def hold(self, module: nn.Module, weights: list[Any]) -> bool:
        """Tell whether a module has these attributes. Append its weights to a list."""
        own = vars(module)
        children, found = own["_modules"], _weights(own)
        weights += found
        return (
            self.can_hold
            and type(module) is self.kind
            and list(own) == self.names
            and _is_hooked(own) == self.is_hooked
            and [own[name] for name in self.plain_names] == self.values
            and _are([own[name] for name in self.other_names], self.others)
            and list(children) == self.child_names
            and _are(children.values(), self.children)
            and _names_of_weights(own) == self.weight_names
            and list(map(_place, found)) == self.places
        )


class Snapshot:
    """The attributes of modules and the weights that were read from them.

    Args:
        modules: all modules whose attributes are read. Their children count only if they are among
            them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.kinds = set(map(type, modules))
        self.replaced = any(map(class_replaced, self.kinds))
        self.attributes = list(map(_Attributes, modules))
        self.places = {place for own in self.attributes for place in own.places}
        self.parts: list[torch.Tensor] = []
        self.digests: list[torch.Tensor] = []
        self.fingerprints: Fingerprints | None = None
        self.sees_memory = True  # False if other memory was read than that of the modules

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """Copy a weight, and remember the fingerprint of the copy.

        The weight itself may already differ, because another thread may write to it.
        """
        weight = weight.detach()
        copied = as_stored(weight).clone()
        self.add([weight], list(map(fingerprint, in_parts([copied]))))
        return copied

    def add(self, weights: Sequence[torch.Tensor], digests: Sequence[torch.Tensor]) -> None:
        """Remember the fingerprints of the values that were read from weights, in parts.

        The weights are detached tensors. Another thread may have moved them since the snapshot.
        """
        self.sees_memory = self.sees_memory and all(
            is_as_stored(weight) and _place(weight) in self.places for weight in weights
        )
        self.parts += in_parts(weights)
        self.digests += digests

    def complete(self) -> bool:
        """Finish the snapshot. Return whether `holds` will see every later change."""
        if self.sees_memory:
            self.fingerprints = Fingerprints(self.parts, self.digests)
        self.parts, self.digests = [], []  # the modules keep the weights in memory
        return self.sees_memory

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """Tell whether these modules and their weights are as they were read."""
        # The list keeps the memory that is compared, because another thread may replace a weight.
        weights: list[Any] = []
        return (
            len(modules) == len(self.attributes)
            and any(map(class_replaced, self.kinds)) == self.replaced
            and all(
                own.hold(module, weights)
                for own, module in zip(self.attributes, modules, strict=True)
            )
            and self.fingerprints is not None
            and self.fingerprints.hold()
        )


def prepared_once(
    owner: nn.Module,
    kind: Hashable,
    modules: Sequence[nn.Module],
    prepare: Callable[[Snapshot], Any],
) -> Any:
    """Return what `prepare` returned in an earlier call, or call it if something has changed.

    Args:
        owner: the module whose memory is freed together with what was prepared.
        kind: says what is prepared. Another kind replaces what was prepared before.
        modules: all modules that `prepare` reads.
        prepare: gets a snapshot for the weights that it reads. If it returns None, nothing is kept.
    """
    found = _prepared_of.get(owner)
    if found is not None and found[0] == kind and found[1].holds(modules):
        return found[2]
    del found  # it holds the old copies of weights
    _prepared_of.pop(owner, None)
    snapshot = Snapshot(modules)
    prepared = prepare(snapshot)
    if prepared is not None and snapshot.complete():
        _prepared_of[owner] = kind, snapshot, prepared
    return prepared


def _reference(value: Any) -> Callable[[], Any]:
    """Refer to an object or None. A strong reference could keep the module itself alive."""
    return (lambda: None) if value is None else weakref.ref(value)


def _are(values: Iterable[Any], references: list[Callable[[], Any]]) -> bool:
    return not references or all(map(operator.is_, values, [refer() for refer in references]))


def _is_hooked(own: dict[str, Any]) -> bool:
    return bool(own["_forward_pre_hooks"] or own["_forward_hooks"])


def _names_of_weights(own: dict[str, Any]) -> list[str]:
    return [*own["_parameters"], *own["_buffers"]]


def _weights(own: dict[str, Any]) -> list[Any]:
    """Detach the weights of a module. Other values than plain tensors are returned unchanged."""
    return [
        weight.detach() if type(weight) in _TENSORS else weight
        for weight in (*own["_parameters"].values(), *own["_buffers"].values())
    ]


def _is_plain(value: Any) -> bool:
    """Tell whether a value is compared with others by `==`."""
    if isinstance(value, tuple):
        return all(type(part) in _VALUES for part in value)
    return type(value) in _VALUES


def _is_compared_by_identity(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and _has_weak_references(value)


def _has_weak_references(value: Any) -> bool:
    try:
        weakref.ref(value)
    except TypeError:
        return False
    return True


def _place(weight: Any) -> Any:
    """Return where the values of a weight are, or something that equals nothing else.

    A weak reference to the weight would not do, because torch refuses to swap tensors that have
    one.
    """
    if type(weight) is not torch.Tensor or weight.layout != torch.strided or not weight.is_cpu:
        return weight if weight is None else object()
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), weight.is_neg()


__all__ = ["Snapshot", "prepared_once"]
