"""From torch.nn.Transformer: a state dict, and a description of the parts around it.

    vaswani convert torch model.pt out/ --description model.yaml

nn.Transformer has no embeddings, no positions and no output projection, and its state dict does not
tell the number of heads. The description does, in YAML or JSON. For the model of PyTorch's
translation tutorial:

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

`nhead`, the two embeddings and the generator are required. All other fields have defaults:

* Arguments of nn.Transformer have its names and defaults: `activation`, `norm_first`,
  `layer_norm_eps`, `dropout`.
* Fields of VaswaniConfig have its names: `scale_embedding`, `position_encoding`, `position_offset`,
  `label_smoothing`, and the token ids.
* `source_positions` and `target_positions` name tables of positions among the tensors. Tables of
  "learned" positions are carried over. Tables of sinusoids are checked.
* `ignore` lists tensors that the model does not need.

Embeddings and generator are tied if they are the same tensor or have equal values. nn.Transformer
has no tokenizer and no search, so none is carried over.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.positions_vaswani import SinusoidalPositions
from .errors import ConversionError, refuse, refusing
from .loading import Converted, build_model
from .reading import is_state_dict, parse_yaml, read_checkpoint, read_text
from .rules import Rename, Rule, Stack, Tensors, to_ours

SOURCE, TARGET, HEAD = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
POSITIONS = {stack: f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
# The two functions that nn.Transformer knows by name.
ACTIVATIONS = ("relu", "gelu")
# Fields of the description that VaswaniConfig has under the same name.
SAME_FIELDS = """
layer_norm_eps dropout label_smoothing scale_embedding position_encoding position_offset
pad_token_id unk_token_id bos_token_id eos_token_id decoder_start_token_id
"""
# Fields of the description that name tensors outside nn.Transformer.
_OUTSIDE = (
    "source_embedding",
    "target_embedding",
    "generator",
    "generator_bias",
    "source_positions",
    "target_positions",
)


@dataclass
class Description:
    """Facts that a state dict of nn.Transformer lacks. The module explains the fields.

    Raises:
        TypeError: a required field is missing, or there is no such field.
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


def torch_rules() -> list[Rule]:
    """Pair nn.Transformer's names with ours. Its in_proj holds query, key and value, in order."""
    their_layer, our_layer = "{stack}.layers.{i}", "model.{stack}.layers.{i}"
    rules: list[Rule] = []
    for theirs, ours in (("self_attn", "self_attn"), ("multihead_attn", "encoder_attn")):
        projections = [f"{our_layer}.{ours}.{part}_proj.{{kind}}" for part in "qkv"]
        rules.append(Stack(f"{their_layer}.{theirs}.in_proj_{{kind}}", projections))
        rules.append(
            Rename(
                f"{their_layer}.{theirs}.out_proj.{{kind}}", f"{our_layer}.{ours}.out_proj.{{kind}}"
            )
        )
    rules += [
        Rename(f"{their_layer}.linear{number}.{{kind}}", f"{our_layer}.fc{number}.{{kind}}")
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
    """Declare the arguments of `convert`, all but the output."""
    parser.add_argument("checkpoint", metavar="INPUT", help="state dict, saved by torch.save")
    parser.add_argument(
        "--description",
        metavar="FILE",
        required=True,
        help="YAML or JSON file of the fields described above",
    )


def convert(
    checkpoint: str | Path | Mapping[str, torch.Tensor],
    output: str | Path,
    description: str | Path | Mapping[str, Any] | Description,
) -> None:
    """Write a folder for `from_pretrained`; the arguments are those of `load`.

    Raises:
        ConversionError: the model cannot be converted exactly.
        FileExistsError: `output` exists already.
    """
    load(checkpoint, description).save(Path(output))


def load(
    checkpoint: str | Path | Mapping[str, torch.Tensor],
    description: str | Path | Mapping[str, Any] | Description,
) -> Converted:
    """Convert a state dict in memory.

    Args:
        checkpoint: a state dict, or the file that holds it.
        description: a Description, a mapping of its fields, or a file with them.

    Raises:
        ConversionError: the model cannot be converted exactly.
    """
    about = _read_description(description)
    tensors = _read_state_dict(checkpoint)
    refuse(_problems(about, tensors), "The model")
    outside, inside = _split(about, tensors)
    inside = to_ours(torch_rules(), inside)
    config = _config(about, outside, inside)
    _check_sinusoids(about, outside, config)
    tensors = inside | _renamed(outside, config) | _missing_biases(inside, config)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    model = build_model(config, tensors)
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtypes.pop())
    return Converted(model)


