"""Packages that only some uses need: where one is missing, the error is its pip command."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def needs(requirement: str, error: type[BaseException] = ModuleNotFoundError) -> Iterator[None]:
    """Name the pip command where an import in this block finds no such package.

    Args:
        requirement: what to install, such as "vaswani[train]".
        error: raised in place of Python's own; a script passes SystemExit to end without a
            traceback.

    Raises:
        ModuleNotFoundError: a package is missing; or `error`.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        raised: Any = error(f"{package} is not installed: pip install '{requirement}'")
        raised.name = package
        raise raised from None


__all__ = ["needs"]
