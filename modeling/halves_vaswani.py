"""Split a translation model into encoder and decoder, and join two halves into a model.

The halves have the same parameter names as the translation model, so weights are copied by name.
"""

import dataclasses
import os
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.names_vaswani import complaints
from ..configuration.siblings_vaswani import VaswaniDecoderConfig, VaswaniEncoderConfig
from .causal_lm_vaswani import VaswaniForCausalLM
from .encoder_vaswani import VaswaniEncoderModel
from .modeling_vaswani import VaswaniForConditionalGeneration
from .quantization_vaswani import refuse_int8

logger = logging.get_logger(__name__)

# Fields that must be equal in both stacks, because VaswaniConfig has one field for them.
_SHARED_FIELDS = (
    *("d_model", "d_k", "d_v", "activation_function", "norm_position", "final_layer_norm"),
    *("position_encoding", "position_offset", "max_position_embeddings", "attention_bias"),
    *("scale_embedding", "layer_norm_eps"),
)
# Arguments of `from_pretrained` that both halves are loaded with.
_LOADING = (
    *("dtype", "torch_dtype", "device_map", "max_memory", "offload_folder", "offload_buffers"),
    *("revision", "subfolder", "variant", "use_safetensors", "weights_only", "key_mapping"),
    *("cache_dir", "force_download", "local_files_only", "token", "proxies"),
    *("trust_remote_code", "code_revision"),
)
_SIZES = ("layers", "attention_heads", "ffn_dim")


def split_halves(
    model: VaswaniForConditionalGeneration,
) -> tuple[VaswaniEncoderModel, VaswaniForCausalLM]:
    """Copy a translation model's weights into its two halves.

    The decoder keeps its attention to an encoder (`add_cross_attention=True`). `join_halves`
    restores all weights, bit for bit. Label smoothing and settings of generation are not kept.

    Raises:
        TypeError: the model is no VaswaniForConditionalGeneration.
        ValueError: the model has int8 weights, an adapter or a parametrization.
    """
    if not isinstance(model, VaswaniForConditionalGeneration):
        raise TypeError(
            f"split_halves takes a VaswaniForConditionalGeneration, got {type(model).__name__}."
        )
    refuse_int8(model, "split_halves")
    encoder = VaswaniEncoderModel(VaswaniEncoderConfig.of(model.config))
    decoder = VaswaniForCausalLM(VaswaniDecoderConfig.of(model.config))
    for half in (encoder, decoder):
        nn.Module.to(half, device=model.device, dtype=model.dtype)
        half.train(model.training)
    for source, target in (
        (model.model.encoder, encoder.encoder),
        (model.model.decoder, decoder.model.decoder),
        (model.lm_head, decoder.lm_head),
    ):
        copied = _copy_weights(source, target)
        if left_over := sorted({name for name, _ in target.named_parameters()} - copied):
            raise ValueError(
                f"split_halves finds no weight {left_over[0]} in the model, which an adapter or a "
                "parametrization may have replaced: merge or remove it first."
            )
    return encoder, decoder


def join_halves(
    encoder: Any, decoder: Any = None, **overrides: Any
) -> tuple[VaswaniForConditionalGeneration, list[str]]:
    """Copy the weights of two halves into a translation model.

    Each half may have any head, such as that of a masked language model.

    Args:
        encoder: a model with only an encoder.
        decoder: a model with only a decoder. None makes a new decoder, which shares the encoder's
            embedding and vocabulary.
        **overrides: fields of the translation model's configuration, such as dropout. They override
            the fields of the halves.

    Returns:
        The model in evaluation mode, and the names of its weights that come from neither half.

    Raises:
        TypeError: a half is not a model with an encoder or a decoder alone.
        ValueError: a half has int8 weights, the halves do not fit each other, or an override is no
            field. The message names the field.
    """
    _check_overrides(overrides)
    for half in (encoder, decoder):
        refuse_int8(half, "join_halves")
    _check_stack(encoder, "encoder")
    if decoder is not None:
        _check_stack(decoder, "decoder")
    source = encoder.base_model.encoder
    target = None if decoder is None else decoder.base_model.decoder
    config = _config_of_both(source, target, decoder, overrides)
    model = VaswaniForConditionalGeneration(config).to(encoder.device, encoder.dtype).eval()
    copied = _copy_weights(source, model.model.encoder, "model.encoder.")
    if target is not None:
        copied |= _copy_weights(target, model.model.decoder, "model.decoder.")
        head = getattr(decoder, "lm_head", None)
        if head is not None:
            copied |= _copy_weights(head, model.lm_head, "lm_head.")
    own = {id(weight): name for name, weight in model.named_parameters()}  # tied weights once
    filled = {id(model.get_parameter(name)) for name in copied}
    return model, sorted(name for number, name in own.items() if number not in filled)


