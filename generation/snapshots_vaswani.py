"""Prepared weights of a model, kept for later calls until something changes.

Preparing weights for the kernels takes longer than some calls of `generate`. A `Snapshot` remembers
what was read: attributes of modules, and fingerprints of weights. A later call compares both, and
prepares again only if one of them differs. It skips memory that Linux reports as unwritten.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from .coverage_vaswani import class_replaced
from .fingerprints_vaswani import Fingerprints, fingerprint, in_parts
from .library_vaswani import as_stored, is_as_stored

# Types of attributes that are compared by value.
_VALUES = (bool, int, float, str, type(None))

# Prepared objects and their snapshots, by module. The keys are weak, so an entry is freed with its
# module.
_prepared_of: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, "Snapshot", Any]] = (
    weakref.WeakKeyDictionary()
)


class Snapshot:
    """The attributes of modules and the weights that were read from them.

    Args:
        modules: all modules whose attributes are read. Their children count only if they are among
            them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.values, objects, weights = _attributes(modules)
        # Strong references could keep the modules themselves alive.
        self.objects = [weakref.ref(value) for value in objects]
        self.places = set(map(_place, weights))
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
        # `_weights` keeps the memory that is compared, because another thread may replace a weight.
        values, objects, _weights = _attributes(modules)
        return (
            values == self.values
            and len(objects) == len(self.objects)
            and all(own() is other for own, other in zip(self.objects, objects, strict=True))
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


def _attributes(modules: Sequence[nn.Module]) -> tuple[list[Any], list[Any], list[torch.Tensor]]:
    """Return what is compared by value, what is compared by identity, and the weights."""
    values: list[Any] = [any(map(class_replaced, set(map(type, modules))))]
    objects: list[Any] = []
    weights: list[torch.Tensor] = []
    for module in modules:
        own = vars(module)
        objects.append(type(module))
        values.append(bool(module._forward_pre_hooks or module._forward_hooks))
        for name, value in list(own.items()):
            if name[0] != "_":
                values.append(name)
                _add_attribute(value, values, objects)
        for name, child in list(own["_modules"].items()):
            values.append(name)
            (values if child is None else objects).append(child)
        for name, weight in (*own["_parameters"].items(), *own["_buffers"].items()):
            values.append(name)
            if type(weight) in (torch.Tensor, nn.Parameter):
                weights.append(weight.detach())
                values.append(_place(weights[-1]))
            else:  # None, or a tensor of a type that may have its values elsewhere
                values.append(None if weight is None else object())
    return values, objects, weights


def _add_attribute(value: Any, values: list[Any], objects: list[Any]) -> None:
    """Add an attribute to what is compared by value or by identity.

    A tensor or a list can change without a trace here, so it counts as changed in every call.
    """
    plain = type(value) in _VALUES
    if plain or (isinstance(value, tuple) and all(type(part) in _VALUES for part in value)):
        values.append(value)
    elif isinstance(value, torch.Tensor) or not _has_weak_references(value):
        values.append(object())
    else:
        objects.append(value)


def _has_weak_references(value: Any) -> bool:
    try:
        weakref.ref(value)
    except TypeError:
        return False
    return True


def _place(weight: torch.Tensor) -> Any:
    """Return where the values of a weight are, or something that equals nothing else.

    A weak reference to the weight would not do, because torch refuses to swap tensors that have
    one.
    """
    if weight.layout != torch.strided or weight.device.type != "cpu":
        return object()
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), weight.is_neg()


__all__ = ["Snapshot", "prepared_once"]
