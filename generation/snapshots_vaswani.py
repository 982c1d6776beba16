"""Prepared weights of a model, kept for later calls until something changes.

Preparing weights for the kernels takes longer than some calls of `generate`. A `Snapshot` remembers
what was read: attributes of modules, and fingerprints of weights. A later call compares both, and
prepares again only if one of them differs. It skips memory that Linux reports as unwritten.
"""

import itertools
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


class _References:
    """Weak references to objects, or None. Strong references could keep a module alive."""

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        self.missing = [value is None for value in values]
        self.references = [
            (lambda: None) if value is None else weakref.ref(value) for value in values
        ]

    def objects(self) -> list[Any]:
        """Return the objects, and None for those that are gone."""
        return [refer() for refer in self.references]

    def are(self, values: list[Any]) -> bool:
        """Tell whether these are the objects."""
        missing = [value is None for value in values]
        return missing == self.missing and all(map(operator.is_, values, self.objects()))


class _Attributes:
    """The attributes of modules, their registries of torch, and where their weights are.

    Each comparison is one pass over all modules, because many small steps of Python take longer.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules, self.kinds = _References(modules), _References(map(type, modules))
        self.replaced = _has_replaced(modules)
        owns = list(map(vars, modules))
        self.names = list(map(list, owns))
        self.hooked = _is_hooked(owns)
        public = [[name for name in names if name[0] != "_"] for names in self.names]
        self.plain_names = [
            [name for name in names if _is_plain(own.get(name))]
            for own, names in zip(owns, public, strict=True)
        ]
        self.values = _values(owns, self.plain_names)
        self.other_names = [
            [name for name in names if name not in plain]
            for names, plain in zip(public, self.plain_names, strict=True)
        ]
        other_values = _values(owns, self.other_names)
        # A tensor or a list can change without a trace here, so it counts as changed in every call.
        self.are_comparable = all(map(_is_compared_by_identity, other_values))
        self.other_values = _References(other_values if self.are_comparable else ())
        children = [own["_modules"] for own in owns]
        self.child_names, self.children = _keys(children), _References(_contents(children))
        weights = _registries_of_weights(owns)
        self.weight_names, self.places = _keys(weights), list(map(_place, _detached(weights)))

    def weights_if_unchanged(self) -> list[Any] | None:
        """Return the weights of the modules, or None if the modules have changed."""
        modules = self.modules.objects()
        if not self.are_comparable or None in modules:
            return None
        owns: list[dict[str, Any]] = list(map(vars, modules))
        if (
            not self.kinds.are(list(map(type, modules)))
            or _has_replaced(modules) != self.replaced
            or list(map(list, owns)) != self.names
            or _is_hooked(owns) != self.hooked
            or not self._has_values(_values(owns, self.plain_names))
            or not self.other_values.are(_values(owns, self.other_names))
        ):
            return None
        children, registries = [own["_modules"] for own in owns], _registries_of_weights(owns)
        if (
            _keys(children) != self.child_names
            or not self.children.are(_contents(children))
            or _keys(registries) != self.weight_names
        ):
            return None
        weights = _detached(registries)
        return weights if list(map(_place, weights)) == self.places else None

    def _has_values(self, values: list[Any]) -> bool:
        if all(map(operator.is_, values, self.values)):
            return True
        return all(map(_is_plain, values)) and values == self.values


class Snapshot:
    """The attributes of modules and the weights that were read from them.

    Args:
        roots: modules that are given again to `holds`.
        modules: all modules whose attributes are read, the roots among them. Each module is a
            root, or a child or an attribute of another module. Attributes of children that are not
            listed are not compared.
    """

    def __init__(self, roots: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        self.roots, self.attributes = _References(roots), _Attributes(modules)
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

    def holds(self, roots: Sequence[nn.Module]) -> bool:
        """Tell whether these are the roots, and all modules and weights are as they were read."""
        if not self.roots.are(list(roots)):
            return False
        # `_weights` keeps the memory that is compared, because another thread may replace a weight.
        _weights = self.attributes.weights_if_unchanged()
        return _weights is not None and bool(self.fingerprints and self.fingerprints.hold())


def prepared_once(
    owner: nn.Module,
    kind: Hashable,
    roots: Sequence[nn.Module],
    prepare: Callable[[Snapshot], Any],
    modules_of: Callable[[Sequence[nn.Module]], Sequence[nn.Module]] = list,
) -> Any:
    """Return what `prepare` returned in an earlier call, or call it if something has changed.

    Args:
        owner: the module whose memory is freed together with what was prepared.
        kind: says what is prepared. Another kind replaces what was prepared before.
        roots: modules that are prepared.
        prepare: gets a snapshot for the weights that it reads. If it returns None, nothing is kept.
        modules_of: lists all modules that `prepare` reads, as `Snapshot` needs them.
    """
    found = _prepared_of.get(owner)
    if found is not None and found[0] == kind and found[1].holds(roots):
        return found[2]
    del found  # it holds the old copies of weights
    _prepared_of.pop(owner, None)
    snapshot = Snapshot(roots, modules_of(roots))
    prepared = prepare(snapshot)
    if prepared is not None and snapshot.complete():
        _prepared_of[owner] = kind, snapshot, prepared
    return prepared


def _has_replaced(modules: Iterable[nn.Module]) -> bool:
    return any(map(class_replaced, set(map(type, modules))))


def _is_hooked(owns: list[dict[str, Any]]) -> list[bool]:
    return [bool(own["_forward_pre_hooks"] or own["_forward_hooks"]) for own in owns]


def _values(owns: list[dict[str, Any]], names: list[list[str]]) -> list[Any]:
    # With `get`, it is no error if another thread deletes an attribute at the same time.
    return [own.get(name) for own, own_names in zip(owns, names, strict=True) for name in own_names]


def _keys(registries: list[Any]) -> list[list[str]]:
    return [list(registry.keys()) for registry in registries]


def _contents(registries: list[Any]) -> list[Any]:
    # `chain` runs no Python code while it reads a registry, so no other thread adds a value then.
    return list(itertools.chain.from_iterable(registry.values() for registry in registries))


def _registries_of_weights(owns: list[dict[str, Any]]) -> list[Any]:
    return [registry for own in owns for registry in (own["_parameters"], own["_buffers"])]


def _detached(registries: list[Any]) -> list[Any]:
    """Detach weights. Other values than plain tensors are returned unchanged."""
    return [
        weight.detach() if type(weight) in _TENSORS else weight for weight in _contents(registries)
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
