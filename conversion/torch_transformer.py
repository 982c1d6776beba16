"""From and to torch.nn.Transformer: a state dict, and a description of what lies around it.

    python -m vaswani.conversion torch model.pt out/ --description model.yaml
    python -m vaswani.conversion to-torch runs/en-de out/

nn.Transformer has neither embeddings nor positions nor a map to the vocabulary, and its state dict
does not say how many heads it has. The description does, as YAML or JSON; for the model of
PyTorch's translation tutorial:

    nhead: 8
    prefix: transformer.
    source_embedding: src_tok_emb.embedding.weight
    target_embedding: tgt_tok_emb.embedding.weight
    generator: generator.weight
    generator_bias: generator.bias
    source_positions: positional_encoding.pos_embedding
    target_positions: positional_encoding.pos_embedding
    position_encoding: sinusoidal
    pad_token_id: 1
    decoder_start_token_id: 2
    eos_token_id: 3

Only `nhead`, the two embeddings and the generator have no default. Tensors that are equal, or one
by name, are tied. The arguments of nn.Transformer have its own names and defaults: `activation`,
`norm_first`, `layer_norm_eps`, `dropout`. The rest are fields of VaswaniConfig: `scale_embedding`,
`position_encoding`, `position_offset`, `label_smoothing` and the token ids. A table of positions
among the tensors is named by `source_positions` and `target_positions`: that of "learned" positions
is taken over, that of sinusoids is checked. `ignore` lists tensors that the model does not need.

Out come `model.pt`, the state dict of an nn.Module with a `transformer`, two embeddings, a
`generator` and learned positions, and `description.yaml`, which says so; `new_transformer` makes
an nn.Transformer of them. Where no bias differs from zero, it has bias=False. Neither way carries
tokenizers or how to search: nn.Transformer knows neither.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.modeling_vaswani import SinusoidalPositions
from .checkpoints import (
    Converted,
    add_model_arguments,
    build_model,
    new_folder,
    open_model,
    read_checkpoint,
    refuse,
)
from .files import holds_tensors, parse_yaml, read_text
from .rules import ConversionError, Rename, Rule, Stack, Tensors, to_ours, to_theirs

logger = logging.get_logger(__name__)

_SOURCE, _TARGET, _HEAD = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
_POSITIONS = {stack: f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
# nn.Transformer's two functions, both written as transformers does.
_ACTIVATIONS = ("relu", "gelu")
# Fields of the description that are VaswaniConfig's by the same name.
_SAME_FIELDS = """
layer_norm_eps dropout label_smoothing scale_embedding position_encoding position_offset
pad_token_id unk_token_id bos_token_id eos_token_id decoder_start_token_id
"""
# Fields that name tensors outside of nn.Transformer.
_PLACES = (
    "source_embedding",
    "target_embedding",
    "generator",
    "generator_bias",
    "source_positions",
    "target_positions",
)


@dataclass
class Description:
    """What a state dict of nn.Transformer does not say; see the module.

    Raises:
        TypeError: a field has no default and is missing, or there is no such field.
    """

    nhead: int
    source_embedding: str
    target_embedding: str
    generator: str
    generator_bias: str | None = None
    source_positions: str | None = None
    target_positions: str | None = None
    prefix: str = ""
    activation: str = "relu"
    norm_first: bool = False
    layer_norm_eps: float = 1e-5
    dropout: float = 0.1
    label_smoothing: float = 0.0
    scale_embedding: bool = True
    position_encoding: str = "sinusoidal"
    position_offset: int = 0
    pad_token_id: int | None = 0
    unk_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    ignore: list[str] = field(default_factory=list)


def _rules() -> list[Rule]:
    """nn.Transformer's names; the order of the parts of in_proj is that of its own forward."""
    there, here = "{stack}.layers.{i}", "model.{stack}.layers.{i}"
    rules: list[Rule] = []
    for theirs, ours in (("self_attn", "self_attn"), ("multihead_attn", "encoder_attn")):
        projections = [f"{here}.{ours}.{x}_proj.{{kind}}" for x in "qkv"]
        rules.append(Stack(f"{there}.{theirs}.in_proj_{{kind}}", projections))
        rules.append(
            Rename(f"{there}.{theirs}.out_proj.{{kind}}", f"{here}.{ours}.out_proj.{{kind}}")
        )
    rules += [
        Rename(f"{there}.linear{number}.{{kind}}", f"{here}.fc{number}.{{kind}}")
        for number in (1, 2)
    ]
    rules += [
        Rename(
            f"{stack}.layers.{{i}}.norm{number}.{{kind}}",
            f"model.{stack}.layers.{{i}}.{norm}_layer_norm.{{kind}}",
        )
        for stack, norms in (
            ("encoder", ("self_attn", "final")),
            ("decoder", ("self_attn", "encoder_attn", "final")),
        )
        for number, norm in enumerate(norms, start=1)
    ]
    return [*rules, Rename("{stack}.norm.{kind}", "model.{stack}.layer_norm.{kind}")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `convert` but for the output."""
    parser.add_argument("checkpoint", metavar="INPUT", help="state dict, by torch.save")
    parser.add_argument(
        "--description", required=True, help="YAML or JSON file, as described above"
    )


def convert(
    checkpoint: str | Path | Mapping[str, torch.Tensor],
    output: str | Path,
    description: str | Path | Mapping[str, Any] | Description,
) -> None:
    """Write a folder that `from_pretrained` reads; for the arguments see `load`.

    Raises:
        ConversionError: the model cannot be converted exactly.
        FileExistsError: something is at `output` already.
    """
    load(checkpoint, description).save(Path(output))


def load(
    checkpoint: str | Path | Mapping[str, torch.Tensor],
    description: str | Path | Mapping[str, Any] | Description,
) -> Converted:
    """Convert a state dict in memory.

    Args:
        checkpoint: a state dict, or the file that holds it.
        description: what it does not say: a Description, its fields, or a file of them.

    Raises:
        ConversionError: the model cannot be converted exactly; names all reasons.
    """
    about = _described(description)
    tensors = _state_dict(checkpoint)
    refuse(_problems(about, tensors), "The model")
    outside, tensors = _taken_apart(about, tensors)
    tensors = to_ours(_rules(), tensors)
    config = _config(about, outside, tensors)
    _check_tables(about, outside, config)
    tensors |= _outside_as_ours(about, outside, config)
    tensors |= _missing_biases(tensors, config)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    model = build_model(config, tensors)
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtypes.pop())
    return Converted(model)


def _described(description: str | Path | Mapping[str, Any] | Description) -> Description:
    if isinstance(description, Description):
        return description
    given: Any = description
    if not isinstance(description, Mapping):
        given = _read(Path(description))
    known = {one.name: one for one in fields(Description)}
    problems = [f"{name} is no field of it" for name in given if name not in known]
    needed = ("nhead", "source_embedding", "target_embedding", "generator")
    problems += [f"{name} is missing" for name in needed if name not in given]
    texts: dict[str, Any] = {name: one.type for name, one in known.items()}
    problems += [
        f"{name} {given[name]!r} is no text"
        for name, kind in texts.items()
        if kind in (str, str | None) and not isinstance(given.get(name, ""), kind)
    ]
    if not isinstance(given.get("ignore", []), list):
        problems.append(f"ignore {given['ignore']!r} is no list")
    if problems:
        raise ConversionError(
            f"The description cannot be used: {'; '.join(problems)}. It has {', '.join(known)}."
        )
    return Description(**given)


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = parse_yaml(text, str(path))
    if not isinstance(found, dict):
        raise ConversionError(f"{path} does not hold fields of a description.")
    return found


def _state_dict(given: str | Path | Mapping[str, torch.Tensor]) -> Tensors:
    place, loaded = "The state dict", given
    if not isinstance(given, Mapping):
        place, loaded = str(given), read_checkpoint(Path(given))
    if not holds_tensors(loaded):
        raise ConversionError(
            f"{place} is not a dict of tensors: save module.state_dict(), not what holds it."
        )
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _places(about: Description) -> dict[str, str]:
    """Which tensors lie outside nn.Transformer, by the field that names them."""
    names = {field_name: getattr(about, field_name) for field_name in _PLACES}
    return {field_name: name for field_name, name in names.items() if name is not None}


def _problems(about: Description, tensors: Tensors) -> list[str]:
    """What this model does not have, and what the description and the tensors do not agree on."""
    problems = []
    if about.activation not in _ACTIVATIONS:
        problems.append(f"activation {about.activation!r} (nn.Transformer has relu and gelu)")
    kinds = ("sinusoidal", "sinusoidal_concat", "sinusoidal_t2t", "learned")
    if about.position_encoding not in kinds:
        problems.append(f"position_encoding {about.position_encoding!r} (not {', '.join(kinds)})")
    elif about.position_encoding == "learned":
        problems += [
            f"{name} None (learned positions need their table)"
            for name in ("source_positions", "target_positions")
            if getattr(about, name) is None
        ]
    for field_name, name in _places(about).items():
        if name not in tensors:
            problems.append(f"{field_name} {name!r} (there is no such tensor)")
    problems += [
        f"ignore {name!r} (there is no such tensor)" for name in set(about.ignore) - {*tensors}
    ]
    norms = [
        name
        for name in ("encoder.norm.weight", "decoder.norm.weight")
        if about.prefix + name in tensors
    ]
    if len(norms) == 1:
        problems.append(f"{norms[0]} alone (both stacks end with a LayerNorm, or none)")
    for name in {about.source_embedding, about.target_embedding, about.generator} & {*tensors}:
        if tensors[name].dim() != 2:
            problems.append(f"{name} with the shape {tuple(tensors[name].shape)} (no matrix)")
    if not isinstance(about.nhead, int) or about.nhead < 1:
        problems.append(f"nhead {about.nhead!r}")
    source = tensors.get(about.source_embedding)
    if not problems and source is not None:
        width = source.shape[1]
        if width % about.nhead:
            problems.append(f"nhead {about.nhead} (d_model is {width})")
        if width % 2 and about.position_encoding != "learned":
            problems.append(f"d_model {width} (odd, with {about.position_encoding} positions)")
    return problems


def _taken_apart(about: Description, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What lies outside nn.Transformer, by field, and what lies in it, without the prefix.

    Raises:
        ConversionError: tensors are in neither; names all.
    """
    places = _places(about)
    outside = {field_name: tensors[name] for field_name, name in places.items()}
    aside = {*places.values(), *about.ignore}
    rest = {name: tensor for name, tensor in tensors.items() if name not in aside}
    strangers = sorted(name for name in rest if not name.startswith(about.prefix))
    if strangers:
        raise ConversionError(
            f"No rule knows {len(strangers)} of {len(tensors)} tensors: {', '.join(strangers)}. "
            "A description can name them, or say `ignore`."
        )
    return outside, {name.removeprefix(about.prefix): tensor for name, tensor in rest.items()}


def _config(about: Description, outside: Tensors, tensors: Tensors) -> VaswaniConfig:
    """Read the sizes off the tensors.

    Raises:
        ConversionError: a stack has no layers, or a field of the description has no such values.
    """

    def layers(stack: str) -> int:
        start = f"model.{stack}.layers."
        found = {int(n.removeprefix(start).split(".")[0]) for n in tensors if n.startswith(start)}
        if not found:
            raise ConversionError(f"There is no {about.prefix}{stack}.layers.0 among the tensors.")
        return max(found) + 1

    def inner(stack: str) -> int:
        name = f"model.{stack}.layers.0.fc1.weight"
        if name not in tensors:
            raise ConversionError(f"There is no {about.prefix}{stack}.layers.0.linear1.weight.")
        return len(tensors[name])

    source, target = outside["source_embedding"], outside["target_embedding"]
    one_table = torch.equal(source, target)
    tie = torch.equal(target, outside["generator"])
    learned = about.position_encoding == "learned"
    positions = (
        [len(_flat(outside[f"{side}_positions"])) for side in ("source", "target")]
        if learned
        else []
    )
    if len(set(positions)) > 1:
        raise ConversionError(
            f"The tables of positions have {positions[0]} and {positions[1]} rows: source and "
            "target have to have one length."
        )
    settings: dict[str, Any] = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "d_model": source.shape[1],
        "encoder_layers": layers("encoder"),
        "decoder_layers": layers("decoder"),
        "encoder_attention_heads": about.nhead,
        "decoder_attention_heads": about.nhead,
        "encoder_ffn_dim": inner("encoder"),
        "decoder_ffn_dim": inner("decoder"),
        "attention_dropout": about.dropout,
        "activation_dropout": about.dropout,
        "activation_function": about.activation,
        "norm_position": "pre" if about.norm_first else "post",
        "final_layer_norm": "model.encoder.layer_norm.weight" in tensors,
        "max_position_embeddings": positions[0] - about.position_offset if learned else None,
        "attention_bias": any(name.endswith("q_proj.bias") for name in tensors),
        "lm_head_bias": "generator_bias" in outside,
        "share_encoder_decoder_embeddings": one_table,
        "tie_word_embeddings": tie,
    }
    settings |= {name: getattr(about, name) for name in _SAME_FIELDS.split()}
    try:
        # PyYAML reads 1e-5 as a string.
        settings["layer_norm_eps"] = float(about.layer_norm_eps)
        return VaswaniConfig(**settings)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConversionError(
            f"The description cannot be used: {error.__cause__ or error}"
        ) from error


