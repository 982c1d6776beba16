"""Settings of `generate`: those of section 6.1, and which values have a meaning."""

from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

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
    check_tokens(vars(config))


def check_tokens(settings: dict[str, Any]) -> None:
    """Refuse special tokens that are not given by number.

    Raises:
        ValueError: names the setting and its value.
    """
    for name in _TOKENS:
        tokens = settings.get(name)
        for token in tokens if isinstance(tokens, list | tuple) else [tokens]:
            if isinstance(token, str | float | bool | list | dict):
                raise ValueError(
                    f"{name} must be the number of a token, or a list of such, got {tokens!r}."
                )


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


class VaswaniGenerationConfig(GenerationConfig):
    """transformers' GenerationConfig with the settings of section 6.1 that it lacks.

    Args:
        length_penalty_type: "gnmt" divides a hypothesis' log-probability by
            lp(Y) = ((5 + |Y|) / 6)^length_penalty (Wu et al., 2016, equation 14); "hf" by
            |Y|^length_penalty.
        max_length_offset: a sentence may grow to `max_length_factor` times its own source length
            plus this many tokens. 0 switches the rule off where no `max_length_factor` is set.
            `max_length` or `max_new_tokens` given to `generate` replace the rule.
        max_length_factor: None, the default, counts as 1; 0 makes `max_length_offset` the limit.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.length_penalty_type = kwargs.pop("length_penalty_type", None)
        self.max_length_offset = kwargs.pop("max_length_offset", None)
        self.max_length_factor = kwargs.pop("max_length_factor", None)
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read settings; None, where it is written, switches one of ours off.

        A file that lacks it leaves the paper's default.
        """
        if not isinstance(config_dict, dict):
            raise ValueError(
                f"Settings are a mapping of names to values, got {config_dict!r:.100}."
            )
        off = {"length_penalty_type": "hf", "max_length_offset": 0}
        switched = {
            name: value
            for name, value in off.items()
            if name in config_dict and config_dict[name] is None
        }
        # Code that a file names is not ours, and a save must not repeat it.
        kept = {name: value for name, value in config_dict.items() if name != "custom_generate"}
        return super().from_dict({**kept, **switched}, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a file as transformers does.

        Raises:
            OSError: there is none, it is damaged, or a setting has no meaning.
        """
        try:
            return super().from_pretrained(pretrained_model_name, *args, **kwargs)
        except (TypeError, ValueError) as error:
            raise OSError(
                f"{GENERATION_CONFIG_NAME} of {pretrained_model_name}: {error} Mend the file, or "
                "get it again."
            ) from error

    @classmethod
    def _dict_from_json_file(cls, json_file: Any) -> dict[str, Any]:
        content = super()._dict_from_json_file(json_file)
        if not isinstance(content, dict):
            raise ValueError(f"Settings are a mapping of names to values, got {content!r:.100}.")
        return content

    @classmethod
    def paper_defaults(cls, **token_ids: Any) -> "VaswaniGenerationConfig":
        """Section 6.1 but for the beam size: alpha 0.6, input length + 50, exact stop."""
        return cls(
            length_penalty_type="gnmt",
            length_penalty=0.6,
            max_length_offset=50,
            early_stopping="never",
            **token_ids,
        )

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Validate as transformers does, and what our searches need.

        Raises:
            ValueError: a setting has no meaning, with the values that have one.
        """
        check_search(self)
        # transformers refuses to save a length penalty beside num_beams=1; here it is a default
        # that waits for the call that asks for beams.
        waiting = {}
        if self.num_beams in (None, 1):
            waiting["length_penalty"] = self.length_penalty
            if self.early_stopping == "never":
                waiting["early_stopping"] = self.early_stopping
        for name in waiting:
            setattr(self, name, None)
        try:
            super().validate(strict=strict, user_set_attributes=user_set_attributes)
        finally:
            for name, value in waiting.items():
                setattr(self, name, value)


__all__ = [
    "LENGTH_PENALTY_TYPES",
    "VaswaniGenerationConfig",
    "check_search",
    "check_tokens",
    "checked_factor",
    "checked_offset",
]
