"""What is prepared from a model's weights, kept for later calls until something has changed.

Preparing weights for the kernels takes longer than some calls of `generate`. A `Snapshot` remembers
what was read: attributes of modules, and fingerprints of weights. A later call compares both, and
prepares again only if one of them differs.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from .fingerprints_vaswani import Fingerprints, fingerprint, in_parts
from .library_vaswani import as_stored, is_as_stored

# Types of attributes that are compared by value. Others are compared by identity.
_VALUES = (bool, int, float, str, type(None))

# What was prepared from a module, and its snapshot, by module and kind. The keys are weak, so this
# is freed with the module.
_prepared_of: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, tuple["Snapshot", Any]]] = (
    weakref.WeakKeyDictionary()
)


class Snapshot:
    """The attributes of modules and the weights that were read from them.

    Args:
        modules: all modules whose attributes are read. Their children count only if they are among
            them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.values, objects = _attributes(modules)
        # Strong references could keep the modules themselves alive.
        self.objects = [_reference(value) for value in objects]
        self.parts: list[torch.Tensor] = []
        self.digests: list[torch.Tensor] = []
        self.fingerprints: Fingerprints | None = None
        self.sees_memory = True  # of all weights, and not of copies

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """Copy a weight, and remember the fingerprint of the copy.

        Another thread may write to the weight meanwhile.
        """
        copied = as_stored(weight.detach()).clone()
        self.add([weight], list(map(fingerprint, in_parts([copied]))))
        return copied

    def add(self, weights: Sequence[torch.Tensor], digests: Sequence[torch.Tensor]) -> None:
        """Remember the fingerprints of the values that were read from weights, in parts."""
        self.sees_memory = self.sees_memory and all(map(is_as_stored, weights))
        self.parts += in_parts([weight.detach() for weight in weights])
        self.digests += digests

    def complete(self) -> bool:
        """Say that everything is read. Return whether `holds` would see every later change."""
        if self.sees_memory:
            self.fingerprints = Fingerprints(self.parts, self.digests)
        self.parts, self.digests = [], []  # the modules keep the weights in memory
        return self.sees_memory

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """Tell whether these modules and their weights are as they were read."""
        values, objects = _attributes(modules)
        return (
            values == self.values
            and len(objects) == len(self.objects)
            and all(own() is other for own, other in zip(self.objects, objects, strict=True))
            and self.fingerprints is not None
            and self.fingerprints.hold()
        )


def kept(
    owner: nn.Module,
    kind: Hashable,
    modules: Sequence[nn.Module],
    prepare: Callable[[Snapshot], Any],
) -> Any:
    """Return what `prepare` returned in an earlier call, or call it if something has changed.

    Args:
        owner: the module whose memory is freed together with what was prepared.
        kind: tells apart what is prepared from one owner.
        modules: all modules that `prepare` reads.
        prepare: gets a snapshot for the weights that it reads. None as its result is not kept.
    """
    found = _prepared_of.get(owner, {}).get(kind)
    if found is not None and found[0].holds(modules):
        return found[1]
    if found is not None:
        del found  # it holds the old copies of weights
        _prepared_of[owner].pop(kind, None)
    snapshot = Snapshot(modules)
    prepared = prepare(snapshot)
    if prepared is not None and snapshot.complete():
        _prepared_of.setdefault(owner, {})[kind] = snapshot, prepared
    return prepared


def _attributes(modules: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
    """Return what is compared by value, and what is compared by identity."""
    values: list[Any] = []
    objects: list[Any] = []
    for module in modules:
        own = vars(module)
        objects.append(type(module))
        values.append(bool(module._forward_pre_hooks or module._forward_hooks))
        for name, value in own.items():
            if name[0] != "_":
                values.append(name)
                (values if type(value) in _VALUES else objects).append(value)
        objects += own["_modules"].values()
        for weight in (*own["_parameters"].values(), *own["_buffers"].values()):
            values += _place(weight)
    return values, objects


def _place(weight: torch.Tensor | None) -> tuple[Any, ...]:
    """Return where the values of a weight are, or something that equals nothing else.

    A weak reference would not do, because torch refuses to swap tensors that have one.
    """
    if weight is None:
        return (None,)
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
    if not plain or weight.device.type != "cpu":
        return (object(),)
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), weight.is_neg()


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # for None, and for types without weak references
        return lambda: value


__all__ = ["Snapshot", "kept"]
