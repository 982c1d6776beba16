"""Settings of `generate`: the paper's (section 6.1), the checks of all values, and look-ups."""

from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

LENGTH_PENALTY_TYPES = ("gnmt", "hf")
_LARGEST_PENALTY = 64  # a larger power of a length overflows
_LONGEST = 1_000_000  # tokens; a search with a larger limit may run for days
_LARGEST_FACTOR = 1000
_MOST_HYPOTHESES = 10_000  # the mask alone of a wider beam takes gigabytes
_NUMBERS = (
    *("min_length", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_time"),
)
_TOKENS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
# Arguments of `generate` that are tensors.
_TENSORS = (
    *("inputs", "input_ids", "attention_mask", "inputs_embeds"),
    *("decoder_input_ids", "decoder_attention_mask"),
)


def first_setting(name: str, *places: Any) -> Any:
    """Look a setting up in dicts and configs, in order; None if no place sets it.

    A place may be None. A setting of None counts as not set.
    """
    for place in places:
        value = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
        if value is not None:
            return value
    return None


def checked_offset(offset: Any) -> int:
    """Return `max_length_offset` as an integer.

    Raises:
        ValueError: `offset` is not a number of tokens.
    """
    if not _is_whole(offset) or not 0 <= offset <= _LONGEST:
        raise ValueError(
            f"max_length_offset must be an integer >= 0 (0 without max_length_factor is off) and "
            f"<= {_LONGEST}, got {offset!r}."
        )
    return int(offset)


def checked_factor(factor: Any) -> float:
    """Return `max_length_factor` as a float.

    Raises:
        ValueError: `factor` is not a number, or out of range.
    """
    number = isinstance(factor, Real) and not isinstance(factor, bool)
    if not number or not 0 <= factor <= _LARGEST_FACTOR:
        raise ValueError(
            f"max_length_factor must be a number >= 0 and <= {_LARGEST_FACTOR}, got {factor!r}."
        )
    return float(factor)


def check_penalty(length_penalty: Any, length_penalty_type: Any) -> None:
    """Refuse an invalid length penalty or formula; None takes the default.

    Raises:
        ValueError: names the setting, its value and the valid values.
    """
    if length_penalty_type is not None and length_penalty_type not in LENGTH_PENALTY_TYPES:
        raise ValueError(
            f"length_penalty_type must be one of {LENGTH_PENALTY_TYPES}, got "
            f"{length_penalty_type!r}."
        )
    if length_penalty is None:
        return
    if not isinstance(length_penalty, Real):
        raise ValueError(f"length_penalty must be a number, got {length_penalty!r}.")
    if not abs(float(length_penalty)) <= _LARGEST_PENALTY:
        raise ValueError(
            f"length_penalty must lie between -{_LARGEST_PENALTY} and {_LARGEST_PENALTY}, got "
            f"{length_penalty}."
        )


def check_search(config: Any) -> None:
    """Refuse settings of a GenerationConfig that no search could follow.

    Raises:
        ValueError: names the setting, its value and the valid values.
    """
    check_penalty(config.length_penalty, getattr(config, "length_penalty_type", None))
    for name, checked in (
        ("max_length_offset", checked_offset),
        ("max_length_factor", checked_factor),
    ):
        if (value := getattr(config, name, None)) is not None:
            checked(value)
    _check_sizes(config)
    _check_types(config)
    if config.do_sample and config.temperature is not None and not config.temperature > 0:
        raise ValueError(
            f"temperature must be greater than 0 with do_sample, got {config.temperature}: for the "
            "most probable tokens, leave out do_sample."
        )


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
                f"{name} must be a number of tokens up to {_LONGEST}, got {length!r}. Leave it out "
                "to limit each translation by the length of its source."
            )


