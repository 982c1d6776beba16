"""From and to Marian: transformers' MarianMTModel, and the folders of OPUS-MT.

    python -m vaswani.conversion marian opus-mt-en-de/ out/
    python -m vaswani.conversion to-marian runs/en-de out/

INPUT is a folder of transformers (config.json with model.safetensors or pytorch_model.bin), or one
of Marian's own (decoder.yml with the .npz and vocabularies that it names). Both come with
source.spm and target.spm.

The two compute differently from the same weights, and each is followed exactly. Marian's sines and
cosines have the wavelengths of tensor2tensor, its LayerNorm adds 1e-6, its "gelu" is
x * sigmoid(1.702 x), and nothing but its vocabulary shares in the softmax. transformers (and
CTranslate2) read the same file with the paper's wavelengths and 1e-5, and give the pad token that
they add a logit of 0: `--as-transformers` does as they do, so that an .npz gives the numbers of its
copy on the Hub, and can go on to a MarianMTModel. `--paper-positions` then also turns "all sines,
then all cosines" into the paper's order by one permutation of d_model in every weight.

Text is cut by SentencePiece's own rules, special tokens in it stay text, ">>xx<<" is one token
wherever it stands. What differs from MarianTokenizer: of characters in a row that source.spm does
not know, each is looked up by itself; where vocab.json lacks a piece of the .spm (a warning says
so), others that it has are used in place of "<unk>"; a ">>xx<<" that vocab.json lacks is read as
text; letters with several separate accents, and half-width Hangul, may be normalised differently.
The scripts around OPUS-MT models that rewrite punctuation are not run. `target_tokenizer/` in the
output cuts target text, by target.spm; either tokenizer decodes.

To search as Marian does, "hf" is the length penalty, with its exponent (`normalize`). Not carried
over, with a warning: word penalties, the limit of `max-length-factor` (512 tokens instead).

To Marian, biases that are missing are zeros and the paper's order of positions is permuted. The
penalty of Wu et al. (2016), the limit of input length + 50 and label smoothing have no place there.
"""

import argparse
import json
import math
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.generation_vaswani import VaswaniGenerationConfig
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .checkpoints import (
    TARGET_TOKENIZER,
    Converted,
    build_model,
    new_folder,
    open_model,
    open_tokenizers,
    read_checkpoint,
    refuse,
    save_tokenizers,
)
from .rules import ConversionError, Drop, Rename, Rule, Tensors, to_ours, to_theirs

logger = logging.get_logger(__name__)

_SPECIAL = ("<pad>", "<unk>", "</s>")
_SOURCE, _TARGET, _HEAD = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
_MAX_LENGTH = 512  # tokens of a translation, as transformers' own conversion of OPUS-MT sets it

# Logit of the pad token, which Marian does not have: its probability is 0 even in float16.
_NEVER = -1e4

# Score of pieces that SentencePiece would not choose: worse than any text made of those it would.
_UNREACHABLE = -1e9

# What the fields of old MarianMTModel folders say that no MarianMTModel of today would do.
_OF_OLD_FOLDERS = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "static_position_embeddings": True,
}

# Marian's options that are read below, or that change nothing in a transformer once it is trained.
_READ = {
    "dec-depth",
    "dim-emb",
    "dim-vocabs",
    "enc-depth",
    "input-types",
    "output-omit-bias",
    "tied-embeddings",
    "tied-embeddings-all",
    "tied-embeddings-src",
    "transformer-decoder-autoreg",
    "transformer-decoder-dim-ffn",
    "transformer-decoder-ffn-depth",
    "transformer-dim-ffn",
    "transformer-ffn-activation",
    "transformer-ffn-depth",
    "transformer-heads",
    "transformer-postprocess",
    "transformer-postprocess-emb",
    "transformer-postprocess-top",
    "transformer-preprocess",
    "type",
}
_HARMLESS = {
    "bert-train-type-embeddings",
    "bert-type-vocab-size",
    "dec-cell",
    "dec-cell-base-depth",
    "dec-cell-high-depth",
    "dim-rnn",
    "enc-cell",
    "enc-cell-depth",
    "enc-type",
    "layer-normalization",
    "separator-symbol",
    "skip",
    "transformer-aan-activation",
    "transformer-aan-depth",
    "transformer-aan-nogate",
    "transformer-depth-scaling",
    "transformer-dim-aan",
    "transformer-dropout",
    "transformer-dropout-attention",
    "transformer-dropout-ffn",
    "transformer-guided-alignment-layer",
    "ulr-dim-emb",
    "ulr-dropout",
    "ulr-softmax-temperature",
    "ulr-trainable-transformation",
    "version",
}
# Values other than an empty one that leave an option off.
_OFF = {"factors-combine": "sum", "transformer-attention-mask": "default"}

# Marian's functions, and what transformers takes them for.
_ACTIVATIONS = {
    "relu": ("relu", "relu"),
    "swish": ("swish", "swish"),
    "gelu": ("quick_gelu", "gelu"),
}

# Preprocess, postprocess and postprocess-top, but for dropout: norm_position, final_layer_norm.
_PLACEMENTS = {
    ("", "an", ""): ("post", False),
    ("", "an", "n"): ("post", True),
    ("n", "a", ""): ("pre", False),
    ("n", "a", "n"): ("pre", True),
}

