"""config.yaml of JoeyNMT: read strictly, and turned into settings of this package."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..configuration.configuration_vaswani import VaswaniConfig
from .errors import ConversionError
from .reading import parse_yaml, read_text

# JoeyNMT also names torch.tanh, but cannot build a model with it.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
UNK, PAD, BOS, EOS = range(4)


def read_config(path: Path, problems: list[str]) -> "Section":
    """Read config.yaml. Problems of its options are added to `problems`.

    Raises:
        ConversionError: the file is missing or is not a config of JoeyNMT 2.
    """
    if not path.is_file():
        raise ConversionError(f"There is no file {path}: name it by --config.")
    values = parse_yaml(read_text(path), str(path))
    if not isinstance(values, dict) or not {"model", "data"} <= set(values):
        raise ConversionError(
            f"{path} lacks the sections model and data: it is not a config of JoeyNMT."
        )
    data = values["data"]
    if isinstance(data, dict) and isinstance(data.get("src"), str):
        raise ConversionError(
            f"{path} is a config of JoeyNMT 1 (data.src is {data['src']!r}), but only models of "
            "JoeyNMT 2 can be converted."
        )
    return Section(values, "", problems)


class Section:
    """A section of config.yaml. It remembers which options have not been read.

    Args:
        values: its options.
        name: its place, such as "model.encoder.".
        problems: list to which wrong and unknown options are added.
    """

    def __init__(self, values: Any, name: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems
        if values is not None and not isinstance(values, Mapping):
            self.complain(f"{name.rstrip('.')} is not a section of options: {values!r}")
            values = None
        self.values = dict(values or {})
        self.unread = set(self.values)

    def complain(self, problem: str) -> None:
        """Add a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def get(self, option: str, default: Any, kind: type | None = None) -> Any:
        """Look up an option. Its type must be `kind`, by default the type of `default`."""
        self.unread.discard(option)
        value = self.values.get(option)
        if value is None:
            return default
        kind = kind or type(default)
        try:
            converted = kind(value)
            # YAML's true and false are numbers in Python, and bool() accepts anything.
            fits = isinstance(value, bool) == (kind is bool)
            fits = fits and (kind is not int or float(value) == converted)
        except (OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            self.complain(f"{self.name}{option}: {value!r} is not of type {kind.__name__}")
        return converted if fits else default

    def section(self, option: str) -> "Section":
        """Look up a section. A missing section is empty."""
        self.unread.discard(option)
        return Section(self.values.get(option), f"{self.name}{option}.", self.problems)

    def require(self, option: str, value: Any, why: str) -> None:
        """Complain if an option has another value than this one, which is its default."""
        found = self.get(option, value)
        if found != value:
            self.complain(f"{self.name}{option}: {found} ({why})")

    def ignore(self, *options: str) -> None:
        """Skip options that change nothing in a trained model."""
        self.unread -= set(options)

    def refuse_unread(self) -> None:
        """Complain about the options that nobody has read or ignored."""
        for option in sorted(self.unread, key=str):
            self.complain(f"{self.name}{option} is unknown")


def model_settings(options: Section, source: list[str], target: list[str]) -> dict[str, Any]:
    """Turn the section model into fields of VaswaniConfig.

    Args:
        options: the whole config.
        source, target: the tokens of the vocabularies.
    """
    model = options.section("model")
    encoder, decoder = model.section("encoder"), model.section("decoder")
    model.ignore("initializer", "init_weight", "init_gain", "init_rnn_orthogonal")
    model.ignore("embed_initializer", "embed_init_weight", "embed_init_gain")
    model.ignore("bias_initializer", "bias_init_weight", "lstm_forget_gate")
    kinds = encoder.get("type", "recurrent"), decoder.get("type", "transformer")
    if kinds != ("transformer", "transformer"):
        model.complain(f"type of model.encoder and model.decoder: {', '.join(kinds)}")
        return {}
    if model.values.get("initializer") == "xavier_normal":
        model.complain(
            "model.initializer: xavier_normal (it gives the residual connections DeepNet's weights)"
        )
    tied = model.get("tied_embeddings", False)
    if tied and source != target:
        model.complain("model.tied_embeddings: True (the two vocabularies differ)")
    fields: dict[str, Any] = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "tie_word_embeddings": model.get("tied_softmax", False),
        "share_encoder_decoder_embeddings": tied,
        "attention_bias": True,
        "layer_norm_eps": 1e-6,
        "label_smoothing": options.section("training").get("label_smoothing", 0.0),
        "unk_token_id": UNK,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
    model.refuse_unread()
    version = options.get("joeynmt_version", "")
    fields |= _stack_settings(
        _Stack.read(encoder, _encoder_norm_position(encoder, version), layers=8, heads=4),
        _Stack.read(decoder, _norm_position(decoder), layers=4, heads=8, tied=tied),
        model,
    )
    if not model.problems:
        try:
            VaswaniConfig(**fields)
        except StrictDataclassError as error:
            model.complain(f"section model: {error.__cause__ or error}")
    return fields


@dataclass
class _Stack:
    """The options of model.encoder or model.decoder.

    Args:
        widths: hidden_size, then embedding_dim unless the other stack's embeddings are used.
        scales: whether embeddings are scaled, unless the other stack's embeddings are used.
        norm_position: None if it has no counterpart.
    """

    layers: int
    heads: int
    ffn_dim: int
    dropout: float
    activation: str
    norm_position: str | None
    widths: list[int]
    scales: list[bool]

    @classmethod
    def read(
        cls,
        section: Section,
        norm_position: str | None,
        *,
        layers: int,
        heads: int,
        tied: bool = False,
    ) -> "_Stack":
        """Read a section with JoeyNMT's defaults.

        Args:
            section: model.encoder or model.decoder.
            norm_position: position of the LayerNorms in this stack.
            layers, heads: JoeyNMT's defaults.
            tied: whether the embeddings are those of the other stack.
        """
        stack = cls(
            layers=section.get("num_layers", layers),
            heads=section.get("num_heads", heads),
            ffn_dim=section.get("ff_size", 2048),
            dropout=section.get("dropout", 0.1),
            activation=section.get("activation", "relu"),
            norm_position=norm_position,
            widths=[section.get("hidden_size", 512)],
            scales=[],
        )
        section.require("alpha", 1.0, "the residual connections have no weight here")
        embeddings = section.section("embeddings")
        embeddings.ignore("dropout", "freeze", "load_pretrained")
        if tied:  # JoeyNMT does not read these options of tied embeddings
            embeddings.ignore("scale", "embedding_dim")
        else:
            stack.widths.append(embeddings.get("embedding_dim", 64))
            stack.scales.append(embeddings.get("scale", False))
        embeddings.refuse_unread()
        # JoeyNMT's Transformers ignore these options of recurrent networks.
        section.ignore("freeze", "rnn_type", "bidirectional", "attention", "init_hidden")
        section.ignore("input_feeding", "hidden_dropout", "bridge")
        section.refuse_unread()
        return stack


def _stack_settings(encoder: _Stack, decoder: _Stack, model: Section) -> dict[str, Any]:
    """Turn the options of both stacks into fields of VaswaniConfig."""
    widths = encoder.widths + decoder.widths
    scales = encoder.scales + decoder.scales
    for what, values in (
        ("hidden_size and embedding_dim", widths),
        ("layer_norm", [encoder.norm_position, decoder.norm_position]),
        ("embeddings.scale", scales),
        ("activation", [encoder.activation, decoder.activation]),
    ):
        if len(set(values)) > 1 and None not in values:
            shown = ", ".join(str(value) for value in values)
            model.complain(f"{what} of model.encoder and model.decoder differ: {shown}")
    if encoder.activation not in _ACTIVATIONS:
        model.complain(f"model.encoder.activation: {encoder.activation} is unknown")
    return {
        "d_model": widths[0],
        "encoder_layers": encoder.layers,
        "decoder_layers": decoder.layers,
        "encoder_attention_heads": encoder.heads,
        "decoder_attention_heads": decoder.heads,
        "encoder_ffn_dim": encoder.ffn_dim,
        "decoder_ffn_dim": decoder.ffn_dim,
        "dropout": decoder.dropout,
        "attention_dropout": decoder.dropout,
        "activation_dropout": decoder.dropout,
        "norm_position": encoder.norm_position,
        "scale_embedding": scales[0],
        "activation_function": _ACTIVATIONS.get(encoder.activation),
    }


def _encoder_norm_position(section: Section, version: str) -> str | None:
    """Read layer_norm of the encoder, whose default depends on the version of JoeyNMT."""
    if section.values.get("layer_norm") is None:
        found = re.match(r"(\d+)\.(\d+)", version)
        if not found or (int(found[1]), int(found[2])) >= (2, 2):
            section.complain(
                "model.encoder.layer_norm is missing. JoeyNMT 2.2 and later then use pre-norm "
                "without a LayerNorm after the encoder, which has no counterpart here. For a model "
                "of JoeyNMT 2.0 or 2.1, set it to post"
            )
            section.ignore("layer_norm")
            return None
    return _norm_position(section)


def _norm_position(section: Section) -> str | None:
    value = section.get("layer_norm", "post")
    if value not in ("pre", "post"):
        section.complain(f"{section.name}layer_norm: {value} is unknown")
        return None
    return value


def generation_settings(testing: Section, further_tokens: int) -> dict[str, Any]:
    """Turn the section testing into settings of `generate`.

    Args:
        testing: the section.
        further_tokens: how many special tokens follow the first four.
    """
    testing.ignore("load_model", "batch_size", "batch_type", "eval_metrics", "eval_metric")
    testing.ignore("sacrebleu_cfg", "sacrebleu", "n_best", "return_attention", "return_prob")
    beams = testing.get("beam_size", 1)
    alpha = testing.get("alpha", testing.get("beam_alpha", -1.0), float)
    never = [BOS, *range(EOS + 1, EOS + 1 + further_tokens)]
    if beams > 1:
        never.append(PAD)  # JoeyNMT's greedy search may choose it
    if not testing.get("generate_unk", True):
        never.append(UNK)
    settings: dict[str, Any] = {
        "num_beams": max(beams, 1),
        "length_penalty_type": "gnmt",
        "length_penalty": max(alpha, 0.0),
        "suppress_tokens": sorted(never),
        "max_length_offset": 0,
    }
    if (shortest := testing.get("min_output_length", 1)) > 0:
        settings["min_new_tokens"] = shortest
    if (longest := testing.get("max_output_length", -1)) >= 0:
        settings["max_new_tokens"] = longest
    else:
        settings["max_length_factor"] = 1.5
    way_out = "JoeyNMT's counts the source too; take it out to convert the model without it"
    if testing.get("repetition_penalty", -1.0) > 1:
        testing.complain(f"testing.repetition_penalty ({way_out})")
    if testing.get("no_repeat_ngram_size", -1) > 0:
        testing.complain(f"testing.no_repeat_ngram_size ({way_out})")
    testing.refuse_unread()
    return settings


__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "Section",
    "generation_settings",
    "model_settings",
    "read_config",
]
