"""Optional packages: if one is missing, the error shows the pip command."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(requirement: str, error: type[BaseException] = ModuleNotFoundError) -> Iterator[None]:
    """Show the pip command if an import inside this block fails.

    Args:
        requirement: the argument of pip install, such as "vaswani[train]".
        error: the class of the error. Scripts pass SystemExit, which prints no traceback.

    Raises:
        ModuleNotFoundError: a package is missing; or `error`.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        shown = error(f"{package} is not installed: pip install '{requirement}'")
        if isinstance(shown, ModuleNotFoundError):
            shown.name = package
        raise shown from None


__all__ = ["needs"]
