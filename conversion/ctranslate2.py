"""To CTranslate2: a folder for its `Translator`.

    vaswani convert to-ctranslate2 runs/en-de out/ --quantization int8

INPUT is the folder of a model of this package, or its id on the Hub. CTranslate2 takes and returns
tokens. With the tokenizer of the model's folder:

    translator = ctranslate2.Translator("out/")
    source = tokenizer.convert_ids_to_tokens(tokenizer("ninety-nine").input_ids)  # with </s>
    best = translator.translate_batch([source], beam_size=4, max_decoding_length=100)[0]
    text = tokenizer.decode(tokenizer.convert_tokens_to_ids(best.hypotheses[0]))

A language model becomes a folder for CTranslate2's `Generator`:

    generator = ctranslate2.Generator("out/")
    prompt = tokenizer.convert_ids_to_tokens(tokenizer("two dogs").input_ids)
    best = generator.generate_batch([prompt], include_prompt_in_result=False)[0].sequences[0]

If the model has no tokenizer, the tokens are the ids, written as numbers.

The output has the weights, the vocabularies, a table of positions, and the start, end and unknown
tokens. Its format has no place for settings of the search. Pass them to `translate_batch`:

* `num_beams` is `beam_size`.
* `length_penalty` with `length_penalty_type="hf"` is `length_penalty`.
* `suppress_tokens`, which converted models have, is `suppress_sequences`.
* CTranslate2 always stops as with `early_stopping=True`. It has neither the paper's length penalty
  nor its limit of source length + 50.
* CTranslate2 cuts sources after `max_input_length` tokens, 1024 by default. It never returns an
  empty translation unless `min_decoding_length=0`.

CTranslate2 computes in float32 at best, so float64 weights are rounded. All its heads have one
width: if d_k and d_v differ, zeros fill up the narrower ones, which changes no result.

After an import of this module, CTranslate2's own `TransformersConverter` reads our folders as well.
"""

import argparse
import functools
import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.configuration_vaswani import VaswaniConfig
from ..corpora.atomic_folder import new_folder
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from .errors import ConversionError, refuse
from .loading import (
    TARGET_TOKENIZER,
    add_model_arguments,
    open_model,
    open_tokenizers,
    require_float_weights,
)
from .rules import Rename, Rule, Stack, Tensors, to_theirs

try:
    from ctranslate2.converters.transformers import ModelLoader, register_loader
    from ctranslate2.specs import common_spec, model_spec, transformer_spec
except ImportError as error:
    _missing: ImportError | None = error
    ModelLoader, QUANTIZATIONS = object, ()
else:
    _missing = None
    QUANTIZATIONS = model_spec.ACCEPTED_MODEL_TYPES

# Longest sequence that a table of sinusoids serves.
MAX_POSITIONS = 1024

# transformers' names of activation functions, and CTranslate2's names of the same functions.
_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_python": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_accurate": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "gelu_python_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}


def _norm(theirs: str, ours: str) -> list[Rule]:
    kinds = {"gamma": "weight", "beta": "bias"}
    return [Rename(f"{theirs}/{a}", f"{ours}.{b}") for a, b in kinds.items()]


