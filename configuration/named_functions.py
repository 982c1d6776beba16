"""Functions that a command line names."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

_HERE = ""  # the current folder, which console scripts of Python do not search


def function_of(name: str) -> Callable[..., Any]:
    """Import `module:function`. The module may be a file in the current folder.

    Raises:
        ValueError: there is no such module or function, or importing the module fails.
    """
    if _HERE not in sys.path:
        sys.path.append(_HERE)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module may raise any error
        raise ValueError(
            f"{name} cannot be imported: {error}. Give MODULE:FUNCTION, with a module that Python "
            "can import."
        ) from error
    if not callable(found):
        raise ValueError(f"{name} is {found!r}, which is not callable: name a function.")
    return found


__all__ = ["function_of"]