def _check_types(config: Any) -> None:
    """Refuse text where numbers belong; transformers would fail only when it computes with it.

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
                    f"{name} must be the number of a token, or a list of numbers, got {tokens!r}."
                )


def check_mask(attention_mask: torch.Tensor, source: torch.Tensor) -> None:
    """Refuse a mask (B, S) of another shape than the sources (B, S, ...).

    One source may have several prompts, and then a row of the mask for each prompt.

    Raises:
        ValueError: names both shapes.
    """
    rows, tokens = source.shape[:2]
    if attention_mask.shape[1] != tokens or (rows > 1 and len(attention_mask) != rows):
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, but the sources have "
            f"{(rows, tokens)}: pass 1 or 0 for each source token."
        )


def refuse_packed(inputs: dict[str, Any]) -> None:
    """Refuse a packed batch, because the search needs one sentence in each row.

    Raises:
        ValueError: names the boundaries and the collator to use.
    """
    for name in ("cu_seq_lens_q", "decoder_cu_seq_lens_q"):
        if inputs.get(name) is not None:
            raise ValueError(
                f"generate takes padded batches, got {name} of a packed batch: evaluate with "
                "DataCollatorForSeq2Seq, or with VaswaniTrainer(batching='packed'), which packs "
                "training batches only."
            )


def check_types(inputs: dict[str, Any], generation_config: Any) -> None:
    """Refuse lists and dictionaries, which transformers does not name in its errors.

    Raises:
        TypeError: names the argument, its type and the way out.
    """
    for name in _TENSORS:
        value = inputs.get(name)
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} must be a Tensor, not a {type(value).__name__}: pass "
                'return_tensors="pt" to the tokenizer, or wrap the numbers in torch.tensor.'
            )
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(
            "generation_config must be a GenerationConfig, not a "
            f"{type(generation_config).__name__}: pass GenerationConfig(**settings)."
        )


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


class VaswaniGenerationConfig(GenerationConfig):
    """transformers' GenerationConfig with the settings of section 6.1 that it lacks.

    Args:
        length_penalty_type: "gnmt" divides a hypothesis' log-probability by
            lp(Y) = ((5 + |Y|) / 6)^length_penalty (Wu et al., 2016, equation 14); "hf" by
            |Y|^length_penalty.
        max_length_offset: a translation may have `max_length_factor` times as many tokens as its
            source, plus this number. 0 without a `max_length_factor` switches this limit off.
            `max_length` or `max_new_tokens` in a call of `generate` replace the limit, and so does
            a saved `max_new_tokens`.
        max_length_factor: None, the default, means 1. 0 makes `max_length_offset` the limit.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.length_penalty_type = kwargs.pop("length_penalty_type", None)
        self.max_length_offset = kwargs.pop("max_length_offset", None)
        self.max_length_factor = kwargs.pop("max_length_factor", None)
        super().__init__(**kwargs)

    @classmethod
    def of(cls, settings: GenerationConfig) -> "VaswaniGenerationConfig":
        """Copy a plain GenerationConfig, whose settings of None stay unset."""
        if isinstance(settings, cls):
            return settings
        copied = cls()
        vars(copied).update(vars(settings))
        return copied

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read settings from a dict as `read_settings` does. Other arguments go to transformers."""
        return super().from_dict(cls._settings_of(config_dict), **kwargs)

    @classmethod
    def read_settings(cls, config_dict: dict[str, Any]) -> "VaswaniGenerationConfig":
        """Read settings from a dict, in which None switches a setting of the paper off.

        A setting that is missing keeps the paper's default. Nothing is logged.
        """
        return cls(**cls._settings_of(config_dict))

    @classmethod
    def _settings_of(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config_dict, dict):
            raise ValueError(
                f"Settings must be a mapping of names to values, got {config_dict!r:.100}."
            )
        off = {"length_penalty_type": "hf", "max_length_offset": 0}
        switched = {
            name: value
            for name, value in off.items()
            if name in config_dict and config_dict[name] is None
        }
        # A file may name a stranger's code as custom_generate, so never save that name again.
        kept = {name: value for name, value in config_dict.items() if name != "custom_generate"}
        return {**kept, **switched}

    @classmethod
    def from_pretrained(cls, pretrained_model_name: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a generation_config.json as transformers does.

        Raises:
            OSError: the file is missing or damaged, or a setting has an invalid value.
        """
        try:
            return super().from_pretrained(pretrained_model_name, *args, **kwargs)
        except (TypeError, ValueError) as error:
            raise OSError(
                f"{GENERATION_CONFIG_NAME} of {pretrained_model_name}: {error} Correct the file, "
                "or download it again."
            ) from error

    @classmethod
    def _dict_from_json_file(cls, json_file: Any) -> dict[str, Any]:
        content = super()._dict_from_json_file(json_file)
        if not isinstance(content, dict):
            raise ValueError(
                f"Settings must be a mapping of names to values, got {content!r:.100}."
            )
        return content

    @classmethod
    def paper_defaults(cls, **token_ids: Any) -> "VaswaniGenerationConfig":
        """Return the settings of section 6.1: alpha 0.6, input length + 50, exact stop.

        The beam size is left to the call.
        """
        return cls(
            length_penalty_type="gnmt",
            length_penalty=0.6,
            max_length_offset=50,
            early_stopping="never",
            **token_ids,
        )

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Validate as transformers does, and check the paper's settings.

        Raises:
            ValueError: names the setting, its value and the valid values.
        """
        check_search(self)
        # transformers refuses to save settings of beam search with num_beams=1. Here they are
        # defaults for calls with beams, so hide them from that check.
        hidden = {}
        if self.num_beams in (None, 1):
            hidden["length_penalty"] = self.length_penalty
            if self.early_stopping in (True, "never"):
                hidden["early_stopping"] = self.early_stopping
        for name in hidden:
            setattr(self, name, None)
        try:
            super().validate(strict=strict, user_set_attributes=user_set_attributes)
        finally:
            for name, value in hidden.items():
                setattr(self, name, value)


__all__ = [
    "LENGTH_PENALTY_TYPES",
    "VaswaniGenerationConfig",
    "check_mask",
    "check_penalty",
    "check_search",
    "check_tokens",
    "check_types",
    "checked_factor",
    "checked_offset",
    "first_setting",
    "refuse_packed",
]