# MarianConfig's fields that are ours by the same name.
_SAME_FIELDS = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "activation_function",
    "init_std",
    "max_position_embeddings",
    "scale_embedding",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
    "use_cache",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "decoder_start_token_id",
)


def _transformers_rules() -> list[Rule]:
    """MarianMTModel's names: ours, but for the bias of the logits."""
    rules: list[Rule] = [Rename(name, name) for name in (_SOURCE, _TARGET, _HEAD)]
    rules.append(Rename("final_logits_bias", "lm_head.bias", lambda b: b[0], lambda b: b[None]))
    for stack in ("encoder", "decoder"):
        layer = f"model.{stack}.layers.{{i}}"
        names = [f"{layer}.self_attn.{{part}}.{{kind}}", f"{layer}.{{part}}.{{kind}}"]
        if stack == "decoder":
            names.append(f"{layer}.encoder_attn.{{part}}.{{kind}}")
        rules += [Rename(name, name) for name in names]
        rules.append(Drop(f"model.{stack}.embed_positions.weight", _check_table))
    return rules


def _marian_rules(norm_position: str) -> list[Rule]:
    """Marian's own names, its layers counted from 0: matrices lie the other way round."""

    def matrix(theirs: str, ours: str) -> Rename:
        return Rename(theirs, ours, _transposed, _transposed)

    def vector(theirs: str, ours: str) -> Rename:
        return Rename(theirs, ours, lambda v: v[0], lambda v: v[None])

    def norm(theirs: str, ours: str, suffix: str = "") -> list[Rule]:
        kinds = {"scale": "weight", "bias": "bias"}
        return [
            vector(f"{theirs}_ln_{kind}{suffix}", f"{ours}.{name}") for kind, name in kinds.items()
        ]

    suffix = "_pre" if norm_position == "pre" else ""
    rules: list[Rule] = [
        Rename("encoder_Wemb", _SOURCE),
        Rename("decoder_Wemb", _TARGET),
        Rename("decoder_ff_logit_out_Wt", _HEAD),
        vector("decoder_ff_logit_out_b", "lm_head.bias"),
    ]
    for stack in ("encoder", "decoder"):
        there, here = f"{stack}_l{{i}}", f"model.{stack}.layers.{{i}}"
        attentions = {"self": "self_attn", "context": "encoder_attn"}
        for theirs, ours in list(attentions.items())[: 1 if stack == "encoder" else 2]:
            for x in ("q", "k", "v", "o"):
                proj = f"{here}.{ours}.{'out' if x == 'o' else x}_proj"
                rules.append(matrix(f"{there}_{theirs}_W{x}", f"{proj}.weight"))
                rules.append(vector(f"{there}_{theirs}_b{x}", f"{proj}.bias"))
            rules += norm(f"{there}_{theirs}_Wo", f"{here}.{ours}_layer_norm", suffix)
        for number in (1, 2):
            rules.append(matrix(f"{there}_ffn_W{number}", f"{here}.fc{number}.weight"))
            rules.append(vector(f"{there}_ffn_b{number}", f"{here}.fc{number}.bias"))
        rules += norm(f"{there}_ffn_ffn", f"{here}.final_layer_norm", suffix)
        rules += norm(f"{stack}_top", f"model.{stack}.layer_norm")
    return rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `convert` but for the output."""
    parser.add_argument("checkpoint", metavar="INPUT", help="folder of the model")
    parser.add_argument(
        "--paper-positions",
        action="store_true",
        help="permute d_model so that sines and cosines alternate, as in the paper",
    )
    parser.add_argument(
        "--as-transformers",
        action="store_true",
        help="compute from Marian's own .npz what transformers and CTranslate2 would",
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="convert the weights and settings alone"
    )


def convert(
    checkpoint: str | Path,
    output: str | Path,
    paper_positions: bool = False,
    as_transformers: bool = False,
    no_tokenizer: bool = False,
) -> None:
    """Write a folder that `from_pretrained` reads; for the arguments see `load`.

    Raises:
        ConversionError: the model cannot be converted exactly.
        FileExistsError: something is at `output` already.
    """
    load(checkpoint, paper_positions, as_transformers, no_tokenizer).save(Path(output))


def load(
    checkpoint: str | Path,
    paper_positions: bool = False,
    as_transformers: bool = False,
    no_tokenizer: bool = False,
) -> Converted:
    """Convert a folder in memory.

    Args:
        checkpoint: a folder of MarianMTModel, or of Marian itself.
        paper_positions: permute d_model so that sines and cosines alternate.
        as_transformers: compute from an .npz what transformers would; changes nothing elsewhere.
        no_tokenizer: leave the tokenizers out, which need sentencepiece.

    Raises:
        ConversionError: the model cannot be converted exactly; names all reasons.
    """
    folder = Path(checkpoint)
    if (folder / "config.json").is_file():
        return _from_transformers(folder, paper_positions, not no_tokenizer)
    if (folder / "decoder.yml").is_file():
        return _from_marian(folder, paper_positions, as_transformers, not no_tokenizer)
    raise ConversionError(f"{folder} has neither config.json (transformers) nor decoder.yml.")


# MarianMTModel to us


def _from_transformers(folder: Path, paper_positions: bool, with_tokenizer: bool) -> Converted:
    given = _read_json(folder / "config.json")
    problems = []
    if given.get("model_type") != "marian":
        raise ConversionError(
            f"{folder} holds a model of type {given.get('model_type')!r}, not 'marian'."
        )
    for name, value in _OF_OLD_FOLDERS.items():
        if given.get(name) not in (None, value):
            problems.append(f"{name} {given[name]}")
    try:
        theirs = MarianConfig.from_pretrained(folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConversionError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if theirs.is_decoder or not theirs.is_encoder_decoder:
        problems.append("is_decoder (a decoder alone)")
    if theirs.d_model % 2:
        problems.append(f"d_model {theirs.d_model} (odd)")
    refuse(problems, str(folder))
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(theirs, name):
            logger.warning(f"{name} {getattr(theirs, name)} is not carried over: training only.")

    tensors = _read_weights(folder)
    bias = tensors.get("final_logits_bias")
    if bias is not None and not bias.any():
        del tensors["final_logits_bias"]
    tensors = to_ours(_transformers_rules(), _with_all_tables(tensors, theirs))
    source, target = _tokenizers_of_transformers(folder) if with_tokenizer else (None, None)
    size = theirs.vocab_size
    config = _configured(
        vocab_size=size,
        decoder_vocab_size=(
            size if theirs.share_encoder_decoder_embeddings else theirs.decoder_vocab_size
        ),
        **{name: getattr(theirs, name) for name in _SAME_FIELDS},
        label_smoothing=0.0,
        position_encoding="sinusoidal_concat",
        attention_bias=True,
        lm_head_bias="lm_head.bias" in tensors,
        unk_token_id=None if source is None else source.unk_token_id,
    )
    return _finish(config, tensors, _generation(folder), paper_positions, source, target)


def _with_all_tables(tensors: Tensors, config: MarianConfig) -> Tensors:
    """Put the shared table where the stacks expect it.

    Raises:
        ConversionError: it is tied to other values in a stack.
    """
    shared = tensors.pop("model.shared.weight", None)
    if shared is None or not config.share_encoder_decoder_embeddings:
        return tensors if shared is None else {**tensors, "model.shared.weight": shared}
    for name in (_SOURCE, _TARGET):
        table = tensors.setdefault(name, shared)
        if config.tie_word_embeddings and not torch.equal(table, shared):
            raise ConversionError(f"The weights do not fit: model.shared.weight is not {name}.")
    return tensors


def _check_table(name: str, table: torch.Tensor) -> None:
    """Refuse positions other than the sinusoids that MarianMTModel makes itself.

    Raises:
        ConversionError: they were learned.
    """
    length, width = table.shape
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    expected = torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), axis=1))
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(table.dtype, 1e-5)
    if not torch.allclose(table.double(), expected, rtol=0, atol=tolerance):
        raise ConversionError(f"{name} is not MarianMTModel's table of sinusoids.")


def _generation(folder: Path) -> VaswaniGenerationConfig:
    """The folder's generation config; a folder from before there were any has it in config.json."""
    try:
        given = GenerationConfig.from_pretrained(folder)
    except OSError:
        given = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )
    return _as_ours(given)


