"""Reversible renaming of weights: a converter is a table of these rules.

A template is a name with placeholders, such as "decoder.layers.{i}.self_attn.k_proj.{kind}". A
placeholder stands for the same text on both sides: {i} for a number, any other for word
characters. Tensors are named by dicts, as in `state_dict`. A conversion uses every tensor exactly
once, or names the tensors that are left over.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .errors import ConversionError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rename:
    """A tensor with another name in the toolkit, and perhaps another layout.

    Args:
        theirs, ours: templates with the same placeholders.
        to_ours, to_theirs: changes of the layout, inverse to each other.
    """

    theirs: str
    ours: str
    to_ours: Callable[[torch.Tensor], torch.Tensor] | None = None
    to_theirs: Callable[[torch.Tensor], torch.Tensor] | None = None

    def take_theirs(self, tensors: Tensors) -> Tensors:
        """Remove the toolkit's tensors from `tensors`, and return them as ours."""
        return _renamed(tensors, self.theirs, self.ours, self.to_ours)

    def take_ours(self, tensors: Tensors) -> Tensors:
        """Remove our tensors from `tensors`, and return them as the toolkit's."""
        return _renamed(tensors, self.ours, self.theirs, self.to_theirs)


@dataclass(frozen=True)
class Stack:
    """A tensor of the toolkit that concatenates several of ours, all of the same size.

    Args:
        theirs: a template.
        ours: templates with the same placeholders, in the order of concatenation.
    """

    theirs: str
    ours: Sequence[str]

    def take_theirs(self, tensors: Tensors) -> Tensors:
        """Remove the toolkit's tensors from `tensors`, and return them as ours."""
        taken = {}
        for name, fields in _matches(tensors, self.theirs):
            parts = tensors.pop(name)
            if parts.dim() == 0 or parts.shape[0] % len(self.ours):
                raise ConversionError(
                    f"{name} holds {len(self.ours)} tensors of equal size, but has the shape "
                    f"{tuple(parts.shape)}."
                )
            for template, part in zip(self.ours, parts.chunk(len(self.ours)), strict=True):
                taken[template.format(**fields)] = part
        return taken

    def take_ours(self, tensors: Tensors) -> Tensors:
        """Remove our tensors from `tensors`, and return them as the toolkit's."""
        taken = {}
        for first, fields in _matches(tensors, self.ours[0]):
            names = [template.format(**fields) for template in self.ours]
            missing = [name for name in names if name not in tensors]
            if missing:
                raise ConversionError(f"The tensor {first} needs {', '.join(missing)} beside it.")
            taken[self.theirs.format(**fields)] = torch.cat([tensors.pop(name) for name in names])
        return taken


@dataclass(frozen=True)
class Drop:
    """A tensor of the toolkit that carries no information, such as a version number.

    Args:
        theirs: a template.
        check: called with the name and the tensor; may raise ConversionError if the tensor does
            carry information.
    """

    theirs: str
    check: Callable[[str, torch.Tensor], None] | None = None

    def take_theirs(self, tensors: Tensors) -> Tensors:
        """Remove the toolkit's tensors from `tensors`, and return nothing."""
        for name, _ in _matches(tensors, self.theirs):
            tensor = tensors.pop(name)
            if self.check is not None:
                self.check(name, tensor)
        return {}

    def take_ours(self, tensors: Tensors) -> Tensors:
        """Return nothing: we have no such tensor."""
        return {}


Rule = Rename | Stack | Drop


def to_ours(rules: Iterable[Rule], theirs: Tensors) -> Tensors:
    """Rename a toolkit's tensors to ours.

    Raises:
        ConversionError: tensors are left over, or two tensors would get the same name.
    """
    return _applied([rule.take_theirs for rule in rules], theirs)


def to_theirs(rules: Iterable[Rule], ours: Tensors) -> Tensors:
    """Rename our tensors to a toolkit's.

    Raises:
        ConversionError: tensors are left over, or two tensors would get the same name.
    """
    return _applied([rule.take_ours for rule in rules], ours)


def _applied(takes: Sequence[Callable[[Tensors], Tensors]], tensors: Tensors) -> Tensors:
    remaining = dict(tensors)
    renamed: Tensors = {}
    for take in takes:
        taken = take(remaining)
        if twice := sorted(renamed.keys() & taken.keys()):
            raise ConversionError(f"Several tensors would become {', '.join(twice)}.")
        renamed |= taken
    if remaining:
        names = ", ".join(sorted(map(str, remaining)))
        raise ConversionError(f"No rule knows {len(remaining)} of {len(tensors)} tensors: {names}.")
    return renamed


def _renamed(
    tensors: Tensors,
    template: str,
    new_template: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Tensors:
    renamed = {}
    for name, fields in _matches(tensors, template):
        tensor = tensors.pop(name)
        renamed[new_template.format(**fields)] = tensor if change is None else change(tensor)
    return renamed


def _matches(tensors: Tensors, template: str) -> list[tuple[str, dict[str, str]]]:
    """Find the names that fit a template, with the texts of its placeholders."""
    pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    pattern = re.sub(r"\{i\}", r"(?P<i>\\d+)", pattern)
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>\\w+)", pattern)
    found = ((name, re.fullmatch(pattern, str(name))) for name in tensors)
    return [(name, match.groupdict()) for name, match in found if match]


__all__ = ["Drop", "Rename", "Rule", "Stack", "Tensors", "to_ours", "to_theirs"]
