"""To Marian: a folder of transformers' MarianMTModel, with its tokenizers.

    vaswani convert to-marian runs/en-de out/

INPUT is the folder of a model of this package, or its id on the Hub. AutoTokenizer reads the
tokenizers of the output, which are saved as tokenizer.json.

Missing biases become zeros. The paper alternates sines and cosines; a permutation of d_model turns
them into MarianMTModel's order, all sines and then all cosines. The length penalty of Wu et al.
(2016), the limit of input length + 50 and label smoothing are lost, because MarianMTModel lacks
them.
"""

import math
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from ..configuration.configuration_vaswani import NO_LONGEST_SEQUENCE, VaswaniConfig
from ..corpora.atomic_folder import new_folder
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from .errors import ConversionError, refuse
from .loading import (
    add_model_arguments,
    open_model,
    open_tokenizers,
    require_float_weights,
    save_tokenizers,
)
from .marian_names import (
    HEAD,
    MAX_LENGTH,
    SAME_FIELDS,
    SOURCE_TABLE,
    permuted,
    to_concatenated,
    transformers_rules,
)
from .rules import Tensors, to_theirs

logger = logging.get_logger(__name__)

add_arguments = add_model_arguments

# Settings of VaswaniTokenizer that change ids or text, with the values of PreTrainedTokenizerFast.
_TOKENIZER_DEFAULTS = {"source_eos": True, "unknown_from": None, "unknown_ends_word": False}


def save(model: str | Path | PreTrainedModel, output: str | Path) -> None:
    """Write a folder of MarianMTModel.

    Args:
        model: a folder, an id on the Hub, or a model in memory, which stays as it is and has no
            tokenizer.
        output: the folder to write.

    Raises:
        ConversionError: MarianMTModel cannot compute what the model computes.
        FileExistsError: `output` exists already.
    """
    converted = to_marian(open_model(model))
    source, target = open_tokenizers(model)
    source, target = source and _without_package(source), target and _without_package(target)
    with new_folder(Path(output)) as folder:
        converted.save_pretrained(folder)
        save_tokenizers(folder, source, target)


convert = save