def _as_ours(given: GenerationConfig) -> VaswaniGenerationConfig:
    """Take over transformers' rules, which are written down where the paper's are the default."""
    rules = {
        "length_penalty_type": "hf",
        "length_penalty": 1.0,
        "early_stopping": False,
        "max_length_offset": 0,
    }
    values = given.to_dict()
    for name in ("_from_model_config", "transformers_version"):
        values.pop(name, None)
    set_there = {name: value for name, value in values.items() if value is not None}
    return VaswaniGenerationConfig(**{**rules, **set_there})


def _configured(**settings: Any) -> VaswaniConfig:
    try:
        return VaswaniConfig(**settings)
    except StrictDataclassError as error:
        raise ConversionError(f"The options contradict each other: {error}") from error


def _finish(
    config: VaswaniConfig,
    tensors: Tensors,
    generation: VaswaniGenerationConfig,
    paper_positions: bool,
    source: VaswaniTokenizer | None,
    target: VaswaniTokenizer | None,
) -> Converted:
    if paper_positions:
        tensors = _permuted(tensors, _to_interleaved(config.d_model))
        config.position_encoding = "sinusoidal"
    for side, tokenizer, size in (
        ("source", source, config.vocab_size),
        ("target", target, config.decoder_vocab_size),
    ):
        if tokenizer is not None and len(tokenizer) > (size or 0):
            raise ConversionError(
                f"The {side} vocabulary has {len(tokenizer)} entries, the model {size}."
            )
    dtypes = {tensor.dtype for tensor in tensors.values()}
    model = build_model(config, tensors)
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtypes.pop())
    model.generation_config = generation
    return Converted(model, source, target)


# The order of d_model


def _to_interleaved(width: int) -> torch.Tensor:
    """Where each channel comes from when "all sines, all cosines" becomes "sine, cosine, ..."."""
    return torch.arange(width).view(2, -1).T.flatten()