def _flat(table: torch.Tensor) -> torch.Tensor:
    """A table of positions as (T, D): some modules keep a dimension of 1 for the batch."""
    if table.dim() == 3 and 1 in table.shape[:2]:
        return table.squeeze(0 if table.shape[0] == 1 else 1)
    return table


def _check_tables(about: Description, outside: Tensors, config: VaswaniConfig) -> None:
    """Refuse a table of sinusoids that is not the one the description says.

    Raises:
        ConversionError: it differs from that by more than rounding.
    """
    if config.position_encoding == "learned":
        return
    for side in ("source", "target"):
        name = f"{side}_positions"
        if name not in outside:
            continue
        table = _flat(outside[name])
        # The table of the whole module: a row for position 0 even where sentences start later.
        start = -config.position_offset
        expected = SinusoidalPositions(config)(start, len(table), table.device)
        tolerance = max(1e-6 * len(table), 1e-5)
        if table.element_size() < 4:
            tolerance = 1e-2
        if table.shape != expected.shape or not torch.allclose(
            table.double(), expected.double(), rtol=0, atol=tolerance
        ):
            raise ConversionError(
                f"{getattr(about, name)} is not the table of {config.position_encoding} positions: "
                "name another position_encoding, or learned."
            )


def _outside_as_ours(about: Description, outside: Tensors, config: VaswaniConfig) -> Tensors:
    named = {
        _SOURCE: outside["source_embedding"],
        _TARGET: outside["target_embedding"],
        _HEAD: outside["generator"],
    }
    if "generator_bias" in outside:
        named["lm_head.bias"] = outside["generator_bias"]
    if config.position_encoding == "learned":
        for side, stack in (("source", "encoder"), ("target", "decoder")):
            named[_POSITIONS[stack]] = _flat(outside[f"{side}_positions"])
    return named