def load_halves(
    encoder: str | os.PathLike, decoder: str | os.PathLike | None = None, **overrides: Any
) -> VaswaniForConditionalGeneration:
    """Load each half from a folder or repository and join them, for a warm start.

    The arguments are those of `join_halves`, with paths or repositories instead of models. A
    warning names the weights that come from neither half, such as the decoder's attention to the
    encoder. Arguments of `from_pretrained`, such as dtype and revision, load both halves.

    Raises:
        ValueError: an override is neither a field nor an argument of loading.
    """
    loading = {name: overrides.pop(name) for name in _LOADING if name in overrides}
    _check_overrides(overrides, _LOADING)
    first = AutoModel.from_pretrained(encoder, **loading)
    second = None if decoder is None else AutoModelForCausalLM.from_pretrained(decoder, **loading)
    model, new = join_halves(first, second, **overrides)
    if new:
        kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in new})
        logger.warning(
            f"{len(new)} weights come from neither half and are new, so train the model before you "
            f"translate with it: {', '.join(kinds)}."
        )
    return model


def _check_overrides(overrides: dict[str, Any], others: tuple[str, ...] = ()) -> None:
    """Refuse overrides that are neither fields of VaswaniConfig nor names in `others`."""
    fields = [field.name for field in dataclasses.fields(VaswaniConfig)]
    known = [*fields, *VaswaniConfig.attribute_map, "attn_implementation", *others]
    if wrong := complaints(overrides, known):
        raise ValueError(f"Overrides are fields of VaswaniConfig: {wrong}")


def _check_stack(half: Any, stack: str) -> None:
    """Refuse anything but a model with one stack, with or without a head."""
    config_class: Any = {"encoder": VaswaniEncoderConfig, "decoder": VaswaniDecoderConfig}[stack]
    config = getattr(half, "config", None)
    # Code from a repository has classes of its own, with the same model type.
    same_type = getattr(config, "model_type", None) == config_class.model_type
    if not (same_type or isinstance(config, config_class)):
        raise TypeError(
            f"The {stack} must be a model with a {config_class.__name__}, got "
            f"{type(half).__name__}: pass the encoder first, and split_halves gives both halves of "
            "a translation model."
        )


def _config_of_both(
    source: nn.Module, target: nn.Module | None, decoder: Any, overrides: dict[str, Any]
) -> VaswaniConfig:
    """Combine the configurations of two stacks. A new decoder has the sizes of the encoder."""
    encoder_config: Any = source.config
    fields = {
        name: value for name, value in encoder_config.to_dict().items() if _is_field_of_whole(name)
    }
    fields |= {"label_smoothing": VaswaniConfig.label_smoothing, "architectures": None}
    if target is None:
        if (end := encoder_config.eos_token_id) is not None:
            fields["decoder_start_token_id"] = end[0] if isinstance(end, list | tuple) else end
        fields |= {f"decoder_{size}": getattr(encoder_config, f"encoder_{size}") for size in _SIZES}
        return VaswaniConfig(**{**fields, **overrides})
    decoder_config: Any = target.config
    for name in _SHARED_FIELDS:
        values = getattr(encoder_config, name), getattr(decoder_config, name)
        if values[0] != values[1]:
            raise ValueError(
                f"The two halves differ in {name}: {values[0]!r} in the encoder and {values[1]!r} "
                "in the decoder, but a translation model has one value for both: choose halves "
                "that agree."
            )
    fields |= {f"decoder_{size}": getattr(decoder_config, f"decoder_{size}") for size in _SIZES}
    fields["decoder_vocab_size"] = decoder_config.vocab_size
    tables: list[Any] = [source.embed_tokens, target.embed_tokens]
    shared = _equal(*(table.weight for table in tables))
    if overrides.get("share_encoder_decoder_embeddings") and not shared:
        raise ValueError(
            "share_encoder_decoder_embeddings=True needs halves with the same embedding, but these "
            "halves have different embeddings: leave the field out, so that each side keeps its "
            "own."
        )
    fields["share_encoder_decoder_embeddings"] = shared
    head = getattr(decoder, "lm_head", None)
    if (
        overrides.get("tie_word_embeddings")
        and head is not None
        and not _equal(head.weight, tables[1].weight)
    ):
        raise ValueError(
            "tie_word_embeddings=True needs a decoder whose lm_head has the weights of its "
            "embedding, but they differ: leave the field out, so that both are kept."
        )
    fields["lm_head_bias"] = head is not None and head.bias is not None
    fields["tie_word_embeddings"] = decoder_config.tie_word_embeddings
    for name in ("eos_token_id", "pad_token_id", "unk_token_id"):
        fields[name] = getattr(decoder_config, name)
    fields["decoder_start_token_id"] = decoder_config.bos_token_id
    return VaswaniConfig(**{**fields, **overrides})


def _is_field_of_whole(name: str) -> bool:
    return name in VaswaniConfig._own_fields() and name not in ("is_encoder_decoder", "use_cache")


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module, prefix: str = "") -> set[str]:
    """Copy the parameters that both modules have. Return their names with a prefix.

    Raises:
        ValueError: a parameter has another shape.
    """
    own = dict(target.named_parameters())
    found = {name: weight for name, weight in source.named_parameters() if name in own}
    for name, weight in found.items():
        if weight.shape != own[name].shape:
            raise ValueError(
                f"{prefix}{name} has the shape {tuple(weight.shape)} in the half, but the "
                f"overrides make {tuple(own[name].shape)}: leave out sizes that the half has."
            )
        own[name].copy_(weight)
    return {prefix + name for name in found}


__all__ = ["join_halves", "load_halves", "split_halves"]