def _to_concatenated(width: int) -> torch.Tensor:
    return torch.arange(width).view(-1, 2).T.flatten()


def _permuted(tensors: Tensors, order: torch.Tensor) -> Tensors:
    """Give the channels of d_model another order in all weights of ours: the model is the same."""
    return {name: _permute(name, tensor, order) for name, tensor in tensors.items()}


def _permute(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    module, kind = name.split(".")[-2:]
    if module.endswith("layer_norm") or module in ("out_proj", "fc2"):
        return tensor[order]
    if kind == "weight":  # tables and the maps that read d_model
        return tensor[:, order].contiguous()
    return tensor


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.T.contiguous()


# Marian's own folders to us


def _from_marian(
    folder: Path, paper_positions: bool, as_transformers: bool, with_tokenizer: bool
) -> Converted:
    decoder = _read_yaml(folder / "decoder.yml")
    problems = []
    names = decoder.get("models") or []
    vocabs = decoder.get("vocabs") or []
    if len(names) != 1:
        problems.append(f"models {names} (one, not an ensemble)")
    if len(vocabs) != 2:
        problems.append(f"vocabs {vocabs} (one of the source and one of the target)")
    refuse(problems, str(folder))
    tensors, options = _read_npz(_beside(folder, names[0]))
    problems += _marian_problems(options)
    if paper_positions and not as_transformers:
        problems.append(
            "paper_positions (Marian's wavelengths are not the paper's; they are with "
            "as_transformers)"
        )
    refuse(problems, str(folder))

    sizes = options["dim-vocabs"]
    tied_all = options.get("tied-embeddings-all", False)
    share = tied_all or options.get("tied-embeddings-src", False)
    tie = tied_all or options.get("tied-embeddings", False)
    placement = _PLACEMENTS[_placement(options)]
    tensors = to_ours(_marian_rules(placement[0]), _with_common_names(tensors, options))
    tensors = _with_pad(tensors, 0.0 if as_transformers else _NEVER)
    if share and not tie:
        # Sharing without tying is not a setting of ours: the tables are equal, but each its own.
        tensors[_TARGET] = tensors[_SOURCE].clone()

    vocabularies = [_read_vocabulary(_beside(folder, name)) for name in vocabs]
    for vocabulary, size, name in zip(vocabularies, sizes, vocabs, strict=True):
        if len(vocabulary) != size:
            raise ConversionError(f"{name} has {len(vocabulary)} entries, dim-vocabs says {size}.")
        vocabulary["<pad>"] = size
    tokenizers: Any = (None, None)
    if with_tokenizer:
        tokenizers = [
            _tokenizer(_spm(folder, name, side), vocabulary)
            for name, side, vocabulary in zip(
                vocabs, ("source", "target"), vocabularies, strict=True
            )
        ]
    pad, unk = vocabularies[1]["<pad>"], vocabularies[1]["<unk>"]
    ffn = options["transformer-dim-ffn"]
    config = _configured(
        vocab_size=sizes[0] + 1,
        decoder_vocab_size=sizes[1] + 1,
        d_model=options["dim-emb"],
        encoder_layers=options["enc-depth"],
        decoder_layers=options["dec-depth"],
        encoder_attention_heads=options["transformer-heads"],
        decoder_attention_heads=options["transformer-heads"],
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=options.get("transformer-decoder-dim-ffn") or ffn,
        activation_function=_ACTIVATIONS[options["transformer-ffn-activation"]][as_transformers],
        norm_position=placement[0],
        final_layer_norm=placement[1],
        position_encoding="sinusoidal_concat" if as_transformers else "sinusoidal_t2t",
        attention_bias=True,
        lm_head_bias=True,
        layer_norm_eps=1e-5 if as_transformers else 1e-6,
        tie_word_embeddings=tie,
        share_encoder_decoder_embeddings=share,
        pad_token_id=pad,
        unk_token_id=unk,
        eos_token_id=vocabularies[1]["</s>"],
        decoder_start_token_id=pad,
    )
    generation = _search_of_marian(decoder, config, as_transformers)
    return _finish(config, tensors, generation, paper_positions, *tokenizers)


def _beside(folder: Path, name: Any) -> Path:
    """A file that decoder.yml names, which may lie where it was when the model was trained."""
    for path in (folder / str(name), folder / Path(str(name)).name):
        if path.is_file():
            return path
    raise ConversionError(f"There is no file {folder / Path(str(name)).name}.")


def _read_npz(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """The weights and the options that lie among them.

    Raises:
        ConversionError: the file is damaged, or is none that Marian writes after training.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, AttributeError) as error:
        raise ConversionError(f"{path} is no complete .npz: {error}") from error
    text = loaded.pop("special:model.yml", None)
    if text is None:
        raise ConversionError(f"{path} has no special:model.yml: Marian did not write it.")
    options = _parse_yaml(text.tobytes().rstrip(b"\0"), f"special:model.yml of {path}")
    wrong = [f"{name} ({array.dtype})" for name, array in loaded.items() if array.dtype.kind != "f"]
    if wrong:
        raise ConversionError(f"{path} holds other weights than floats: {', '.join(wrong)}.")
    return {name: torch.from_numpy(array) for name, array in loaded.items()}, options


def _marian_problems(options: dict[str, Any]) -> list[str]:
    """Options that this model does not have, in Marian's spelling."""
    problems = []

    def expect(name: str, *allowed: Any) -> None:
        value = options.get(name, allowed[0])
        if value not in allowed:
            problems.append(f"{name} {value!r}")

    expect("type", "transformer")
    expect("transformer-decoder-autoreg", "self-attention")
    expect("transformer-ffn-depth", 2)
    expect("transformer-decoder-ffn-depth", 0, 2)
    expect("transformer-postprocess-emb", "d", "")
    activation = options.get("transformer-ffn-activation")
    if str(activation) not in _ACTIVATIONS:
        problems.append(f"transformer-ffn-activation {activation!r}")
    if _placement(options) not in _PLACEMENTS:
        problems += [
            f"transformer-{part} {options.get(f'transformer-{part}', '')!r}"
            for part in ("preprocess", "postprocess", "postprocess-top")
        ]
    types = options.get("input-types") or []
    if any(kind != "sequence" for kind in types):
        problems.append(f"input-types {types}")
    sizes = options.get("dim-vocabs")
    if not isinstance(sizes, list) or [type(size) for size in sizes] != [int, int]:
        problems.append(f"dim-vocabs {sizes} (one source and one target)")
    elif sizes[0] != sizes[1] and (
        options.get("tied-embeddings-all") or options.get("tied-embeddings-src")
    ):
        problems.append(f"dim-vocabs {sizes} (tied, but of different sizes)")
    for name in ("dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn"):
        if not isinstance(options.get(name), int) or options[name] < 1:
            problems.append(f"{name} {options.get(name)}")
    if isinstance(options.get("dim-emb"), int) and options["dim-emb"] % 2:
        problems.append(f"dim-emb {options['dim-emb']} (odd)")
    for name in sorted(options.keys() - _READ - _HARMLESS):
        if options[name] and options[name] != _OFF.get(name):
            problems.append(f"{name} {options[name]!r}")
    return problems


def _placement(options: dict[str, Any]) -> tuple[str, str, str]:
    """Where LayerNorms stand, in Marian's letters; dropout is nothing once a model is trained."""

    def letters(part: str, default: str) -> str:
        return str(options.get(f"transformer-{part}", default) or "").replace("d", "")

    return letters("preprocess", ""), letters("postprocess", "dan"), letters("postprocess-top", "")


def _with_common_names(tensors: Tensors, options: dict[str, Any]) -> Tensors:
    """Count layers from 0, and give tables and the map to the vocabulary one name each."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        stack, found, rest = name.partition("_l")
        number, _, part = rest.partition("_")
        if found and number.isdecimal():
            name = f"{stack}_l{int(number) - 1}_{part}"
        if tensor.dim() == 1:  # a vector from a Marian of the first days
            tensor = tensor[None]
        named[name] = tensor
    if "Wemb" in named:
        if not (options.get("tied-embeddings-all") or options.get("tied-embeddings-src")):
            raise ConversionError("There is one table (Wemb), but its options tie none.")
        named["encoder_Wemb"] = named.pop("Wemb")
    if "decoder_ff_logit_out_W" in named:
        named["decoder_ff_logit_out_Wt"] = _transposed(named.pop("decoder_ff_logit_out_W"))
    if options.get("output-omit-bias") and "decoder_ff_logit_out_b" not in named:
        named["decoder_ff_logit_out_b"] = named["encoder_Wemb"].new_zeros(
            1, options["dim-vocabs"][1]
        )
    return named


def _with_pad(tensors: Tensors, logit: float) -> Tensors:
    """Append the pad token: a vector of zeros, which is also Marian's first decoder input."""
    tensors = dict(tensors)
    for name in (_SOURCE, _TARGET, _HEAD):
        if name in tensors:
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 1))
    if "lm_head.bias" in tensors:
        tensors["lm_head.bias"] = torch.nn.functional.pad(
            tensors["lm_head.bias"], (0, 1), value=logit
        )
    return tensors