def _missing_biases(tensors: Tensors, config: VaswaniConfig) -> Tensors:
    """Zeros for the biases that nn.Transformer(bias=False) lacks and this model always has.

    Raises:
        ConversionError: some have biases, some have not.
    """
    lacking = {
        name.removesuffix("weight") + "bias": matrix
        for name, matrix in tensors.items()
        if name.endswith(".weight")
        and any(part in name for part in (".fc1.", ".fc2.", "layer_norm."))
        and name.removesuffix("weight") + "bias" not in tensors
    }
    if not lacking:
        return {}
    if config.attention_bias or any(name.endswith((".fc1.bias", ".fc2.bias")) for name in tensors):
        raise ConversionError(f"The weights do not fit: {', '.join(sorted(lacking))} are missing.")
    return {name: matrix.new_zeros(len(matrix)) for name, matrix in lacking.items()}


# From us to torch.nn.Transformer


add_save_arguments = add_model_arguments


def save(model: str | Path | PreTrainedModel, output: str | Path) -> None:
    """Write model.pt and description.yaml into a folder; a model in memory stays as it is.

    Raises:
        ConversionError: nn.Transformer cannot compute what the model does; names all reasons.
        FileExistsError: something is at `output` already.
    """
    tensors, about = to_torch(open_model(model))
    with new_folder(Path(output)) as folder:
        try:
            torch.save(tensors, folder / "model.pt")
        except RuntimeError as error:  # so torch reports a full disk
            raise OSError(f"model.pt cannot be written; is the disk full? {error}") from error
        # JSON is YAML too, and needs no package to write.
        text = json.dumps(asdict(about), indent=2)
        (folder / "description.yaml").write_text(text + "\n", encoding="utf-8")