def _read_description(description: str | Path | Mapping[str, Any] | Description) -> Description:
    """Make a Description of its fields.

    Raises:
        ConversionError: fields are missing, unknown or of the wrong type.
    """
    if isinstance(description, Description):
        return description
    given = description
    if not isinstance(given, Mapping):
        given = _read_fields(Path(given))
    kinds = {one.name: one.type for one in fields(Description)}
    problems = [f"there is no field {name}" for name in given if name not in kinds]
    required = ("nhead", "source_embedding", "target_embedding", "generator")
    problems += [f"{name} is missing" for name in required if name not in given]
    problems += [
        f"{name} {value!r} is not a string"
        for name, value in given.items()
        if kinds.get(name) in (str, str | None)
        and not (isinstance(value, str) or (value is None and kinds[name] is not str))
    ]
    if not isinstance(given.get("norm_first", False), bool):
        problems.append(f"norm_first {given['norm_first']!r} is neither true nor false")
    if not isinstance(given.get("ignore", []), list):
        problems.append(f"ignore {given['ignore']!r} is not a list")
    if problems:
        raise ConversionError(
            f"The description cannot be used: {'; '.join(problems)}. Its fields are "
            f"{', '.join(kinds)}."
        )
    return Description(**given)


def _read_fields(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = parse_yaml(text, str(path))
    if not isinstance(found, dict):
        raise ConversionError(f"{path} does not hold fields of a description.")
    return found


def _read_state_dict(given: str | Path | Mapping[str, torch.Tensor]) -> Tensors:
    place = "The state dict"
    loaded: Any = given
    if not isinstance(given, Mapping):
        place, loaded = str(given), read_checkpoint(Path(given))
    if isinstance(loaded, Mapping) and not is_state_dict(loaded):
        # Checkpoints of training loops hold the state dict beside other states.
        inside = [name for name, part in loaded.items() if is_state_dict(part) and part]
        if len(inside) > 1:
            raise ConversionError(
                f"{place} holds several dicts of tensors, under {', '.join(map(repr, inside))}: "
                "save the one of the model alone."
            )
        loaded = loaded[inside[0]] if inside else loaded
    if not is_state_dict(loaded):
        raise ConversionError(
            f"{place} is not a dict of tensors: save module.state_dict(), not the module."
        )
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _outside_names(about: Description) -> dict[str, str]:
    """Name the tensors outside nn.Transformer, by their fields in the description."""
    names = {field_name: getattr(about, field_name) for field_name in _OUTSIDE}
    return {field_name: name for field_name, name in names.items() if name is not None}


def _problems(about: Description, tensors: Tensors) -> list[str]:
    """List what this model does not have, and where description and tensors disagree."""
    problems = []
    if about.activation not in ACTIVATIONS:
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
    for field_name, name in _outside_names(about).items():
        if name not in tensors:
            similar = sorted(known for known in tensors if known.endswith(f".{name}"))
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            problems.append(f"{field_name} {name!r} (there is no such tensor{hint})")
    problems += [
        f"ignore {name!r} (there is no such tensor)" for name in set(about.ignore) - {*tensors}
    ]
    norms = [
        name
        for name in ("encoder.norm.weight", "decoder.norm.weight")
        if about.prefix + name in tensors
    ]
    if len(norms) == 1:
        problems.append(f"only {norms[0]} (a LayerNorm ends both stacks or none)")
    for name in {about.source_embedding, about.target_embedding, about.generator} & {*tensors}:
        if tensors[name].dim() != 2:
            problems.append(f"{name} with the shape {tuple(tensors[name].shape)} (not a matrix)")
    if not isinstance(about.nhead, int) or about.nhead < 1:
        problems.append(f"nhead {about.nhead!r}")
    source = tensors.get(about.source_embedding)
    if not problems and source is not None:
        width = source.shape[1]
        if width % about.nhead:
            problems.append(f"nhead {about.nhead} (d_model is {width})")
        if width % 2 and about.position_encoding != "learned":
            problems.append(f"d_model {width} (odd, with {about.position_encoding} positions)")
        problems += _problems_of_ids(about, len(source), len(tensors[about.target_embedding]))
    return problems


def _problems_of_ids(about: Description, source: int, target: int) -> list[str]:
    """List the special tokens without an embedding, for numbers of entries on both sides."""
    problems = []
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"):
        entries = min(source, target) if name == "pad_token_id" else target
        given = getattr(about, name)
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if any(not isinstance(token, int) or not 0 <= token < entries for token in ids):
            problems.append(f"{name} {given} (an embedding has {entries} entries)")
    return problems


def _split(about: Description, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Split the tensors into those outside nn.Transformer, by field, and those inside.

    Raises:
        ConversionError: tensors are neither outside nor inside.
    """
    names = _outside_names(about)
    outside = {field_name: tensors[name] for field_name, name in names.items()}
    aside = {*names.values(), *about.ignore}
    inside = {name: tensor for name, tensor in tensors.items() if name not in aside}
    unknown_names = sorted(name for name in inside if not name.startswith(about.prefix))
    if unknown_names:
        raise ConversionError(
            f"No rule knows {len(unknown_names)} of {len(tensors)} tensors: "
            f"{', '.join(unknown_names)}. The description can name them, or list them under "
            "`ignore`."
        )
    return outside, {name.removeprefix(about.prefix): tensor for name, tensor in inside.items()}


def _config(about: Description, outside: Tensors, inside: Tensors) -> VaswaniConfig:
    """Make the configuration; the tensors tell the sizes.

    Raises:
        ConversionError: a stack has no layers, or a field of the description has a wrong value.
    """
    source, target = outside["source_embedding"], outside["target_embedding"]
    settings: dict[str, Any] = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "d_model": source.shape[1],
        "encoder_layers": _layers(about, inside, "encoder"),
        "decoder_layers": _layers(about, inside, "decoder"),
        "encoder_attention_heads": about.nhead,
        "decoder_attention_heads": about.nhead,
        "encoder_ffn_dim": _inner_width(about, inside, "encoder"),
        "decoder_ffn_dim": _inner_width(about, inside, "decoder"),
        "attention_dropout": about.dropout,
        "activation_dropout": about.dropout,
        "activation_function": about.activation,
        "norm_position": "pre" if about.norm_first else "post",
        "final_layer_norm": "model.encoder.layer_norm.weight" in inside,
        "max_position_embeddings": _longest(about, outside),
        "attention_bias": any(name.endswith("q_proj.bias") for name in inside),
        "lm_head_bias": "generator_bias" in outside,
        "share_encoder_decoder_embeddings": torch.equal(source, target),
        "tie_word_embeddings": torch.equal(target, outside["generator"]),
    }
    settings |= {name: getattr(about, name) for name in SAME_FIELDS.split()}
    with refusing("The description cannot be used"):
        # PyYAML reads 1e-5 as a string.
        settings["layer_norm_eps"] = float(about.layer_norm_eps)
        return VaswaniConfig(**settings)


def _layers(about: Description, inside: Tensors, stack: str) -> int:
    start = f"model.{stack}.layers."
    found = {int(n.removeprefix(start).split(".")[0]) for n in inside if n.startswith(start)}
    if not found:
        raise ConversionError(f"There is no {about.prefix}{stack}.layers.0 among the tensors.")
    return max(found) + 1


def _inner_width(about: Description, inside: Tensors, stack: str) -> int:
    name = f"model.{stack}.layers.0.fc1.weight"
    if name not in inside:
        raise ConversionError(f"There is no {about.prefix}{stack}.layers.0.linear1.weight.")
    return len(inside[name])


def _longest(about: Description, outside: Tensors) -> int | None:
    """Tell the longest sequence that learned positions serve. None for sinusoids."""
    if about.position_encoding != "learned":
        return None
    source, target = (
        len(_without_batch(outside[f"{side}_positions"])) for side in ("source", "target")
    )
    if source != target:
        raise ConversionError(
            f"The tables of positions have {source} and {target} rows: source and target must have "
            "the same length."
        )
    return source - about.position_offset


def _without_batch(table: torch.Tensor) -> torch.Tensor:
    """Return a table of positions as (T, D). Some modules keep a batch dimension of size 1."""
    if table.dim() == 3 and 1 in table.shape[:2]:
        return table.squeeze(0 if table.shape[0] == 1 else 1)
    return table


def _check_sinusoids(about: Description, outside: Tensors, config: VaswaniConfig) -> None:
    """Refuse tables of sinusoids that differ from those in the description.

    Raises:
        ConversionError: a table differs by more than rounding.
    """
    if config.position_encoding == "learned":
        return
    for side in ("source", "target"):
        name = f"{side}_positions"
        if name not in outside:
            continue
        table = _without_batch(outside[name])
        # The module's table has a row for position 0, even if sentences start at a later position.
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


def _renamed(outside: Tensors, config: VaswaniConfig) -> Tensors:
    """Give the tensors outside nn.Transformer our names."""
    named = {
        SOURCE: outside["source_embedding"],
        TARGET: outside["target_embedding"],
        HEAD: outside["generator"],
    }
    if "generator_bias" in outside:
        named["lm_head.bias"] = outside["generator_bias"]
    if config.position_encoding == "learned":
        for side, stack in (("source", "encoder"), ("target", "decoder")):
            named[POSITIONS[stack]] = _without_batch(outside[f"{side}_positions"])
    return named


def _missing_biases(tensors: Tensors, config: VaswaniConfig) -> Tensors:
    """Make zeros for biases that nn.Transformer(bias=False) lacks and this model always has.

    Raises:
        ConversionError: only some parts have biases.
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


__all__ = ["Description", "add_arguments", "convert", "load", "torch_rules"]
