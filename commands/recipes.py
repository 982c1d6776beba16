"""NAME=VALUE settings, and recipes: YAML files of the options of a run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?")


def settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE arguments. Values other than literals (0.1, true, null) are strings.

    Raises:
        ValueError: an argument has no "=".
    """
    values = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(f"expected NAME=VALUE, got {assignment!r}")
        try:
            values[name] = json.loads({"True": "true", "False": "false"}.get(value, value))
        except json.JSONDecodeError:  # JSON has no .5 and 5.
            values[name] = float(value) if _DECIMAL.fullmatch(value) else value
    return values


def recipe_arguments(path: str) -> list[str]:
    """Read a recipe, a YAML file of options without dashes, as a command line.

    Raises:
        ValueError: the file cannot be read, or does not hold options.
    """
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"recipe {path}: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path} holds no settings of the form NAME: VALUE")
    arguments = []
    for name, value in recipe.items():
        if isinstance(value, dict):
            fields = (
                f"{field}={item if isinstance(item, str) else json.dumps(item)}"
                for field, item in value.items()
            )
            arguments += [f"--{name}", *fields]
        elif isinstance(value, list):
            if any(isinstance(item, bool | None) for item in value):
                raise ValueError(
                    f"recipe {path}: {name} holds true, false or null, as YAML reads yes, no and "
                    "~: put such a word into quotation marks"
                )
            arguments += [f"--{name}", *map(str, value)]
        elif value is None:
            raise ValueError(f"recipe {path}: {name} has no value: remove the line, or fill it in")
        elif isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments.append(f"--{name}={value}")
    return arguments