def to_torch(model: PreTrainedModel) -> tuple[Tensors, Description]:
    """Convert a model in memory; it stays as it is.

    Returns a state dict, in which "transformer." is that of nn.Transformer(..., bias=False if there
    is no "transformer.encoder.layers.0.linear1.bias"), and its description.

    Raises:
        ConversionError: nn.Transformer cannot compute what the model does; names all reasons.
    """
    ours: Any = model.config
    refuse(_problems_for_torch(ours), "The model")
    for name in ("attention_dropout", "activation_dropout"):
        if getattr(ours, name) != ours.dropout:
            logger.warning(f"{name} {getattr(ours, name)} becomes dropout {ours.dropout} there.")
    weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    outside = {
        "src_embedding.weight": weights.pop(_SOURCE),
        "tgt_embedding.weight": weights.pop(_TARGET),
        "generator.weight": weights.pop(_HEAD),
    }
    if "lm_head.bias" in weights:
        outside["generator.bias"] = weights.pop("lm_head.bias")
    learned = ours.position_encoding == "learned"
    if learned:
        outside["src_positions.weight"] = weights.pop(_POSITIONS["encoder"])
        outside["tgt_positions.weight"] = weights.pop(_POSITIONS["decoder"])
    if not ours.attention_bias:
        weights = _with_one_kind_of_bias(weights)
    inside = to_theirs(_rules(), weights)
    about = Description(
        nhead=ours.encoder_attention_heads,
        source_embedding="src_embedding.weight",
        target_embedding="tgt_embedding.weight",
        generator="generator.weight",
        generator_bias="generator.bias" if "generator.bias" in outside else None,
        source_positions="src_positions.weight" if learned else None,
        target_positions="tgt_positions.weight" if learned else None,
        prefix="transformer.",
        activation=ours.activation_function,
        norm_first=ours.norm_position == "pre",
        **{name: getattr(ours, name) for name in _SAME_FIELDS.split()},
    )
    return outside | {f"transformer.{name}": tensor for name, tensor in inside.items()}, about


