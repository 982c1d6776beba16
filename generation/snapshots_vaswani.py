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
    """The attributes of modules, their registries of torch, and where their weights are.

    Each comparison is one pass over all modules, because many small steps of Python take longer.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owns = list(map(vars, modules))
        self.kinds, self.names = list(map(type, modules)), list(map(list, owns))
        self.replaced = _has_replaced(self.kinds)
        self.hooked = _hooked(owns)
        public = [[name for name in own if name[0] != "_"] for own in owns]
        self.plain_names = [
            [name for name in names if _is_plain(own[name])]
            for own, names in zip(owns, public, strict=True)
        ]
        self.values = _values(owns, self.plain_names)
        self.other_names = [
            [name for name in names if name not in plain]
            for names, plain in zip(public, self.plain_names, strict=True)
        ]
        others = _values(owns, self.other_names)
        # A tensor or a list can change without a trace here, so it counts as changed in every call.
        self.can_hold = all(map(_is_compared_by_identity, others))
        self.others = [_reference(value) for value in others if self.can_hold]
        children = [own["_modules"] for own in owns]
        self.child_names = list(map(list, children))
        self.children = list(map(_reference, _all_in(children)))
        weights = _registries_of_weights(owns)
        self.weight_names = list(map(list, weights))
        self.places = list(map(_place, _detached(weights)))

    def hold(self, modules: Sequence[nn.Module]) -> list[Any] | None:
        """Return the weights of modules with these attributes, or None for other modules."""
        owns = list(map(vars, modules))
        if (
            not self.can_hold
            or list(map(type, modules)) != self.kinds
            or _has_replaced(self.kinds) != self.replaced
            or list(map(list, owns)) != self.names
            or _hooked(owns) != self.hooked
            or _values(owns, self.plain_names) != self.values
            or not _are(_values(owns, self.other_names), self.others)
        ):
            return None
        children, registries = [own["_modules"] for own in owns], _registries_of_weights(owns)
        if (
            list(map(list, children)) != self.child_names
            or not _are(_all_in(children), self.children)
            or list(map(list, registries)) != self.weight_names
        ):
            return None
        weights = _detached(registries)
        return weights if list(map(_place, weights)) == self.places else None


class Snapshot:
    """The attributes of modules and the weights that were read from them.

    Args:
        modules: all modules whose attributes are read. Their children count only if they are among
            them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.attributes = _Attributes(modules)
        self.places = set(self.attributes.places)
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
        _weights = self.attributes.hold(modules)
        return _weights is not None and bool(self.fingerprints and self.fingerprints.hold())


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
    """Refer to an object or None. A strong reference could keep a module alive."""
    return (lambda: None) if value is None else weakref.ref(value)


def _are(values: Iterable[Any], references: list[Callable[[], Any]]) -> bool:
    return all(map(operator.is_, values, [refer() for refer in references]))


def _has_replaced(kinds: Iterable[type[nn.Module]]) -> bool:
    return any(map(class_replaced, set(kinds)))


def _hooked(owns: list[dict[str, Any]]) -> list[bool]:
    return [bool(own["_forward_pre_hooks"] or own["_forward_hooks"]) for own in owns]


def _values(owns: list[dict[str, Any]], names: list[list[str]]) -> list[Any]:
    return [own[name] for own, own_names in zip(owns, names, strict=True) for name in own_names]


def _all_in(registries: list[dict[str, Any]]) -> list[Any]:
    return [value for registry in registries for value in registry.values()]


def _registries_of_weights(owns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [registry for own in owns for registry in (own["_parameters"], own["_buffers"])]


def _detached(registries: list[dict[str, Any]]) -> list[Any]:
    """Detach weights. Other values than plain tensors are returned unchanged."""
    return [
        weight.detach() if type(weight) in _TENSORS else weight for weight in _all_in(registries)
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
