"""config.yaml of JoeyNMT, read so that no option is passed over."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import parse_yaml, read_text
from .rules import ConversionError


def read_config(path: Path, problems: list[str]) -> "Section":
    """Read the file; what its options have wrong is added to `problems`.

    Raises:
        ConversionError: there is none, or it is no config of JoeyNMT.
    """
    if not path.is_file():
        raise ConversionError(f"There is no file {path}: name it by --config.")
    values = parse_yaml(read_text(path), str(path))
    if not isinstance(values, dict) or not {"model", "data"} <= set(values):
        raise ConversionError(
            f"{path} lacks the sections model and data: it is no config of JoeyNMT."
        )
    return Section(values, "", problems)


class Section:
    """A section of config.yaml that notes what nobody asked for.

    Args:
        values: its options.
        name: where it stands, such as "model.encoder.".
        problems: list to which wrong and unknown options are added.
    """

    def __init__(self, values: Any, name: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems
        if values is not None and not isinstance(values, Mapping):
            self.complain(f"{name.rstrip('.')} is no section of options: {values!r}")
            values = None
        self.values = dict(values or {})
        self.unread = set(self.values)

    def complain(self, problem: str) -> None:
        """Note a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def get(self, option: str, default: Any, kind: type | None = None) -> Any:
        """Look an option up; it must be of the default's type, or of `kind`."""
        self.unread.discard(option)
        value = self.values.get(option)
        if value is None:
            return default
        kind = kind or type(default)
        try:
            converted = kind(value)
            # YAML's true and false are numbers to Python, and bool() takes anything.
            fits = isinstance(value, bool) == (kind is bool)
            fits = fits and (kind is not int or float(value) == converted)
        except (OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            self.complain(f"{self.name}{option}: {value!r} is not of type {kind.__name__}")
        return converted if fits else default

    def section(self, option: str) -> "Section":
        """Look a section up; one that is missing is empty."""
        self.unread.discard(option)
        return Section(self.values.get(option), f"{self.name}{option}.", self.problems)

    def require(self, option: str, default: Any, wanted: Any, why: str) -> None:
        """Complain unless an option has the only value that is known here."""
        value = self.get(option, default)
        if value != wanted:
            self.complain(f"{self.name}{option}: {value} ({why})")

    def ignore(self, *options: str) -> None:
        """Leave options out that change nothing of a trained model."""
        self.unread -= set(options)

    def refuse_the_rest(self) -> None:
        """Complain of the options that are still unread."""
        for option in sorted(self.unread, key=str):
            self.complain(f"{self.name}{option} is unknown")