def _search_of_marian(
    decoder: dict[str, Any], config: VaswaniConfig, as_transformers: bool
) -> VaswaniGenerationConfig:
    """Marian's beam search, as far as there are words for it here."""
    if decoder.get("word-penalty"):
        logger.warning(f"word-penalty {decoder['word-penalty']} is not carried over.")
    if "max-length-factor" in decoder:
        logger.warning(
            f"max-length-factor {decoder['max-length-factor']} is not carried over: a translation "
            f"has at most {_MAX_LENGTH} tokens."
        )
    forbidden = [] if decoder.get("allow-unk") or as_transformers else [config.unk_token_id]
    normalize = decoder.get("normalize")
    # Marian's `normalize` without a number is 1.
    alpha = 0.0 if normalize in (None, False) else float(normalize)
    return VaswaniGenerationConfig(
        num_beams=int(decoder.get("beam-size", 12)),
        length_penalty_type="hf",
        length_penalty=1.0 if as_transformers else alpha,
        early_stopping=False,
        max_length_offset=0,
        max_length=_MAX_LENGTH,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        suppress_tokens=forbidden or None,
        bad_words_ids=[[config.pad_token_id]] if as_transformers else None,
        forced_eos_token_id=config.eos_token_id if as_transformers else None,
    )


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Tokens and their ids, from what Marian calls a vocabulary.

    Raises:
        ConversionError: the file cannot be read, or its ids are not 0, 1, 2, ...
    """
    if path.suffix == ".spm":
        pieces = _read_spm(path).pieces
        vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    else:
        vocabulary = dict(_vocabulary_entries(path))
    return _checked_vocabulary(vocabulary, path, ("</s>", "<unk>"))


def _checked_vocabulary(
    vocabulary: dict[str, int], path: Path, needed: tuple[str, ...]
) -> dict[str, int]:
    missing = [token for token in needed if token not in vocabulary]
    if missing:
        raise ConversionError(f"{path} lacks {', '.join(missing)}.")
    if {*map(str, vocabulary.values())} != {*map(str, range(len(vocabulary)))}:
        raise ConversionError(f"The ids of {path} are not 0 to {len(vocabulary) - 1}, each once.")
    return vocabulary


def _vocabulary_entries(path: Path) -> Iterator[tuple[str, int]]:
    """The lines "token: id"; a YAML parser would break tokens at rare characters and lose some."""
    if path.suffix == ".json":
        yield from _read_json(path).items()
        return
    key = None
    # Not splitlines: U+0085 and others may be tokens.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or line in ("---", "..."):
            continue
        if key is None and line.startswith("? "):
            key = line[2:]
            continue
        token, colon, value = line.rpartition(":")
        if key is not None:
            token, key = key, None
        if not colon or not value.strip().isdecimal():
            raise ConversionError(f"{path}, line {number} is not 'token: id': {line!r}.")
        yield _unquoted(token, f"{path}, line {number}"), int(value)


def _unquoted(token: str, place: str) -> str:
    token = token.strip(" ")
    if len(token) > 1 and token[0] == token[-1] and token[0] in "\"'":
        return str(_parse_yaml(token.encode(), place, scalar=True))
    return token


# Text


def _tokenizers_of_transformers(folder: Path) -> tuple[VaswaniTokenizer, VaswaniTokenizer | None]:
    """MarianTokenizer's files as tokenizers of ours, or those that `save` has left."""
    files = {side: folder / f"{side}.spm" for side in ("source", "target")}
    if not files["source"].is_file() and (folder / "tokenizer.json").is_file():
        target = folder / TARGET_TOKENIZER
        return (
            VaswaniTokenizer.from_pretrained(folder),
            VaswaniTokenizer.from_pretrained(target) if target.is_dir() else None,
        )
    given = {}
    if (folder / "tokenizer_config.json").is_file():
        given = _read_json(folder / "tokenizer_config.json")
    problems = []
    for name, token in zip(("pad_token", "unk_token", "eos_token"), _SPECIAL, strict=True):
        value = given.get(name) or token
        value = value.get("content") if isinstance(value, dict) else value
        if value != token:
            problems.append(f"{name} {value!r} (it has to be {token!r})")
    vocabularies = {"source": folder / "vocab.json"}
    vocabularies["target"] = (
        folder / "target_vocab.json" if given.get("separate_vocabs") else vocabularies["source"]
    )
    read = {
        side: _checked_vocabulary(_read_json(path), path, _SPECIAL)
        for side, path in vocabularies.items()
    }
    for number, token in (given.get("added_tokens_decoder") or {}).items():
        if read["source"].get(token.get("content")) != int(number):
            problems.append(f"added token {token.get('content')!r} (not in vocab.json)")
    refuse(problems, f"The tokenizer of {folder}")
    tokenizers = [_tokenizer(files[side], read[side]) for side in ("source", "target")]
    return tokenizers[0], tokenizers[1]


