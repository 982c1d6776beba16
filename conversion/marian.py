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
not know, each is looked up by itself, even if it would become bytes; where vocab.json lacks a piece
of the .spm (a warning says so), others that it has are used in place of "<unk>"; a ">>xx<<" that
vocab.json lacks is read as text; letters with several separate accents, and half-width Hangul, may
be normalised differently. The scripts around OPUS-MT models that rewrite punctuation are not run.
`target_tokenizer/` in the output cuts target text, by target.spm; either tokenizer decodes.

To search as Marian does, "hf" is the length penalty, with its exponent (`normalize`). A warning
names what else decoder.yml says of the search and is not carried over, such as word penalties and
shortlists. A `max-length-factor` limits each sentence by its own length, where Marian takes the
longest of the batch; without one, and with `--as-transformers`, the limit is 512 tokens.

To Marian, biases that are missing are zeros and the paper's order of positions is permuted. The
penalty of Wu et al. (2016), the limit of input length + 50 and label smoothing have no place there.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from ..configuration.configuration_vaswani import NO_LONGEST_SEQUENCE, VaswaniConfig
from ..modeling.generation_vaswani import VaswaniGenerationConfig
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .checkpoints import (
    TARGET_TOKENIZER,
    Converted,
    add_model_arguments,
    build_model,
    new_folder,
    open_model,
    open_tokenizers,
    read_checkpoint,
    refuse,
    save_tokenizers,
)
from .files import holds_tensors, read_json
from .marian_names import (
    HEAD,
    SOURCE_TABLE,
    TARGET_TABLE,
    marian_rules,
    permuted,
    to_concatenated,
    to_interleaved,
    transformers_rules,
)
from .marian_npz import ACTIVATIONS, MAX_LENGTH, PLACEMENTS, MarianFolder, read_vocabulary
from .rules import ConversionError, Tensors, to_ours, to_theirs
from .sentencepiece import SentencePiece, piece_backend

logger = logging.get_logger(__name__)

_SPECIAL = ("<pad>", "<unk>", "</s>")
# What the fields of old MarianMTModel folders say that no MarianMTModel of today would do.
_OF_OLD_FOLDERS = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "static_position_embeddings": True,
}

# MarianConfig's fields that are ours by the same name.
_SAME_FIELDS = """
d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads
encoder_ffn_dim decoder_ffn_dim dropout attention_dropout activation_dropout activation_function
init_std max_position_embeddings scale_embedding share_encoder_decoder_embeddings
tie_word_embeddings use_cache pad_token_id eos_token_id bos_token_id decoder_start_token_id
"""


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
    if not folder.is_dir():
        raise ConversionError(
            f"There is no folder {folder}: a model of the Hub has to be downloaded first."
        )
    if (folder / "config.json").is_file():
        return _from_transformers(folder, paper_positions, not no_tokenizer)
    if (folder / "decoder.yml").is_file():
        return _from_marian(folder, paper_positions, as_transformers, not no_tokenizer)
    raise ConversionError(f"{folder} has neither config.json (transformers) nor decoder.yml.")


# MarianMTModel to us


