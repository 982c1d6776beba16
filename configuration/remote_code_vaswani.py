"""Code that is saved with a model: the files, and the references to code in a config.json.

A saved folder holds flat copies of the package's files, so that it loads without the package. Its
config.json names classes in them under `auto_map` and `custom_pipelines`.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

_SUBPACKAGES = ("configuration", "tokenization", "generation", "modeling")
# Copies leave the folder that holds the licence, so each copy names it.
_LICENSE = (
    "# Part of vaswani, under the Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0\n"
    "# SPDX-License-Identifier: Apache-2.0\n\n"
)
_IMPORT_ACROSS_SUBPACKAGES = re.compile(
    r"^(\s*from )\.\.\w+(\.\w+_vaswani import )", flags=re.MULTILINE
)


class _FromFile(str):
    """A reference to code from a file. It may name a stranger's code, so no save repeats it."""


def save_remote_code(folder: str | os.PathLike) -> tuple[str, ...]:
    """Write flat copies of the files of a model, so that `folder` loads without the package.

    In the copies, `from ..subpackage.file import` becomes `from .file import`.

    Returns:
        The paths of the copies.
    """
    target_folder = Path(folder)
    target_folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in _travelling_files():
        text = _IMPORT_ACROSS_SUBPACKAGES.sub(r"\1\2", source.read_text(encoding="utf-8"))
        target = target_folder / source.name
        target.write_text(text if text.startswith(_LICENSE) else _LICENSE + text, encoding="utf-8")
        written.append(str(target))
    return tuple(written)


def _travelling_files() -> list[Path]:
    """List the files *_vaswani.py of the package, or the flat copies if this file is a copy."""
    here = Path(__file__)
    found = [
        path
        for name in _SUBPACKAGES
        for path in sorted((here.parent.parent / name).glob("*_vaswani.py"))
    ]
    return found if here in found else sorted(here.parent.glob("*_vaswani.py"))


def references_of_file(name: str, value: Any, place: str | None) -> dict[str, Any]:
    """Mark the references to code that a file has under `name`.

    Raises:
        ValueError: the value is not a mapping.
    """
    if not isinstance(value, dict | None):
        raise ValueError(
            f"{name} in the config.json{f' of {place}' if place else ''} must be a mapping, got "
            f"{value!r}: remove it from the file, or download the file again."
        )
    return {
        key: _FromFile(reference) if isinstance(reference, str) else reference
        for key, reference in (value or {}).items()
    }


def without_marks(references: Any) -> Any:
    """Remove the marks from references to code."""
    if isinstance(references, dict):
        return {name: without_marks(reference) for name, reference in references.items()}
    return str(references) if isinstance(references, str) else references


def is_own(reference: Any) -> bool:
    """Tell whether a reference to code comes from this process, not from a file."""
    return type(reference) is str


class TasksOfFolder(dict):
    """Pipeline tasks by name, whose code is in the folder of the model.

    `pipeline` runs such code only with `trust_remote_code=True`. Tasks that are registered with
    transformers are not `in` this mapping, so that `pipeline` uses the registered class.
    """

    def __contains__(self, task: object) -> bool:
        pipelines = sys.modules.get("transformers.pipelines")
        registered = pipelines.PIPELINE_REGISTRY.supported_tasks if pipelines else {}
        return task not in registered and super().__contains__(task)


__all__ = ["TasksOfFolder", "is_own", "references_of_file", "save_remote_code", "without_marks"]