def _spm(folder: Path, vocabulary: Any, side: str) -> Path:
    """The SentencePiece model of a side: Marian's vocabulary may be one itself."""
    if Path(str(vocabulary)).suffix == ".spm":
        return _beside(folder, vocabulary)
    return folder / f"{side}.spm"


def _read_spm(path: Path) -> Any:
    """Parse a SentencePiece model.

    Raises:
        ConversionError: there is none, it is damaged, or sentencepiece is not installed.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2 as format_of_models
    except ImportError as error:
        raise ConversionError(
            f"{path} needs sentencepiece and protobuf ({error}): pip install 'vaswani[convert]', "
            "or convert without a tokenizer (no_tokenizer)."
        ) from error
    if not path.is_file():
        raise ConversionError(
            f"There is no file {path}: text cannot be cut without it. Convert without a tokenizer "
            "(no_tokenizer)."
        )
    try:
        return vars(format_of_models)["ModelProto"].FromString(path.read_bytes())
    except DecodeError as error:
        raise ConversionError(f"{path} is no SentencePiece model: {error}") from error


def _tokenizer(path: Path, vocabulary: dict[str, int]) -> VaswaniTokenizer:
    """Cut text as a SentencePiece model does, into the ids of a vocabulary.

    Raises:
        ConversionError: the model is of a kind that this cannot be said of; names all reasons.
    """
    spm = _read_spm(path)
    trainer, normalizer = spm.trainer_spec, spm.normalizer_spec
    kinds = {1: _unigram, 2: _byte_pairs}
    problems = []
    if trainer.model_type not in kinds:
        problems.append("model_type (it has to be unigram or bpe)")
    if trainer.treat_whitespace_as_suffix:
        problems.append("treat_whitespace_as_suffix")
    if not normalizer.escape_whitespaces:
        problems.append("escape_whitespaces false")
    if spm.denormalizer_spec.precompiled_charsmap:
        problems.append("denormalization_rule_tsv")
    refuse(problems, str(path))
    backend = Tokenizer(kinds[trainer.model_type](spm, vocabulary, path))
    steps: list[Any] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", "▁"))
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    # SentencePiece never finds its special tokens in a text: here, no piece may hold one.
    special = "|".join(token.removeprefix("<") for token in _SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex(f"<(?=(?:{special}))"), "merged_with_previous"
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", left=_MAX_LENGTH, right=0),
        ]
    )
    codes = sorted(token for token in vocabulary if token[:2] == ">>" and token[-2:] == "<<")
    backend.add_tokens([AddedToken(code, normalized=False, special=False) for code in codes])
    return VaswaniTokenizer.from_backend(backend)


# SentencePiece's types of pieces
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6


def _unigram(spm: Any, vocabulary: dict[str, int], path: Path) -> models.Unigram:
    """The pieces most probable together; what SentencePiece does not know has no chance."""
    normal = {piece.piece: piece.score for piece in spm.pieces if piece.type == _NORMAL}
    best = max(normal.values(), default=0.0)
    scores = normal | {
        # As in SentencePiece: better than any pieces that could stand for it together.
        piece.piece: len(piece.piece) * best - 0.1
        for piece in spm.pieces
        if piece.type == _USER_DEFINED
    }
    if missing := scores.keys() - vocabulary.keys():
        logger.warning(
            f"{len(missing)} pieces of {path} have no id in the vocabulary, "
            f"{', '.join(map(repr, sorted(missing)[:3]))} among them: they are not used."
        )
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    return models.Unigram(
        [(name, scores.get(name, _UNREACHABLE)) for name in names],
        unk_id=vocabulary["<unk>"],
        byte_fallback=any(piece.type == _BYTE for piece in spm.pieces),
    )


def _byte_pairs(spm: Any, vocabulary: dict[str, int], path: Path) -> models.BPE:
    """The pairs merged in the order of the merged pieces' scores."""
    scores = {piece.piece: piece.score for piece in spm.pieces if piece.type == _NORMAL}
    problems = [f"the user defined {p.piece!r}" for p in spm.pieces if p.type == _USER_DEFINED]
    if missing := scores.keys() - vocabulary.keys():
        problems.append(
            f"{len(missing)} pieces without an id, {min(missing)!r} among them, which merges need"
        )
    refuse(problems, str(path))
    merges = [
        (score, left, right)
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in scores and (right := piece[cut:]) in scores
    ]
    merges.sort(key=lambda merge: -merge[0])
    return models.BPE(
        vocabulary,
        [(left, right) for _, left, right in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=any(piece.type == _BYTE for piece in spm.pieces),
    )


# Files


def _read_weights(folder: Path) -> Tensors:
    """The weights of a folder of transformers, in one file or several.

    Raises:
        ConversionError: there are none, or a file is damaged.
    """
    readers: dict[str, Callable[[Path], Tensors]] = {
        "model.safetensors": _read_safetensors,
        "pytorch_model.bin": read_checkpoint,
    }
    for name, read in readers.items():
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            paths = [path]
        elif index.is_file():
            files = set(_read_json(index).get("weight_map", {}).values())
            paths = [folder / Path(file).name for file in sorted(files)]
        else:
            continue
        tensors: Tensors = {}
        for part in paths:
            loaded = read(part)
            if not isinstance(loaded, dict) or not all(
                isinstance(tensor, torch.Tensor) for tensor in loaded.values()
            ):
                raise ConversionError(f"{part} is not a dict of tensors.")
            tensors |= loaded
        return tensors
    raise ConversionError(f"{folder} has neither {' nor '.join(readers)}.")


def _read_safetensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is no complete safetensors file: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConversionError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} is not a JSON object.")
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    return _parse_yaml(_read_text(path).encode(), str(path))


