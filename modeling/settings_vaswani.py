"""Settings of `generate`: which values have a meaning for our searches."""

from numbers import Integral, Real
from typing import Any

LENGTH_PENALTY_TYPES = ("gnmt", "hf")
# Powers of a length overflow beyond.
_LARGEST_PENALTY = 64
# No translation is longer. A search that may go on much longer does not end within a day.
_LONGEST = 1_000_000
_LARGEST_FACTOR = 1000
# A wider beam needs gigabytes for a mask alone.
_MOST_HYPOTHESES = 10_000
_NUMBERS = (
    *("min_length", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_time"),
)
_TOKENS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)


def checked_offset(offset: Any) -> int:
    """Return `max_length_offset` if it is a number of tokens.

    Raises:
        ValueError: it is not.
    """
    if not _is_whole(offset) or not 0 <= offset <= _LONGEST:
        raise ValueError(
            f"max_length_offset must be an integer >= 0 (0 without max_length_factor is off) and "
            f"<= {_LONGEST}, got {offset!r}."
        )
    return int(offset)


def checked_factor(factor: Any) -> float:
    """Return `max_length_factor` if it is a non-negative number.

    Raises:
        ValueError: it is not.
    """
    number = isinstance(factor, Real) and not isinstance(factor, bool)
    if not number or not 0 <= factor <= _LARGEST_FACTOR:
        raise ValueError(
            f"max_length_factor must be a number >= 0 and <= {_LARGEST_FACTOR}, got {factor!r}."
        )
    return float(factor)


def check_search(config: Any) -> None:
    """Refuse settings of a GenerationConfig that our searches could not follow.

    Raises:
        ValueError: a setting has no meaning, with the values that have one.
    """
    kind = getattr(config, "length_penalty_type", None)
    if kind is not None and kind not in LENGTH_PENALTY_TYPES:
        raise ValueError(
            f"length_penalty_type must be one of {LENGTH_PENALTY_TYPES}, got {kind!r}."
        )
    for name, checked in (
        ("max_length_offset", checked_offset),
        ("max_length_factor", checked_factor),
    ):
        if (value := getattr(config, name, None)) is not None:
            checked(value)
    alpha = config.length_penalty
    if alpha is not None and not isinstance(alpha, Real):
        raise ValueError(f"length_penalty must be a number, got {alpha!r}.")
    if alpha is not None and not abs(float(alpha)) <= _LARGEST_PENALTY:
        raise ValueError(
            f"length_penalty must lie between -{_LARGEST_PENALTY} and {_LARGEST_PENALTY}, got "
            f"{alpha}."
        )
    _check_sizes(config)
    _check_types(config)


def _check_sizes(config: Any) -> None:
    for name in ("num_beams", "num_return_sequences"):
        count = getattr(config, name)
        if count is not None and not (_is_whole(count) and 1 <= count <= _MOST_HYPOTHESES):
            raise ValueError(
                f"{name} must be an integer from 1 to {_MOST_HYPOTHESES}, got {count!r}."
            )
    for name in ("max_length", "max_new_tokens"):
        length = getattr(config, name)
        if length is not None and (isinstance(length, str | bool) or not float(length) <= _LONGEST):
            raise ValueError(
                f"{name} must be a number of tokens up to {_LONGEST}, got {length!r}; without it, "
                "the limit is set by the length of each source."
            )


def _check_types(config: Any) -> None:
    """Refuse text where numbers belong, as a file may hold it: transformers would compute with it.

    Raises:
        ValueError: names the setting and its value.
    """
    for name in _NUMBERS:
        if isinstance(value := getattr(config, name, None), str | list | dict):
            raise ValueError(f"{name} must be a number, got {value!r}.")
    for name in _TOKENS:
        tokens = getattr(config, name, None)
        for token in tokens if isinstance(tokens, list | tuple) else [tokens]:
            if isinstance(token, str | float | bool | list | dict):
                raise ValueError(
                    f"{name} must be the number of a token, or a list of such, got {tokens!r}."
                )


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


__all__ = ["LENGTH_PENALTY_TYPES", "check_search", "checked_factor", "checked_offset"]
