"""The error of all converters, and functions that raise it."""

import contextlib
from collections.abc import Iterator, Sequence

from huggingface_hub.errors import StrictDataclassError


class ConversionError(ValueError):
    """The model cannot be converted exactly. The message names all reasons at once."""


def refuse(problems: Sequence[str], subject: str) -> None:
    """Refuse a model for all `problems` at once, if there are any.

    Raises:
        ConversionError: `subject` has problems.
    """
    if problems:
        raise ConversionError(f"{subject} cannot be converted exactly: {'; '.join(problems)}.")


@contextlib.contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Turn errors that wrong types and values raise into a ConversionError.

    Args:
        reason: first half of the message; the error is the second.
    """
    try:
        yield
    except ConversionError:
        raise
    except StrictDataclassError as error:
        # The error itself only names the validator. Its cause says what is wrong.
        raise ConversionError(f"{reason}: {error.__cause__ or error}") from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ConversionError(f"{reason}: {error}") from error


__all__ = ["ConversionError", "refuse", "refusing"]
