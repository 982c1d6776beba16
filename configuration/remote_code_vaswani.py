"""Code that is saved with a model: the files, and the references to code in a config.json.

A saved folder holds flat copies of the package's files, so that it loads without the package. Its
config.json names classes in them under `auto_map` and `custom_pipelines`.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

_TRAVELLING_FILES = (
    "configuration/configuration_vaswani.py",
    "configuration/remote_code_vaswani.py",
    "configuration/names_vaswani.py",
    "configuration/places_vaswani.py",
    "configuration/siblings_vaswani.py",
    "modeling/modeling_vaswani.py",
    "modeling/attention_vaswani.py",
    "modeling/positions_vaswani.py",
    "modeling/encoder_vaswani.py",
    "modeling/heads_vaswani.py",
    "modeling/causal_lm_vaswani.py",
    "modeling/halves_vaswani.py",
    "modeling/language_head_vaswani.py",
    "generation/causal_vaswani.py",
    "generation/generation_vaswani.py",
    "generation/search_vaswani.py",
    "modeling/loading_vaswani.py",
    "modeling/dropout_vaswani.py",
    "modeling/backends_vaswani.py",
    "modeling/embeddings_vaswani.py",
    "generation/fallback_vaswani.py",
    "generation/coverage_vaswani.py",
    "generation/caches_vaswani.py",
    "generation/layers_vaswani.py",
    "generation/incremental_vaswani.py",
    "generation/limits_vaswani.py",
    "generation/memory_vaswani.py",
    "generation/int8_vaswani.py",
    "generation/beam_vaswani.py",
    "generation/choice_vaswani.py",
    "generation/library_vaswani.py",
    "generation/fingerprints_vaswani.py",
    "generation/snapshots_vaswani.py",
    "generation/products_vaswani.py",
    "generation/rules_vaswani.py",
    "generation/structures_vaswani.py",
    "generation/compiled_vaswani.py",
    "generation/continuations_vaswani.py",
    "generation/linear_vaswani.py",
    "modeling/loss_vaswani.py",
    "modeling/packing_vaswani.py",
    "modeling/packed_attention_vaswani.py",
    "modeling/training_kernels_vaswani.py",
    "modeling/training_products_vaswani.py",
    "modeling/windows_vaswani.py",
    "modeling/parallel_vaswani.py",
    "modeling/pickling_vaswani.py",
    "modeling/quantization_vaswani.py",
    "generation/scoring_vaswani.py",
    "generation/settings_vaswani.py",
    "generation/batches_vaswani.py",
    "tokenization/tokenization_vaswani.py",
    "tokenization/kinds_vaswani.py",
    "generation/pipeline_vaswani.py",
)
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
    package = Path(__file__).resolve().parent.parent
    target_folder = Path(folder)
    target_folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in _TRAVELLING_FILES:
        target = target_folder / Path(name).name
        if (source := package / name).is_file():
            flat = _IMPORT_ACROSS_SUBPACKAGES.sub(r"\1\2", source.read_text(encoding="utf-8"))
            text = _LICENSE + flat
        elif (source := Path(__file__).with_name(target.name)).is_file():
            text = source.read_text(encoding="utf-8")  # this file is such a copy itself
        else:
            continue  # transformers downloads only what the loaded class imports
        target.write_text(text, encoding="utf-8")
        written.append(str(target))
    return tuple(written)


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
