"""Command lines: options, their types, and errors that suggest the right name.

This file imports nothing heavy, so that a mistake on the command line is reported at once.
"""

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .recipes import recipe_arguments


class CommandError(Exception):
    """An error that ends a command. Its message is shown to the user without a traceback."""


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
        """Parse a command line, and refuse unknown options."""
        words = list(sys.argv[1:] if args is None else args)
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        options = words[: words.index("--")] if "--" in words else words
        for word in [] if takes_rest else options:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                nearest = difflib.get_close_matches(name, self._option_string_actions, n=1)
                hint = f": did you mean {nearest[0]}?" if nearest else "."
                self.error(f"{name} is unknown{hint}")
        return super().parse_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices, and name the nearest one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            nearest = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            error.message += f": did you mean {nearest[0]}?" if nearest else ""
            raise

    def early_parser(self) -> argparse.ArgumentParser:
        """Return a parser that reads a few options early, with the error messages of this one."""
        early_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        early_parser.error = self.error  # type: ignore[method-assign]
        return early_parser

    def with_recipe(self, args: Sequence[str] | None) -> list[str]:
        """Put the options of --recipe before those of the command line."""
        words = list(sys.argv[1:] if args is None else args)
        early_parser = self.early_parser()
        early_parser.add_argument("--recipe", action="append", default=[])
        recipes = early_parser.parse_known_args(words)[0].recipe
        if len(recipes) > 1:
            self.error(f"give --recipe only once, got {' and '.join(recipes)}")
        return [*self._read(*recipes), *words] if recipes else words

    def refuse_repeated(self, words: Sequence[str], *options: str) -> None:
        """Refuse options that are given twice, because the second one would replace the first."""
        for option in options:
            if sum(word.partition("=")[0] == option for word in words) > 1:
                self.error(f"give {option} only once, with all data after it")

    def _read(self, recipe: str) -> list[str]:
        try:
            found = recipe_arguments(recipe)
        except ValueError as error:
            self.error(str(error))
        if any(word.partition("=")[0] == "--recipe" for word in found):
            self.error(f"recipe {recipe} names another recipe: copy its settings instead")
        return found

    def error(self, message: str) -> NoReturn:
        """End the program with the error and a hint to --help."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows all options.\n")


def seed(text: str) -> int:
    """Read a seed of numpy's and torch's random numbers."""
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"a seed must be between 0 and {2**32 - 1}, got {number}")
    return number


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


positive.__name__ = "integer"  # argparse names the type in its errors


def positive_number(text: str) -> float:
    """Read a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return number


positive_number.__name__ = "number"
