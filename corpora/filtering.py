"""Pairs that are left out of training, with counts by reason."""

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import regex

from ..configuration.named_functions import function_of
from .reading import DataError, Pair


@dataclass(frozen=True)
class Rules:
    """Which pairs are left out of training.

    Args:
        max_length: largest number of tokens of either side.
        max_ratio: largest number of tokens of the longer side per token of the shorter side.
        drop_empty: leave out pairs with a blank side.
        drop_identical: leave out pairs with equal sides.
        drop_duplicates: keep the first of several equal "pairs", or of pairs with the same
            "source" or "target".
        scripts: Unicode scripts of source and target, such as ("Latin", "Cyrillic"). Pairs with a
            letter of another script are left out.
        function: "module:function", called with source and target. Pairs for which it returns a
            false value are left out.
        skip_unreadable: count pairs that cannot be read instead of raising their error.
    """

    max_length: int | None = None
    max_ratio: float | None = None
    drop_empty: bool = False
    drop_identical: bool = False
    drop_duplicates: str | None = None
    scripts: tuple[str, str] | None = None
    function: str | None = None
    skip_unreadable: bool = False

    def key(self) -> str:
        """Return a text that changes when a rule or the code of the function changes."""
        return repr(asdict(self)) + (_source_of(self.function) if self.function else "")


def _filter_of(name: str) -> Callable[[str, str], Any]:
    try:
        return function_of(name)
    except ValueError as error:
        raise DataError(f"--filter {error}") from error


def _source_of(name: str) -> str:
    """Return the source of a function's module, or "" if there is none, as for `operator:ne`."""
    module = inspect.getmodule(_filter_of(name))
    try:
        return inspect.getsource(module) if module else ""
    except (OSError, TypeError):  # the module is compiled
        return ""


class TextFilter:
    """Leave out pairs by their texts.

    Raises:
        DataError: a script or the function is unknown.
    """

    def __init__(self, rules: Rules) -> None:
        self._checks: list[tuple[str, Callable[[str, str], Any]]] = []
        # Functions inside this method could not be sent to other processes.
        if rules.drop_empty:
            self._checks.append(("empty", _have_words))
        if rules.drop_identical:
            self._checks.append(("identical", operator.ne))
        if rules.scripts:
            self._checks.append(("script", _InScripts(*rules.scripts)))
        if rules.function:
            self._checks.append(("filter", _NamedFilter(rules.function)))

    def keeps(self, source: str, target: str) -> bool:
        """Tell whether all checks keep a pair."""
        return all(keeps(source, target) for _, keeps in self._checks)

    def __call__(self, pairs: Sequence[Pair]) -> tuple[list[Pair], Counter[str]]:
        """Return the pairs that are kept, and how many pairs each check left out."""
        dropped: Counter[str] = Counter()
        kept = list(pairs)
        for name, keeps in self._checks:
            before = len(kept)
            kept = [pair for pair in kept if keeps(*pair)]
            dropped[name] = before - len(kept)
        return kept, +dropped


class _NamedFilter:
    """A function of another module, whose errors name the function and the pair.

    Raises:
        DataError: there is no such function, or it raises an error.
    """

    def __init__(self, name: str) -> None:
        self.name, self._keeps = name, _filter_of(name)

    def __call__(self, source: str, target: str) -> Any:
        try:
            return self._keeps(source, target)
        except Exception as error:
            raise DataError(
                f"--filter {self.name} failed for the pair {source[:80]!r}, {target[:80]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _have_words(source: str, target: str) -> bool:
    return bool(source.strip() and target.strip())


class _InScripts:
    """Tells whether both texts have no letters of other scripts."""

    def __init__(self, source: str, target: str) -> None:
        self._outside = [_letters_outside(script) for script in (source, target)]

    def __call__(self, source: str, target: str) -> bool:
        first, second = self._outside
        return not (first.search(source) or second.search(target))


def _letters_outside(script: str) -> Any:
    try:
        if not script:
            raise regex.error("no name")
        pattern = regex.compile(rf"[\p{{L}}--\p{{Script={script}}}--\p{{Common}}]", regex.V1)
    except regex.error as error:
        raise DataError(
            f"--scripts: {script!r} is not a Unicode script: give a name such as Latin, Cyrillic "
            "or Han."
        ) from error
    return pattern


def length_filter(
    rules: Rules, source: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, Counter[str]]:
    """Return a mask of the pairs to keep, and how many pairs each rule left out.

    Args:
        rules: the rules; only those about lengths count here.
        source, target: token counts of the pairs.
    """
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    kept = np.ones(len(source), dtype=bool)
    dropped: Counter[str] = Counter()
    if rules.max_length is not None:
        kept &= longer <= rules.max_length
        dropped["too long"] = len(kept) - int(kept.sum())
    if rules.max_ratio is not None:
        fits = longer <= rules.max_ratio * np.maximum(shorter, 1)
        dropped["ratio"] = int((kept & ~fits).sum())
        kept &= fits
    return kept, +dropped


__all__ = ["Rules", "TextFilter", "length_filter"]