def _parse_yaml(text: bytes, place: str, scalar: bool = False) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConversionError(
            f"{place} needs PyYAML ({error}): pip install 'vaswani[convert]'."
        ) from error
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConversionError(f"{place} is no YAML: {error}") from error
    if not scalar and not isinstance(found, dict):
        raise ConversionError(f"{place} does not hold options.")
    return found


# From us to MarianMTModel


def add_save_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `save` but for the output."""
    parser.add_argument("model", metavar="INPUT", help="folder of ours, or its name on the Hub")


def save(model: str | Path | PreTrainedModel, output: str | Path) -> None:
    """Write a folder of MarianMTModel; a model in memory stays as it is, without a tokenizer.

    The tokenizers of a folder go along as tokenizer.json, which AutoTokenizer reads.

    Raises:
        ConversionError: MarianMTModel cannot compute what the model does; names all reasons.
        FileExistsError: something is at `output` already.
    """
    theirs = to_marian(open_model(model))
    source, target = open_tokenizers(model)
    with new_folder(Path(output)) as folder:
        theirs.save_pretrained(folder)
        save_tokenizers(folder, source and _plain(source), target and _plain(target))


def to_marian(model: PreTrainedModel) -> MarianMTModel:
    """Convert a model in memory; it stays as it is.

    Raises:
        ConversionError: MarianMTModel cannot compute what the model does; names all reasons.
    """
    ours: Any = model.config
    refuse(_problems_for_transformers(ours), "The model")
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if ours.position_encoding == "sinusoidal":
        weights = _permuted(weights, _to_concatenated(ours.d_model))
    if "lm_head.bias" not in weights:
        weights["lm_head.bias"] = weights[_HEAD].new_zeros(len(weights[_HEAD]))
    if not ours.attention_bias:
        for name, matrix in list(weights.items()):
            if name.endswith("_proj.weight"):
                weights[name.replace(".weight", ".bias")] = matrix.new_zeros(len(matrix))

    config = MarianConfig(
        vocab_size=ours.vocab_size,
        decoder_vocab_size=ours.decoder_vocab_size,
        # MarianMTModel keeps a table of so many positions.
        **{name: getattr(ours, name) for name in _SAME_FIELDS}
        | {
            "max_position_embeddings": ours.max_position_embeddings or 2 * _MAX_LENGTH,
            "init_std": ours.init_std or ours.d_model**-0.5,
            "forced_eos_token_id": None,
        },
    )
    theirs = MarianMTModel(config).to(weights[_HEAD].dtype)
    places = theirs.state_dict()
    tensors = to_theirs(_transformers_rules(), weights)
    if ours.share_encoder_decoder_embeddings:
        tensors["model.shared.weight"] = tensors[_SOURCE]
    missing = places.keys() - tensors.keys()
    missing -= {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
    if missing or tensors.keys() - places.keys():
        raise ConversionError(
            f"The weights do not fit: {sorted(missing)} are missing, "
            f"{sorted(tensors.keys() - places.keys())} left over."
        )
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    theirs.generation_config = _for_transformers(model.generation_config)
    return theirs.eval()


def _problems_for_transformers(config: Any) -> list[str]:
    """What MarianMTModel does not compute."""
    problems = []
    final_norm = config.final_layer_norm
    if final_norm is None:
        final_norm = config.norm_position == "pre"
    if config.norm_position != "post":
        problems.append(f"norm_position {config.norm_position!r}")
    if final_norm:
        problems.append("final_layer_norm")
    if config.position_encoding not in ("sinusoidal", "sinusoidal_concat"):
        problems.append(f"position_encoding {config.position_encoding!r}")
    if config.position_offset:
        problems.append(f"position_offset {config.position_offset}")
    if not math.isclose(config.layer_norm_eps, 1e-5):
        problems.append(f"layer_norm_eps {config.layer_norm_eps} (it has 1e-05)")
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        for name in ("d_k", "d_v"):
            width = getattr(config, name)
            if config.d_model % heads or width not in (None, config.d_model // heads):
                problems.append(f"{name} {width} with {heads} heads of the {side}")
    for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
        if getattr(config, name) is None:
            problems.append(f"{name} None")
    if config.pad_token_id is not None:
        size = min(config.vocab_size, config.decoder_vocab_size)
        if config.pad_token_id >= size:
            problems.append(
                f"pad_token_id {config.pad_token_id} (it is one for source and target, and one "
                f"of them has {size} entries)"
            )
    return list(dict.fromkeys(problems))


def _for_transformers(given: Any) -> GenerationConfig:
    """The settings that transformers' own search knows; says which it does not."""
    values = {name: value for name, value in given.to_dict().items() if value is not None}
    lost = []
    penalty = values.pop("length_penalty_type", "hf")
    alpha = values.get("length_penalty", 1.0)
    if penalty != "hf":
        lost.append(f"length_penalty_type {penalty!r} with length_penalty {alpha}")
    if penalty != "hf" or alpha == 1.0:
        values.pop("length_penalty", None)
    if values.get("early_stopping") is False:
        del values["early_stopping"]
    offset = values.pop("max_length_offset", 0)
    if offset:
        lost.append(f"max_length_offset {offset} (max_length {_MAX_LENGTH} instead)")
        values["max_length"] = _MAX_LENGTH
    if values.get("num_beams", 1) == 1 and "early_stopping" in values:
        # What waits here for a call that asks for beams is refused there.
        lost.append(f"early_stopping {values.pop('early_stopping')!r} without num_beams")
    if lost:
        logger.warning(f"MarianMTModel has no place for {', '.join(lost)}: not carried over.")
    for name in ("_from_model_config", "transformers_version"):
        values.pop(name, None)
    return GenerationConfig(**values)


def _plain(tokenizer: Any) -> PreTrainedTokenizerFast:
    """The same tokenizer in transformers' own class, which loads without this package."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=tokenizer.pad_token,
        unk_token=tokenizer.unk_token,
        eos_token=tokenizer.eos_token,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


__all__ = ["add_arguments", "add_save_arguments", "convert", "load", "save", "to_marian"]