def new_transformer(tensors: Tensors, about: Description) -> nn.Transformer:
    """Make the nn.Transformer of a state dict and its description; batches come first in it."""
    start = about.prefix
    inside = {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith((f"{start}encoder.", f"{start}decoder."))
    }

    def layers(stack: str) -> int:
        return sum(name.startswith(f"{stack}.layers.") for name in inside if "norm1.w" in name)

    first = inside["encoder.layers.0.linear1.weight"]
    transformer = nn.Transformer(
        d_model=first.shape[1],
        nhead=about.nhead,
        num_encoder_layers=layers("encoder"),
        num_decoder_layers=layers("decoder"),
        dim_feedforward=first.shape[0],
        dropout=about.dropout,
        activation=about.activation,
        layer_norm_eps=about.layer_norm_eps,
        batch_first=True,
        norm_first=about.norm_first,
        bias="encoder.layers.0.linear1.bias" in inside,
        dtype=first.dtype,
    )
    if "encoder.norm.weight" not in inside:
        transformer.encoder.norm = transformer.decoder.norm = None
    transformer.load_state_dict(inside)
    return transformer.eval()


def _with_one_kind_of_bias(weights: Tensors) -> Tensors:
    """nn.Transformer has all biases or none: leave zeros out everywhere, or else fill them in."""
    biases = [name for name in weights if name.endswith(".bias")]
    if not any(weights[name].any() for name in biases):
        return {name: tensor for name, tensor in weights.items() if name not in biases}
    added = {
        name.removesuffix("weight") + "bias": matrix.new_zeros(len(matrix))
        for name, matrix in weights.items()
        if name.endswith("_proj.weight")
    }
    return weights | added


def _problems_for_torch(config: Any) -> list[str]:
    """What nn.Transformer does not compute."""
    problems = []
    if config.activation_function not in _ACTIVATIONS:
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


__all__ = [
    "Description",
    "add_arguments",
    "add_save_arguments",
    "convert",
    "load",
    "new_transformer",
    "save",
    "to_torch",
]
