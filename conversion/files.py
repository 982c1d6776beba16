"""Strangers' text, JSON and YAML: what cannot be read is a ConversionError that names it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch

from .rules import ConversionError


def read_text(path: Path) -> str:
    """Read a file in UTF-8, its line ends as they are.

    Raises:
        ConversionError: there is none, or it is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConversionError: there is none, or it is something else.
    """
    try:
        found = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConversionError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} is not a JSON object.")
    return found


def parse_yaml(text: str | bytes, place: str) -> Any:
    """Parse YAML that holds plain values alone; errors say where it stands.

    Raises:
        ConversionError: it is something else, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConversionError(
            f"{place} needs PyYAML ({error}): pip install 'vaswani[convert]'."
        ) from error
    try:
        return yaml.safe_load(text)
    except Exception as error:  # wrong numbers and dates raise whatever Python makes of them
        raise ConversionError(f"{place} is no YAML: {' '.join(str(error).split())}") from error


def is_text(tokens: Iterable[str]) -> bool:
    """Tell whether all tokens can be written down: a lone half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for token in tokens for character in token)


def holds_tensors(loaded: Any) -> TypeGuard[Mapping[str, torch.Tensor]]:
    """Tell whether something is a state dict: tensors by their names, and nothing else."""
    return isinstance(loaded, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in loaded.items()
    )
