"""Command lines: options that say what was meant, NAME=VALUE settings, and recipes.

Nothing heavy is imported here, so that a mistake on the command line is answered at once.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class CommandError(Exception):
    """What stops a command, in one sentence for its user."""


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines and name the nearest option."""

    def __init__(self, command: str, manual: str | None) -> None:
        super().__init__(
            prog=f"vaswani {command}".rstrip(),
            description=manual,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line with nothing unknown in it."""
        words = list(sys.argv[1:] if args is None else args)
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        for word in [] if takes_rest else words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                nearest = difflib.get_close_matches(name, self._option_string_actions, n=1)
                hint = f": did you mean {nearest[0]}?" if nearest else "."
                self.error(f"{name} is unknown{hint}")
        return super().parse_args(words, namespace)

    def with_recipe(self, args: Sequence[str] | None) -> list[str]:
        """Put the options of --recipe before those of the command line."""
        words = list(sys.argv[1:] if args is None else args)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--recipe")
        recipe = finder.parse_known_args(words)[0].recipe
        return [*self._read(recipe), *words] if recipe else words

    def _read(self, recipe: str) -> list[str]:
        try:
            return recipe_arguments(recipe)
        except ValueError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """End the program with what is wrong, and where to read more."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows all options.\n")


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


positive.__name__ = "integer"  # argparse names the type in its errors


def settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE arguments; a value that is no literal (0.1, true, null) is a string.

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
        except json.JSONDecodeError:
            values[name] = value
    return values


def recipe_arguments(path: str) -> list[str]:
    """Read a recipe, a YAML file of options without their dashes, as a command line.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    import yaml

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
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments.append(f"--{name}={value}")
    return arguments