def _rules() -> list[Rule]:
    """Pair CTranslate2's variables, by their path in the specification, with our names."""
    there, ours = "{side}/layer_{i}", "model.{side}.layers.{i}"
    q, k, v = (f"{ours}.self_attn.{name}_proj.{{kind}}" for name in "qkv")
    _, cross_k, cross_v = (f"{ours}.encoder_attn.{name}_proj.{{kind}}" for name in "qkv")
    return [
        Rename("encoder/embeddings_0/weight", "model.encoder.embed_tokens.weight"),
        Rename("decoder/embeddings/weight", "model.decoder.embed_tokens.weight"),
        Rename("decoder/projection/{kind}", "lm_head.{kind}"),
        Stack(f"{there}/self_attention/linear_0/{{kind}}", (q, k, v)),
        Rename(f"{there}/self_attention/linear_1/{{kind}}", f"{ours}.self_attn.out_proj.{{kind}}"),
        Rename(f"{there}/attention/linear_0/{{kind}}", f"{ours}.encoder_attn.q_proj.{{kind}}"),
        Stack(f"{there}/attention/linear_1/{{kind}}", (cross_k, cross_v)),
        Rename(f"{there}/attention/linear_2/{{kind}}", f"{ours}.encoder_attn.out_proj.{{kind}}"),
        Rename(f"{there}/ffn/linear_0/{{kind}}", f"{ours}.fc1.{{kind}}"),
        Rename(f"{there}/ffn/linear_1/{{kind}}", f"{ours}.fc2.{{kind}}"),
        *_norm(f"{there}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm"),
        *_norm(f"{there}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm"),
        *_norm(f"{there}/ffn/layer_norm", f"{ours}.final_layer_norm"),
        *_norm("{side}/layer_norm", "model.{side}.layer_norm"),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `save`, all but the output."""
    add_model_arguments(parser, tokenizers=True)
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS or None,
        help="type of the stored weights: int8, int16, float16 ...; default: as they are",
    )
    parser.add_argument(
        "--max-positions",
        metavar="LENGTH",
        type=int,
        help=f"longest sequence that the table of positions serves; default: {MAX_POSITIONS}, or "
        "the size of a learned table",
    )


def save(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    quantization: str | None = None,
    max_positions: int | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    target_tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a folder for CTranslate2.

    Args:
        model: a folder, an id on the Hub, or a model in memory, which stays as it is.
        output: the folder to write.
        quantization: int8, int8_float32, int8_float16, int8_bfloat16, int16, float16, bfloat16 or
            float32. None stores the weights as they are.
        max_positions: longest sequence that the table of positions serves. CTranslate2 refuses
            longer ones. None is 1024, or the size of a learned table.
        tokenizer: names the tokens. None is the tokenizer in the model's folder. Without any, ids
            are the tokens.
        target_tokenizer: names the target's tokens, if the target has its own vocabulary.

    Raises:
        ConversionError: CTranslate2 cannot compute what the model computes, or is not installed.
        FileExistsError: `output` exists already.
    """
    _require()
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConversionError(
            f"CTranslate2 has no quantization {quantization!r}: choose one of "
            f"{', '.join(QUANTIZATIONS)}."
        )
    tokenizers = open_tokenizers(model, tokenizer, target_tokenizer)
    opened: Any = open_model(model, language_models=True)
    if opened.config.is_encoder_decoder:
        spec = VaswaniLoader(max_positions)(opened, *tokenizers)
    else:
        spec = LanguageModelLoader(max_positions)(opened, tokenizers[0])
    with new_folder(Path(output)) as folder:
        spec.validate()
        spec.optimize(quantization)
        spec.save(str(folder))


convert = save


def _require() -> None:
    if _missing is not None:
        raise ConversionError(
            f"CTranslate2 cannot be imported ({_missing}): pip install 'vaswani[convert]'."
        ) from _missing


class VaswaniLoader(ModelLoader):
    """Makes CTranslate2's specification of a model, for its converters.

    Args:
        max_positions: as in `save`.
    """

    architecture_name = "AutoModelForSeq2SeqLM"

    def __init__(self, max_positions: int | None = None) -> None:
        self.max_positions = max_positions

    def __call__(
        self,
        model: VaswaniForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase | None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Any:
        """Make the specification with its vocabularies.

        Raises:
            ConversionError: CTranslate2 cannot compute what the model computes.
        """
        config = model.config
        problems = _problems(config, self.max_positions)
        # A tokenizer made in memory has no folder.
        if tokenizer is not None and target_tokenizer is None and tokenizer.name_or_path:
            # CTranslate2's own converter does not look for a second tokenizer.
            folder = Path(tokenizer.name_or_path)
            if (folder / TARGET_TOKENIZER).is_dir():
                _, target_tokenizer = open_tokenizers(folder, tokenizer)
        if tokenizer is not None and target_tokenizer is None:
            target_tokenizer = tokenizer
            if config.vocab_size != config.decoder_vocab_size:
                problems.append(
                    f"source and target have different vocabularies ({config.vocab_size} and "
                    f"{config.decoder_vocab_size} entries): give target_tokenizer"
                )
        vocabularies = [
            _vocabulary(tokenizer, config.vocab_size, "source", problems),
            _vocabulary(target_tokenizer, model.lm_head.out_features, "target", problems),
        ]
        special = _special_tokens(model, vocabularies[0], vocabularies[1], problems)
        refuse(list(dict.fromkeys(problems)), "The model")

        spec = self.get_model_spec(model)
        spec.register_source_vocabulary(vocabularies[0])
        spec.register_target_vocabulary(vocabularies[1])
        for name, token in special.items():
            setattr(spec.config, name, token)
        spec.config.layer_norm_epsilon = config.layer_norm_eps
        return spec

    @torch.no_grad()
    def get_model_spec(self, model: VaswaniForConditionalGeneration) -> Any:
        """Make the specification without vocabularies."""
        variables = to_theirs(_rules(), _weights(model))
        kinds = {
            "encoder": transformer_spec.TransformerEncoderSpec,
            "decoder": transformer_spec.TransformerDecoderSpec,
        }
        stacks = {
            side: self._stack(kind, side, model.config, f"{side}/layer_norm/gamma" in variables)
            for side, kind in kinds.items()
        }
        spec = transformer_spec.TransformerSpec(**stacks)
        self._fill(spec, variables, model)
        return spec

    def _fill(self, spec: Any, variables: dict[str, Any], model: Any) -> None:
        """Set the weights, positions and scales of a specification."""
        for name, tensor in variables.items():
            place, _, attribute = name.rpartition("/")
            setattr(model_spec.index_spec(spec, place), attribute, tensor)
        length = self.max_positions or model.config.position_limit or MAX_POSITIONS
        for side in ("encoder", "decoder"):
            if not hasattr(spec, side):
                continue
            stack, theirs = getattr(model.model, side), getattr(spec, side)
            table = stack.embed_positions(0, length, torch.device("cpu"))
            theirs.position_encodings.encodings = table.to(_dtype(model), copy=True)
            theirs.scale_embeddings = stack.embed_scale

    def _stack(self, kind: Any, side: str, config: VaswaniConfig, final_norm: bool) -> Any:
        """Make the specification of one stack."""
        d_k, d_v, default = _head_widths(config, side)
        width = max(d_k, d_v)
        spec = kind(
            getattr(config, f"{side}_layers"),
            getattr(config, f"{side}_attention_heads"),
            # This argument adds the last LayerNorm. The attribute below places the others.
            pre_norm=final_norm,
            activation=common_spec.Activation[_ACTIVATIONS[config.activation_function]],
            head_dim=None if width == default else width,
        )
        spec.pre_norm = config.norm_position == "pre"
        if width != d_k:
            for layer in spec.layer:
                for name in ("self_attention", "attention"):
                    if hasattr(layer, name):
                        getattr(layer, name).queries_scale = d_k**-0.5
        return spec


class LanguageModelLoader(VaswaniLoader):
    """Makes CTranslate2's specification of a language model, for its converters."""

    architecture_name = "AutoModelForCausalLM"

    def __call__(self, model: Any, tokenizer: Any, target_tokenizer: None = None) -> Any:
        """Make the specification with its vocabulary.

        Raises:
            ConversionError: CTranslate2 cannot compute what the model computes.
        """
        config = model.config
        problems = _problems(config, self.max_positions)
        if config.add_cross_attention:
            problems.append("add_cross_attention (CTranslate2's generator has no source)")
        vocabulary = _vocabulary(tokenizer, config.vocab_size, "model's", problems)
        special = _special_tokens(model, vocabulary, vocabulary, problems)
        refuse(list(dict.fromkeys(problems)), "The model")
        spec = self.get_model_spec(model)
        spec.register_vocabulary(vocabulary)
        for name in ("bos_token", "eos_token", "unk_token"):
            setattr(spec.config, name, special[name])
        spec.config.layer_norm_epsilon = config.layer_norm_eps
        return spec

    @torch.no_grad()
    def get_model_spec(self, model: Any) -> Any:
        """Make the specification without a vocabulary."""
        variables = to_theirs(_rules(), _weights(model))
        kind = functools.partial(
            transformer_spec.TransformerDecoderSpec, with_encoder_attention=False
        )
        decoder = self._stack(
            kind, "decoder", model.config, "decoder/layer_norm/gamma" in variables
        )
        spec = transformer_spec.TransformerDecoderModelSpec(decoder)
        self._fill(spec, variables, model)
        return spec


def _head_widths(config: VaswaniConfig, side: str) -> tuple[int, int, int]:
    """Return d_k, d_v and their default for a stack."""
    default = config.d_model // getattr(config, f"{side}_attention_heads")
    return config.d_k or default, config.d_v or default, default


def _dtype(model: VaswaniForConditionalGeneration) -> torch.dtype:
    dtype = model.lm_head.weight.dtype
    return torch.float32 if dtype == torch.float64 else dtype


def _weights(model: VaswaniForConditionalGeneration) -> Tensors:
    """Copy the weights, with heads of one width. Quantization overwrites the copies."""
    require_float_weights(model)
    weights = {
        name: tensor.detach().to("cpu", _dtype(model), copy=True)
        for name, tensor in model.state_dict().items()
        if not name.endswith(".embed_positions.weight")
    }
    for name, tensor in weights.items():
        attention = re.fullmatch(r"model\.(encoder|decoder)\..*_attn\.(\w+)_proj\.(\w+)", name)
        if attention is None:
            continue
        side, part, kind = attention.groups()
        d_k, d_v, _ = _head_widths(model.config, side)
        old, new = (d_k if part in ("q", "k") else d_v), max(d_k, d_v)
        if part != "out":
            weights[name] = _widened(tensor, old, new)
        elif kind == "weight":
            weights[name] = _widened(tensor.T, old, new).T.contiguous()
    return weights


def _widened(tensor: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """Add zeros to the rows of every head, from `old` rows to `new` rows."""
    if old == new:
        return tensor
    heads = tensor.unflatten(0, (-1, old))  # (H, old, ...)
    filled = heads.new_zeros(len(heads), new, *tensor.shape[1:])
    filled[:, :old] = heads
    return filled.flatten(0, 1)


def _problems(config: VaswaniConfig, max_positions: int | None) -> list[str]:
    """List the settings that CTranslate2 cannot follow."""
    problems = []
    if config.activation_function not in _ACTIVATIONS:
        problems.append(
            f"activation_function {config.activation_function!r} (CTranslate2 has "
            f"{', '.join(_ACTIVATIONS)})"
        )
    limit = config.position_limit
    if max_positions is not None and max_positions < 1:
        problems.append(f"max_positions {max_positions} (at least 1)")
    elif max_positions is not None and limit is not None and max_positions > limit:
        problems.append(f"max_positions {max_positions} (the learned table has {limit})")
    return problems


def _vocabulary(
    tokenizer: PreTrainedTokenizerBase | None, size: int, side: str, problems: list[str]
) -> list[str]:
    """Name every entry of a vocabulary, by its id if there is no tokenizer."""
    if tokenizer is None:
        return [str(number) for number in range(size)]
    names: dict[int, str] = {}
    known = tokenizer.get_vocab()
    known_ids = getattr(tokenizer, "known_ids", list)  # other tokenizers know all ids
    for token, number in known.items():
        if known_ids([number]) != [number]:
            continue  # the tokenizer encodes this symbol as the unknown token
        if number in names:
            problems.append(f"the {side} token {number} is both {names[number]!r} and {token!r}")
        names[number] = token
    beyond = [number for number in names if number >= size]
    if beyond:
        problems.append(
            f"the {side} tokenizer has a token {max(beyond)}, but the model has only {size} tokens"
        )
    for number in range(size):
        if number not in names:
            names[number] = f"<unused{number}>"
            while names[number] in known:
                names[number] += ">"
    return [names[number] for number in range(size)]


def _special_tokens(
    model: VaswaniForConditionalGeneration,
    source: list[str],
    target: list[str],
    problems: list[str],
) -> dict[str, str | None]:
    """Name the special tokens in CTranslate2's configuration."""

    def number(name: str) -> int | None:
        value = getattr(model.generation_config, name, None)
        if value is None:
            value = getattr(model.config, name, None)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, list):
            problems.append(f"{name} {value} (CTranslate2 has only one)")
            return None
        if value is not None and not 0 <= value < len(source if name == "unk_token_id" else target):
            problems.append(f"{name} {value} is not in the vocabulary")
            return None
        return value

    eos, bos, unk = (number(f"{name}_token_id") for name in ("eos", "bos", "unk"))
    start = number("decoder_start_token_id")
    start = bos if start is None else start
    if eos is None and not any("eos_token_id" in problem for problem in problems):
        problems.append("eos_token_id None (translations must end)")
    end = None if eos is None else target[eos]
    return {
        "eos_token": end,
        "bos_token": end if bos is None else target[bos],
        # CTranslate2 needs this token. Strings that the vocabulary lacks become it.
        "unk_token": end if unk is None else source[unk],
        "decoder_start_token": None if start is None else target[start],
    }


if _missing is None:
    register_loader("VaswaniConfig")(VaswaniLoader)
    register_loader("VaswaniDecoderConfig")(LanguageModelLoader)

__all__ = ["LanguageModelLoader", "VaswaniLoader", "add_arguments", "convert", "save"]
