"""Configurations of the encoder alone and of the decoder alone."""

import copy
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_vaswani import VaswaniConfig

_OF_BOTH_STACKS = frozenset({"share_encoder_decoder_embeddings", "decoder_start_token_id"})


def _fields_of(stack: str) -> frozenset[str]:
    """List the fields of VaswaniConfig that configure one stack."""
    own = VaswaniConfig._own_fields()
    return frozenset(name for name in own if name.startswith(f"{stack}_"))


class VaswaniHalfConfig(VaswaniConfig):
    """The base of both configurations. It refuses fields of the other stack."""

    def validate_architecture(self) -> None:
        """Refuse fields of the stack that the model does not have."""
        super().validate_architecture()
        absent = "decoder" if self.stacks == ("encoder",) else "encoder"
        for name in (f"{absent}_layers", f"{absent}_attention_heads", f"{absent}_ffn_dim"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{type(self).__name__} has no {name}, got {value!r}: the model has only the "
                    f"{self.stacks[0]}. Leave {name} out, or use VaswaniConfig for both stacks."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that this half has."""
        fields = super().to_dict()
        absent = (
            self._absent if fields.get("custom_pipelines") else {"custom_pipelines", *self._absent}
        )
        return {name: value for name, value in fields.items() if name not in absent}

    @classmethod
    def of(cls, config: Any, **changes: Any) -> Any:
        """Return this half of a translation model's configuration. `changes` override fields.

        A configuration of this half is copied.
        """
        if config.model_type == cls.model_type:
            half = copy.deepcopy(config)
            for name, value in changes.items():
                setattr(half, name, value)
            return half
        config.validate_architecture()
        half = cls.from_dict({**cls._own_part(config.to_dict()), **changes})
        half._attn_implementation = config._attn_implementation
        return half

    @classmethod
    def _own_part(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Return this half of a config.json, which may be a translation model's."""
        if found.get("model_type") != VaswaniConfig.model_type:
            return found
        # A half has its own code, generation settings and loss, so drop those of the whole model.
        of_the_whole = {"model_type", "is_encoder_decoder", "auto_map", "custom_pipelines"}
        of_the_whole |= {"architectures", "label_smoothing"}
        kept = {
            name: value
            for name, value in found.items()
            if name not in cls._absent and name not in of_the_whole
        }
        return {**kept, **cls._fields_from_whole(found), "model_type": cls.model_type}

    @classmethod
    def _fields_from_whole(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that have another name or value in the translation model."""
        return {}


@strict
class VaswaniEncoderConfig(VaswaniHalfConfig):
    r"""Sizes and switches of an encoder alone; the defaults are the paper's base model.

    Fields are those of `VaswaniConfig` without the decoder's. `from_pretrained` reads a translation
    model's config.json too, and takes the encoder's part of it.

    Args:
        pooling: vector of a sequence for classification: the "mean" of its real positions, or the
            "first" position.
        classifier_dropout: rate before the classifier; None means `dropout`.
        label_smoothing: as in `VaswaniConfig`, for masked words; 0 by default, because it hurts
            perplexity (5.4).
    """

    model_type = "vaswani_encoder"
    keys_to_ignore_at_inference: ClassVar[list[str]] = []
    stacks: ClassVar[tuple[str, ...]] = ("encoder",)
    readable_types: ClassVar[tuple[str, ...]] = ("vaswani_encoder", "vaswani")
    _absent: ClassVar[frozenset[str]] = _fields_of("decoder") | _OF_BOTH_STACKS | {"use_cache"}
    _own_pipelines: ClassVar[dict[str, Any]] = {}
    _own_auto_map: ClassVar[dict[str, str]] = {
        "AutoConfig": "siblings_vaswani.VaswaniEncoderConfig",
        "AutoModel": "encoder_vaswani.VaswaniEncoderModel",
        "AutoModelForTextEncoding": "encoder_vaswani.VaswaniEncoderModel",
        "AutoModelForMaskedLM": "heads_vaswani.VaswaniForMaskedLM",
        "AutoModelForSequenceClassification": "heads_vaswani.VaswaniForSequenceClassification",
        "AutoModelForTokenClassification": "heads_vaswani.VaswaniForTokenClassification",
    }

    decoder_layers: int | None = None  # type: ignore[assignment]
    decoder_attention_heads: int | None = None  # type: ignore[assignment]
    decoder_ffn_dim: int | None = None  # type: ignore[assignment]
    is_encoder_decoder: bool = False
    use_cache: bool = False
    label_smoothing: float | int = 0.0
    pooling: Literal["mean", "first"] = "mean"
    classifier_dropout: float | int | None = None

    @property
    def attends_to_source(self) -> bool:
        """False, because a model without decoder has no attention to an encoder's output."""
        return False


@strict
class VaswaniDecoderConfig(VaswaniHalfConfig):
    r"""Sizes and switches of a decoder alone; the defaults are the paper's base model.

    Fields are those of `VaswaniConfig` without the encoder's.

    Args:
        add_cross_attention: give each layer attention to an encoder's output (3.2.3), for a decoder
            inside transformers' `EncoderDecoderModel`. A language model has none.
        bos_token_id: the token before the first one of a text; by default the end-of-sentence token
            that the paper's decoder starts with.
        label_smoothing: as in `VaswaniConfig`; 0 by default, because it hurts perplexity (5.4).
    """

    model_type = "vaswani_decoder"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    }
    stacks: ClassVar[tuple[str, ...]] = ("decoder",)
    readable_types: ClassVar[tuple[str, ...]] = ("vaswani_decoder",)
    _absent: ClassVar[frozenset[str]] = (
        _fields_of("encoder") | _OF_BOTH_STACKS | {"decoder_vocab_size"}
    )
    _own_pipelines: ClassVar[dict[str, Any]] = {}
    _own_auto_map: ClassVar[dict[str, str]] = {
        "AutoConfig": "siblings_vaswani.VaswaniDecoderConfig",
        "AutoModel": "causal_lm_vaswani.VaswaniDecoderModel",
        "AutoModelForCausalLM": "causal_lm_vaswani.VaswaniForCausalLM",
    }

    encoder_layers: int | None = None  # type: ignore[assignment]
    encoder_attention_heads: int | None = None  # type: ignore[assignment]
    encoder_ffn_dim: int | None = None  # type: ignore[assignment]
    is_encoder_decoder: bool = False
    add_cross_attention: bool = False
    bos_token_id: int | None = 2
    label_smoothing: float | int = 0.0

    @property
    def attends_to_source(self) -> bool:
        """Whether the decoder's layers have attention to an encoder's output."""
        return self.add_cross_attention

    @classmethod
    def _fields_from_whole(cls, found: dict[str, Any]) -> dict[str, Any]:
        sizes = {
            "vocab_size": found.get("decoder_vocab_size") or found.get("vocab_size"),
            "bos_token_id": found.get("decoder_start_token_id"),
        }
        given = {name: size for name, size in sizes.items() if size is not None}
        return {"add_cross_attention": True, **given}


def refuse_inputs_of_other_half(given: Any, reason: str) -> None:
    """Refuse inputs that only a translation model reads; a half would ignore them silently.

    Raises:
        ValueError: names the input and the reason.
    """
    for name in ("decoder_input_ids", "decoder_inputs_embeds", "encoder_outputs"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name} is an input of a translation model, but {reason}: leave {name} out, or "
                "use VaswaniForConditionalGeneration."
            )


__all__ = [
    "VaswaniDecoderConfig",
    "VaswaniEncoderConfig",
    "VaswaniHalfConfig",
    "refuse_inputs_of_other_half",
]