def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """Convert a model in memory, and leave it as it is.

    Raises:
        ConversionError: MarianMTModel cannot compute what the model computes.
    """
    refuse(_problems(model.config), "The model")
    require_float_weights(model)
    weights = _weights(model)
    converted = MarianMTModel(_marian_config(model.config))
    torch.nn.Module.to(converted, weights[HEAD].dtype)
    places = converted.state_dict()
    tensors = to_theirs(transformers_rules(), weights)
    if model.config.share_encoder_decoder_embeddings:
        tensors["model.shared.weight"] = tensors[SOURCE_TABLE]
    missing = places.keys() - tensors.keys()
    missing -= {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
    if missing or tensors.keys() - places.keys():
        raise ConversionError(
            f"The weights do not fit: {sorted(missing)} are missing, "
            f"{sorted(tensors.keys() - places.keys())} left over."
        )
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    converted.generation_config = _generation_config(model.generation_config)
    return converted.eval()


def _weights(model: VaswaniForConditionalGeneration) -> Tensors:
    """Copy our weights, with sinusoids in MarianMTModel's order and with all biases."""
    config = model.config
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if config.position_encoding == "sinusoidal":
        weights = permuted(weights, to_concatenated(config.d_model))
    if "lm_head.bias" not in weights:
        weights["lm_head.bias"] = weights[HEAD].new_zeros(len(weights[HEAD]))
    if not config.attention_bias:
        for name, matrix in list(weights.items()):
            if name.endswith("_proj.weight"):
                weights[name.replace(".weight", ".bias")] = matrix.new_zeros(len(matrix))
    return weights


def _marian_config(config: VaswaniConfig) -> MarianConfig:
    fields = {name: getattr(config, name) for name in SAME_FIELDS.split()}
    longest = config.max_position_embeddings
    return MarianConfig(
        vocab_size=config.vocab_size,
        decoder_vocab_size=config.decoder_vocab_size,
        **fields
        | {
            # MarianMTModel computes its positions once, as a table of this length.
            "max_position_embeddings": (
                2 * MAX_LENGTH if longest == NO_LONGEST_SEQUENCE else longest
            ),
            "init_std": config.init_std or config.d_model**-0.5,
            "forced_eos_token_id": None,
        },
    )


def _problems(config: VaswaniConfig) -> list[str]:
    """List the settings that MarianMTModel cannot follow."""
    problems = []
    pre_norm = config.norm_position == "pre"
    if pre_norm:
        problems.append("norm_position 'pre'")
    if pre_norm if config.final_layer_norm is None else config.final_layer_norm:
        problems.append("final_layer_norm")
    if config.position_encoding not in ("sinusoidal", "sinusoidal_concat"):
        problems.append(f"position_encoding {config.position_encoding!r}")
    if config.position_offset:
        problems.append(f"position_offset {config.position_offset}")
    if not math.isclose(config.layer_norm_eps, 1e-5):
        problems.append(f"layer_norm_eps {config.layer_norm_eps} (MarianMTModel has 1e-05)")
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        for name in ("d_k", "d_v"):
            width = getattr(config, name)
            if config.d_model % heads or width not in (None, config.d_model // heads):
                problems.append(f"{name} {width} with {heads} heads of the {side}")
    for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
        if getattr(config, name) is None:
            problems.append(f"{name} None")
    size = min(config.vocab_size, config.decoder_vocab_size or config.vocab_size)
    if config.pad_token_id is not None and config.pad_token_id >= size:
        problems.append(
            f"pad_token_id {config.pad_token_id} (source and target have the same one, and one of "
            f"them has only {size} entries)"
        )
    return list(dict.fromkeys(problems))


def _problems_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the settings of a tokenizer that PreTrainedTokenizerFast has no place for."""
    given = getattr(tokenizer, "init_kwargs", {})
    return [
        f"{name} {given[name]!r}"
        for name, default in _TOKENIZER_DEFAULTS.items()
        if given.get(name, default) != default
    ]


def _generation_config(given: GenerationConfig) -> GenerationConfig:
    """Keep the settings that transformers' search knows, and warn about the others."""
    values = {name: value for name, value in given.to_dict().items() if value is not None}
    for name in ("_from_model_config", "transformers_version"):
        values.pop(name, None)
    lost = []
    penalty = values.pop("length_penalty_type", "hf")
    alpha = values.get("length_penalty", 1.0)
    if penalty != "hf":
        lost.append(f"length_penalty_type {penalty!r} with length_penalty {alpha}")
    if penalty != "hf" or alpha == 1.0:
        values.pop("length_penalty", None)
    if values.get("early_stopping") is False:
        del values["early_stopping"]
    names = ("max_length_offset", "max_length_factor")
    limits = [f"{name} {value}" for name in names if (value := values.pop(name, 0))]
    if limits and "max_new_tokens" not in values:  # which replaces the other limits
        lost.append(f"{' and '.join(limits)} (max_length {MAX_LENGTH} instead)")
        values["max_length"] = MAX_LENGTH
    if values.get("num_beams", 1) == 1:
        # transformers refuses settings of a beam search without beams.
        lost += [
            f"{name} {values.pop(name)!r} without num_beams"
            for name in ("early_stopping", "length_penalty")
            if name in values
        ]
    if lost:
        logger.warning(f"MarianMTModel has no place for these settings: {', '.join(lost)}.")
    return GenerationConfig(**values)


def _without_package(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Put a tokenizer into transformers' own class, which loads without this package.

    Raises:
        ConversionError: the tokenizer has a setting that the class has not.
    """
    refuse(_problems_of_tokenizer(tokenizer), "The tokenizer")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=tokenizer.pad_token,
        unk_token=tokenizer.unk_token,
        eos_token=tokenizer.eos_token,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


__all__ = ["add_arguments", "convert", "save", "to_marian"]
