"""To torch.nn.Transformer: a state dict, and a description of the parts around it.

    vaswani convert to-torch runs/en-de out/

INPUT is the folder of a model of this package, or its id on the Hub. The output has two files.
model.pt is the state dict of a module with a `transformer`, two embeddings, a `generator`, and
learned positions if the model has them. description.yaml describes all other settings.
`new_transformer` makes an nn.Transformer of both. The nn.Transformer has bias=False if attention
has no biases and all other biases are zero. Tokenizers and search settings are left out, because
nn.Transformer has neither.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..corpora.atomic_folder import new_folder
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from .errors import refuse
from .loading import add_model_arguments, open_model, require_float_weights
from .rules import Tensors, to_theirs
from .torch_transformer import (
    ACTIVATIONS,
    HEAD,
    POSITIONS,
    SAME_FIELDS,
    SOURCE,
    TARGET,
    Description,
    torch_rules,
)

logger = logging.get_logger(__name__)

add_arguments = add_model_arguments


def save(model: str | Path | PreTrainedModel, output: str | Path) -> None:
    """Write a folder with model.pt and description.yaml.

    Args:
        model: a folder, an id on the Hub, or a model in memory, which stays as it is.
        output: the folder to write.

    Raises:
        ConversionError: nn.Transformer cannot compute what the model computes.
        FileExistsError: `output` exists already.
    """
    tensors, about = to_torch(open_model(model))
    with new_folder(Path(output)) as folder:
        try:
            torch.save(tensors, folder / "model.pt")
        except RuntimeError as error:  # torch raises it for a full disk
            raise OSError(f"model.pt cannot be written; is the disk full? {error}") from error
        # JSON is valid YAML, and needs no package to write.
        text = json.dumps(asdict(about), indent=2)
        (folder / "description.yaml").write_text(text + "\n", encoding="utf-8")


convert = save


def to_torch(model: VaswaniForConditionalGeneration) -> tuple[Tensors, Description]:
    """Convert a model in memory, and leave it as it is.

    Returns:
        A state dict and its description. The names of nn.Transformer start with "transformer.". It
        has bias=False if there is no "transformer.encoder.layers.0.linear1.bias".

    Raises:
        ConversionError: nn.Transformer cannot compute what the model computes.
    """
    config = model.config
    refuse(_problems(config), "The model")
    require_float_weights(model)
    for name in ("attention_dropout", "activation_dropout"):
        if getattr(config, name) != config.dropout:
            logger.warning(
                f"{name} {getattr(config, name)} becomes {config.dropout}: nn.Transformer has one "
                "dropout."
            )
    weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    outside = {
        "src_embedding.weight": weights.pop(SOURCE),
        "tgt_embedding.weight": weights.pop(TARGET),
        "generator.weight": weights.pop(HEAD),
    }
    if "lm_head.bias" in weights:
        outside["generator.bias"] = weights.pop("lm_head.bias")
    learned = config.position_encoding == "learned"
    if learned:
        outside["src_positions.weight"] = weights.pop(POSITIONS["encoder"])
        outside["tgt_positions.weight"] = weights.pop(POSITIONS["decoder"])
    if not config.attention_bias:
        weights = _with_all_biases_or_none(weights)
    inside = to_theirs(torch_rules(), weights)
    about = Description(
        nhead=config.encoder_attention_heads,
        source_embedding="src_embedding.weight",
        target_embedding="tgt_embedding.weight",
        generator="generator.weight",
        generator_bias="generator.bias" if "generator.bias" in outside else None,
        source_positions="src_positions.weight" if learned else None,
        target_positions="tgt_positions.weight" if learned else None,
        prefix="transformer.",
        activation=config.activation_function,
        norm_first=config.norm_position == "pre",
        **{name: getattr(config, name) for name in SAME_FIELDS.split()},
    )
    return outside | {f"transformer.{name}": tensor for name, tensor in inside.items()}, about


def _with_all_biases_or_none(weights: Tensors) -> Tensors:
    """Remove the biases if all are zero, or else add zeros where they are missing.

    nn.Transformer has all biases or none.
    """
    biases = [name for name in weights if name.endswith(".bias")]
    if not any(weights[name].any() for name in biases):
        return {name: tensor for name, tensor in weights.items() if name not in biases}
    added = {
        name.removesuffix("weight") + "bias": matrix.new_zeros(len(matrix))
        for name, matrix in weights.items()
        if name.endswith("_proj.weight")
    }
    return weights | added


def _problems(config: VaswaniConfig) -> list[str]:
    """List the settings that nn.Transformer cannot follow."""
    problems = []
    if config.activation_function not in ACTIVATIONS:
        problems.append(f"activation_function {config.activation_function!r}")
    heads = {config.encoder_attention_heads, config.decoder_attention_heads}
    if len(heads) > 1:
        problems.append(
            f"encoder_attention_heads {config.encoder_attention_heads}, decoder_attention_heads "
            f"{config.decoder_attention_heads} (one nhead)"
        )
    if config.encoder_ffn_dim != config.decoder_ffn_dim:
        problems.append(
            f"encoder_ffn_dim {config.encoder_ffn_dim}, decoder_ffn_dim {config.decoder_ffn_dim} "
            "(one dim_feedforward)"
        )
    own = config.d_model / max(heads)
    problems += [
        f"{name} {getattr(config, name)} (d_model / nhead is {own:g})"
        for name in ("d_k", "d_v")
        if getattr(config, name) not in (None, own)
    ]
    return problems


def new_transformer(tensors: Tensors, about: Description) -> nn.Transformer:
    """Make the nn.Transformer of a state dict and its description, with batch_first=True."""
    start = about.prefix
    inside = {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith((f"{start}encoder.", f"{start}decoder."))
    }

    def layers(stack: str) -> int:
        return sum(name.startswith(f"{stack}.layers.") for name in inside if "norm1.w" in name)

    inner = inside["encoder.layers.0.linear1.weight"]
    transformer = nn.Transformer(
        d_model=inner.shape[1],
        nhead=about.nhead,
        num_encoder_layers=layers("encoder"),
        num_decoder_layers=layers("decoder"),
        dim_feedforward=inner.shape[0],
        dropout=about.dropout,
        activation=about.activation,
        layer_norm_eps=about.layer_norm_eps,
        batch_first=True,
        norm_first=about.norm_first,
        bias="encoder.layers.0.linear1.bias" in inside,
        dtype=inner.dtype,
    )
    if "encoder.norm.weight" not in inside:
        transformer.encoder.norm = transformer.decoder.norm = None
    transformer.load_state_dict(inside)
    return transformer.eval()


__all__ = ["add_arguments", "convert", "new_transformer", "save", "to_torch"]