def _from_transformers(folder: Path, paper_positions: bool, with_tokenizer: bool) -> Converted:
    given = read_json(folder / "config.json")
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
    tensors = to_ours(transformers_rules(), _with_all_tables(tensors, theirs))
    source, target = _tokenizers_of_transformers(folder) if with_tokenizer else (None, None)
    size = theirs.vocab_size
    config = _configured(
        vocab_size=size,
        decoder_vocab_size=(
            size if theirs.share_encoder_decoder_embeddings else theirs.decoder_vocab_size
        ),
        **{name: getattr(theirs, name) for name in _SAME_FIELDS.split()},
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
    for name in (SOURCE_TABLE, TARGET_TABLE):
        table = tensors.setdefault(name, shared)
        if config.tie_word_embeddings and not torch.equal(table, shared):
            raise ConversionError(f"The weights do not fit: model.shared.weight is not {name}.")
    return tensors


def _generation(folder: Path) -> VaswaniGenerationConfig:
    """The folder's generation config; a folder from before there were any has it in config.json.

    transformers' rules are written down where the paper's are the default.

    Raises:
        ConversionError: it is damaged, or has settings that mean nothing.
    """
    source: dict[str, Any] = {"config_file_name": "generation_config.json"}
    if not (folder / source["config_file_name"]).is_file():
        source = {"config_file_name": "config.json", "_from_model_config": True}
    rules = {
        "length_penalty_type": "hf",
        "length_penalty": 1.0,
        "early_stopping": False,
        "max_length_offset": 0,
    }
    try:
        given = GenerationConfig.from_pretrained(folder, **source)
        return VaswaniGenerationConfig(**(rules | _set_values(given)))
    except (OSError, TypeError, ValueError) as error:
        path = folder / source["config_file_name"]
        raise ConversionError(f"{path} cannot be read: {error}") from error


def _set_values(given: GenerationConfig) -> dict[str, Any]:
    """What a generation config says, without who wrote it."""
    written = ("_from_model_config", "transformers_version")
    values = given.to_dict().items()
    return {name: value for name, value in values if value is not None and name not in written}


def _configured(**settings: Any) -> VaswaniConfig:
    try:
        return VaswaniConfig(**settings)
    except StrictDataclassError as error:
        raise ConversionError(
            f"The options contradict each other: {error.__cause__ or error}"
        ) from error


def _finish(
    config: VaswaniConfig,
    tensors: Tensors,
    generation: VaswaniGenerationConfig,
    paper_positions: bool,
    source: VaswaniTokenizer | None,
    target: VaswaniTokenizer | None,
) -> Converted:
    if paper_positions:
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
    if paper_positions:
        model.load_state_dict(permuted(model.state_dict(), to_interleaved(config.d_model)))
    model.generation_config = generation
    return Converted(model, source, target)


# Marian's own folders to us


def _from_marian(
    path: Path, paper_positions: bool, as_transformers: bool, with_tokenizer: bool
) -> Converted:
    folder = MarianFolder.read(path)
    problems = folder.problems()
    if paper_positions and not as_transformers:
        problems.append(
            "paper_positions (Marian's wavelengths are not the paper's; they are with "
            "as_transformers)"
        )
    refuse(problems, str(path))

    options = folder.options
    norm_position, final_norm = PLACEMENTS[folder.placement]
    tensors = to_ours(marian_rules(norm_position), folder.tensors(as_transformers))
    if folder.shares and not folder.ties:
        # Sharing without tying is not a setting of ours: the tables are equal, but each its own.
        tensors[TARGET_TABLE] = tensors[SOURCE_TABLE].clone()

    source, target = folder.vocabularies()
    tokenizers: list[VaswaniTokenizer | None] = [None, None]
    if with_tokenizer:
        tokenizers = [*map(_tokenizer, folder.sentencepiece_models(), (source, target))]
    ffn = options["transformer-dim-ffn"]
    config = _configured(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        d_model=options["dim-emb"],
        encoder_layers=options["enc-depth"],
        decoder_layers=options["dec-depth"],
        encoder_attention_heads=options["transformer-heads"],
        decoder_attention_heads=options["transformer-heads"],
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=options.get("transformer-decoder-dim-ffn") or ffn,
        activation_function=ACTIVATIONS[options["transformer-ffn-activation"]][as_transformers],
        norm_position=norm_position,
        final_layer_norm=final_norm,
        position_encoding="sinusoidal_concat" if as_transformers else "sinusoidal_t2t",
        attention_bias=True,
        lm_head_bias=True,
        layer_norm_eps=1e-5 if as_transformers else 1e-6,
        tie_word_embeddings=folder.ties,
        share_encoder_decoder_embeddings=folder.shares,
        pad_token_id=target["<pad>"],
        unk_token_id=target["<unk>"],
        eos_token_id=target["</s>"],
        decoder_start_token_id=target["<pad>"],
    )
    generation = folder.generation(target, as_transformers)
    return _finish(config, tensors, generation, paper_positions, *tokenizers)


# Text


def _tokenizers_of_transformers(folder: Path) -> tuple[VaswaniTokenizer, VaswaniTokenizer | None]:
    """MarianTokenizer's files as tokenizers of ours, or those that `save` has left."""
    files = [folder / f"{side}.spm" for side in ("source", "target")]
    if not files[0].is_file() and (folder / "tokenizer.json").is_file():
        own = folder / TARGET_TOKENIZER
        return (
            VaswaniTokenizer.from_pretrained(folder),
            VaswaniTokenizer.from_pretrained(own) if own.is_dir() else None,
        )
    given = {}
    if (folder / "tokenizer_config.json").is_file():
        given = read_json(folder / "tokenizer_config.json")
    names = ("vocab.json", "target_vocab.json" if given.get("separate_vocabs") else "vocab.json")
    vocabularies = [read_vocabulary(folder / name, _SPECIAL) for name in names]
    problems = []
    for name, token in zip(("pad_token", "unk_token", "eos_token"), _SPECIAL, strict=True):
        value = given.get(name) or token
        value = value.get("content") if isinstance(value, dict) else value
        if value != token:
            problems.append(f"{name} {value!r} (it has to be {token!r})")
    for number, token in (given.get("added_tokens_decoder") or {}).items():
        if vocabularies[0].get(token.get("content")) != int(number):
            problems.append(f"added token {token.get('content')!r} (not in vocab.json)")
    refuse(problems, f"The tokenizer of {folder}")
    source, target = map(_tokenizer, files, vocabularies)
    return source, target


def _tokenizer(path: Path, vocabulary: dict[str, int]) -> VaswaniTokenizer:
    """Cut text as a SentencePiece model does, into the ids of a vocabulary.

    Raises:
        ConversionError: the model is missing, damaged, or of a kind that this cannot be said of.
    """
    try:
        backend = piece_backend(SentencePiece.read(path), vocabulary, _SPECIAL)
    except ConversionError as error:
        raise ConversionError(
            f"{error} Without a tokenizer (no_tokenizer) it is not read."
        ) from error
    codes = sorted(token for token in vocabulary if token[:2] == ">>" and token[-2:] == "<<")
    backend.add_tokens([AddedToken(code, normalized=False, special=False) for code in codes])
    return VaswaniTokenizer.from_backend(backend)


# Weights of transformers


def _read_weights(folder: Path) -> Tensors:
    """The weights of a folder of transformers, in one file or several.

    Raises:
        ConversionError: there are none, or a file is damaged.
    """
    names = ("model.safetensors", "pytorch_model.bin")
    for name in names:
        whole, index = folder / name, folder / f"{name}.index.json"
        if whole.is_file():
            return _read_part(whole)
        if index.is_file():
            parts = read_json(index).get("weight_map")
            if not isinstance(parts, dict):
                raise ConversionError(f"{index} has no weight_map.")
            tensors: Tensors = {}
            for part in sorted({Path(str(file)).name for file in parts.values()}):
                tensors |= _read_part(folder / part)
            return tensors
    raise ConversionError(f"{folder} has neither {' nor '.join(names)}.")


def _read_part(path: Path) -> Tensors:
    try:
        loaded = load_file(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is no complete safetensors file: {error}") from error
    if not holds_tensors(loaded):
        raise ConversionError(f"{path} is not a dict of tensors.")
    return dict(loaded)


# From us to MarianMTModel


add_save_arguments = add_model_arguments


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
        weights = permuted(weights, to_concatenated(ours.d_model))
    if "lm_head.bias" not in weights:
        weights["lm_head.bias"] = weights[HEAD].new_zeros(len(weights[HEAD]))
    if not ours.attention_bias:
        for name, matrix in list(weights.items()):
            if name.endswith("_proj.weight"):
                weights[name.replace(".weight", ".bias")] = matrix.new_zeros(len(matrix))

    # MarianMTModel computes its positions once, as a table of this length.
    table = ours.max_position_embeddings
    config = MarianConfig(
        vocab_size=ours.vocab_size,
        decoder_vocab_size=ours.decoder_vocab_size,
        **{name: getattr(ours, name) for name in _SAME_FIELDS.split()}
        | {
            "max_position_embeddings": 2 * MAX_LENGTH if table == NO_LONGEST_SEQUENCE else table,
            "init_std": ours.init_std or ours.d_model**-0.5,
            "forced_eos_token_id": None,
        },
    )
    theirs = MarianMTModel(config).to(weights[HEAD].dtype)
    places = theirs.state_dict()
    tensors = to_theirs(transformers_rules(), weights)
    if ours.share_encoder_decoder_embeddings:
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
    theirs.generation_config = _for_transformers(model.generation_config)
    return theirs.eval()


def _problems_for_transformers(config: Any) -> list[str]:
    """What MarianMTModel does not compute."""
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
    size = min(config.vocab_size, config.decoder_vocab_size)
    if config.pad_token_id is not None and config.pad_token_id >= size:
        problems.append(
            f"pad_token_id {config.pad_token_id} (it is one for source and target, and one of them "
            f"has {size} entries)"
        )
    return list(dict.fromkeys(problems))


def _for_transformers(given: Any) -> GenerationConfig:
    """The settings that transformers' own search knows; says which it does not."""
    values, lost = _set_values(given), []
    penalty = values.pop("length_penalty_type", "hf")
    alpha = values.get("length_penalty", 1.0)
    if penalty != "hf":
        lost.append(f"length_penalty_type {penalty!r} with length_penalty {alpha}")
    if penalty != "hf" or alpha == 1.0:
        values.pop("length_penalty", None)
    if values.get("early_stopping") is False:
        del values["early_stopping"]
    names = ("max_length_offset", "max_length_factor")
    if limits := [f"{name} {value}" for name in names if (value := values.pop(name, 0))]:
        lost.append(f"{' and '.join(limits)} (max_length {MAX_LENGTH} instead)")
        values["max_length"] = MAX_LENGTH
    if values.get("num_beams", 1) == 1 and "early_stopping" in values:
        # What waits here for a call that asks for beams is refused there.
        lost.append(f"early_stopping {values.pop('early_stopping')!r} without num_beams")
    if lost:
        logger.warning(f"MarianMTModel has no place for {', '.join(lost)}: not carried over.")
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
