"""From Marian: folders of transformers' MarianMTModel, and folders of OPUS-MT.

    vaswani convert marian Helsinki-NLP/opus-mt-en-de out/
    vaswani convert marian opus-2021-02-22/ out/

INPUT is a folder, or its id on the Hub. A folder of transformers has config.json with
model.safetensors or pytorch_model.bin. A folder of Marian itself has decoder.yml with the .npz and
the vocabularies that it names. Both have source.spm and target.spm.

transformers and Marian compute different results from the same weights. The converter follows both
exactly:

* Marian has tensor2tensor's sinusoids, a LayerNorm epsilon of 1e-6, x * sigmoid(1.702 x) for
  "gelu", and no padding token in the softmax.
* transformers and CTranslate2 read the same .npz with the paper's sinusoids and 1e-5. They add a
  padding token with the logit 0.
* --as-transformers makes a folder of Marian compute what its copy on the Hub does. A model without
  this option cannot become a MarianMTModel.
* Folders of transformers and of Marian store all sines, then all cosines. --paper-positions
  alternates them as in the paper, by one permutation of d_model in all weights. A folder of Marian
  needs --as-transformers as well.

The tokenizers split text with SentencePiece. Special tokens in a text stay text. target_tokenizer/
splits target text with target.spm. Either tokenizer decodes.

Differences from MarianTokenizer:

* ">>xx<<" is one token anywhere. MarianTokenizer finds it only at the start of a text.
* With byte fallback in source.spm, characters that vocab.json has are not turned into bytes.
* If vocab.json lacks pieces of the .spm file, a warning names them. Other pieces replace them, not
  "<unk>".
* A ">>xx<<" that vocab.json lacks is text.
* Combining accents in an unusual order, or after a character that SentencePiece's table replaces,
  and half-width Hangul may be normalised differently.
* A long run of one mark, such as "!!!!", may be split differently if splits are equally probable.
* The scripts around OPUS-MT models that rewrite punctuation are not run.

The generation config searches as Marian does, with length_penalty_type="hf" and Marian's exponent
(normalize). A warning names the settings of decoder.yml that are not carried over, such as word
penalties and shortlists. max-length-factor limits each sentence by its own length, while Marian
takes the longest sentence of the batch. The default factor is 3. With --as-transformers, the limit
is 512 tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import GenerationConfig, MarianConfig
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..generation.settings_vaswani import VaswaniGenerationConfig
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .errors import ConversionError, refuse, refusing
from .loading import TARGET_TOKENIZER, Converted, build_model
from .marian_folder import ACTIVATIONS, PLACEMENTS, MarianFolder
from .marian_names import (
    SAME_FIELDS,
    SOURCE_TABLE,
    TARGET_TABLE,
    marian_rules,
    permuted,
    to_interleaved,
    transformers_rules,
)
from .marian_vocabulary import read_vocabulary
from .reading import is_state_dict, local_path, read_checkpoint, read_json
from .rules import Tensors, to_ours
from .sentencepiece import SentencePiece, piece_backend

logger = logging.get_logger(__name__)

_SPECIAL = ("<pad>", "<unk>", "</s>")
# Settings of sampling, which mean nothing without `do_sample`, with the values that change nothing.
_SAMPLING = {
    **{"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "top_h": None},
    **{"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0},
}
# Files of a repository on the Hub, then its weights.
_FILES = ("*.json", "*.spm", "*.yml")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.npz")
# Fields of old MarianMTModel folders, with the only values that MarianMTModel still computes.
_OLD_FIELDS = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "static_position_embeddings": True,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `convert`, all but the output."""
    parser.add_argument(
        "checkpoint", metavar="INPUT", help="folder of the model, or its id on the Hub"
    )
    parser.add_argument(
        "--paper-positions",
        action="store_true",
        help="permute d_model so that sines and cosines alternate, as in the paper",
    )
    parser.add_argument(
        "--as-transformers",
        action="store_true",
        help="make a folder of Marian compute what transformers and CTranslate2 compute",
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="convert only the weights and the settings"
    )


def convert(
    checkpoint: str | Path,
    output: str | Path,
    paper_positions: bool = False,
    as_transformers: bool = False,
    no_tokenizer: bool = False,
) -> None:
    """Write a folder for `from_pretrained`; the other arguments are those of `load`.

    Raises:
        ConversionError: the model cannot be converted exactly.
        FileExistsError: `output` exists already.
    """
    load(checkpoint, paper_positions, as_transformers, no_tokenizer).save(Path(output))


def load(
    checkpoint: str | Path,
    paper_positions: bool = False,
    as_transformers: bool = False,
    no_tokenizer: bool = False,
) -> Converted:
    """Convert a model in memory.

    Args:
        checkpoint: a folder of MarianMTModel or of Marian, or its id on the Hub.
        paper_positions: permute d_model so that sines and cosines alternate.
        as_transformers: make a folder of Marian compute what transformers computes. Other folders
            do so anyway.
        no_tokenizer: leave out the tokenizers, which need sentencepiece.

    Raises:
        ConversionError: the model cannot be converted exactly.
    """
    folder = local_path(checkpoint, _FILES, _WEIGHTS)
    if (folder / "config.json").is_file():
        return _from_transformers(folder, paper_positions, not no_tokenizer)
    if (folder / "decoder.yml").is_file():
        return _from_marian(folder, paper_positions, as_transformers, not no_tokenizer)
    raise ConversionError(f"{folder} has neither config.json (transformers) nor decoder.yml.")


# Folders of transformers


def _from_transformers(folder: Path, paper_positions: bool, with_tokenizer: bool) -> Converted:
    their_config = _their_config(folder)
    tensors = _read_weights(folder)
    bias = tensors.get("final_logits_bias")
    if bias is not None and not bias.any():
        del tensors["final_logits_bias"]
    tensors = to_ours(transformers_rules(), _with_all_tables(tensors, their_config))
    source, target = _their_tokenizers(folder) if with_tokenizer else (None, None)
    size = their_config.vocab_size
    shared = their_config.share_encoder_decoder_embeddings
    with refusing("The options contradict each other"):
        config = VaswaniConfig(
            vocab_size=size,
            decoder_vocab_size=size if shared else their_config.decoder_vocab_size,
            **{name: getattr(their_config, name) for name in SAME_FIELDS.split()},
            label_smoothing=0.0,
            position_encoding="sinusoidal_concat",
            attention_bias=True,
            lm_head_bias="lm_head.bias" in tensors,
            unk_token_id=None if source is None else source.unk_token_id,
        )
    return _finish(config, tensors, _generation(folder), paper_positions, source, target)


def _their_config(folder: Path) -> MarianConfig:
    """Read and check config.json.

    Raises:
        ConversionError: it is not that of a MarianMTModel that can be converted.
    """
    given = read_json(folder / "config.json")
    if given.get("model_type") != "marian":
        raise ConversionError(
            f"{folder} holds a model of type {given.get('model_type')!r}, not 'marian'."
        )
    problems = [
        f"{name} {given[name]}"
        for name, value in _OLD_FIELDS.items()
        if given.get(name) not in (None, value)
    ]
    with refusing(f"{folder / 'config.json'} cannot be read"):
        config = MarianConfig.from_pretrained(folder)
    if config.is_decoder or not config.is_encoder_decoder:
        problems.append("is_decoder (only a decoder)")
    if config.d_model % 2:
        problems.append(f"d_model {config.d_model} (odd)")
    refuse(problems, str(folder))
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name):
            logger.warning(
                f"{name} {getattr(config, name)} is not carried over. It only matters in training."
            )
    return config


def _with_all_tables(tensors: Tensors, config: MarianConfig) -> Tensors:
    """Give each stack its name for the shared table.

    Raises:
        ConversionError: the table of a stack has other values.
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
    """Read the generation config. Old folders have its settings in config.json.

    The defaults of transformers are written out, because the paper's are the defaults here.

    Raises:
        ConversionError: the file is damaged or has meaningless settings.
    """
    source: dict[str, Any] = {"config_file_name": "generation_config.json"}
    if not (folder / source["config_file_name"]).is_file():
        source = {"config_file_name": "config.json", "_from_model_config": True}
    defaults = {
        "length_penalty_type": "hf",
        "length_penalty": 1.0,
        "early_stopping": False,
        "max_length_offset": 0,
    }
    with refusing(f"{folder / source['config_file_name']} cannot be read"):
        given = GenerationConfig.from_pretrained(folder, **source).to_dict()
        for name in ("_from_model_config", "transformers_version"):
            given.pop(name, None)
        given = {name: value for name, value in given.items() if value is not None}
        if "bos_token_id" in given:  # transformers starts with it, too
            given.setdefault("decoder_start_token_id", given["bos_token_id"])
        if not given.get("do_sample"):
            _drop_sampling(given)
        return VaswaniGenerationConfig(**(defaults | given))


def _drop_sampling(settings: dict[str, Any]) -> None:
    """Remove settings of sampling that transformers does not save without `do_sample`."""
    changed = [
        name for name, neutral in _SAMPLING.items() if settings.get(name, neutral) != neutral
    ]
    if dropped := {name: settings.pop(name) for name in changed}:
        listed = ", ".join(f"{name} {value}" for name, value in dropped.items())
        logger.warning(
            f"These settings have no effect without do_sample and are dropped: {listed}."
        )


def _read_weights(folder: Path) -> Tensors:
    """Read the weights of a folder of transformers, in one file or several.

    Raises:
        ConversionError: there are none, or a file is damaged.
    """
    names = ("model.safetensors", "pytorch_model.bin")
    for name in names:
        file, index = folder / name, folder / f"{name}.index.json"
        if file.is_file():
            return _read_weight_file(file)
        if index.is_file():
            parts = read_json(index).get("weight_map")
            if not isinstance(parts, dict):
                raise ConversionError(f"{index} has no weight_map.")
            tensors: Tensors = {}
            for part in sorted({Path(str(file)).name for file in parts.values()}):
                tensors |= _read_weight_file(folder / part)
            return tensors
    raise ConversionError(f"{folder} has neither {' nor '.join(names)}.")


def _read_weight_file(path: Path) -> Tensors:
    try:
        loaded = load_file(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is not a complete safetensors file: {error}") from error
    if not is_state_dict(loaded):
        raise ConversionError(f"{path} is not a dict of tensors.")
    return dict(loaded)


# Folders of Marian


def _from_marian(
    path: Path, paper_positions: bool, as_transformers: bool, with_tokenizer: bool
) -> Converted:
    folder = MarianFolder.read(path)
    problems = folder.problems()
    if paper_positions and not as_transformers:
        problems.append(
            "paper_positions without as_transformers (Marian's wavelengths are not the paper's)"
        )
    refuse(problems, str(path))

    options = folder.options
    norm_position, final_norm = PLACEMENTS[folder.placement]
    tensors = to_ours(marian_rules(norm_position), folder.tensors(as_transformers))
    if folder.shares and not folder.ties:
        # We have no setting for this. Two equal tables give the same results.
        tensors[TARGET_TABLE] = tensors[SOURCE_TABLE].clone()

    source, target = folder.vocabularies()
    tokenizers: list[VaswaniTokenizer | None] = [None, None]
    if with_tokenizer:
        tokenizers = [*map(_tokenizer, folder.sentencepiece_models(), (source, target))]
    ffn_dim = options["transformer-dim-ffn"]
    with refusing("The options contradict each other"):
        config = VaswaniConfig(
            vocab_size=len(source),
            decoder_vocab_size=len(target),
            d_model=options["dim-emb"],
            encoder_layers=options["enc-depth"],
            decoder_layers=options["dec-depth"],
            encoder_attention_heads=options["transformer-heads"],
            decoder_attention_heads=options["transformer-heads"],
            encoder_ffn_dim=ffn_dim,
            decoder_ffn_dim=options.get("transformer-decoder-dim-ffn") or ffn_dim,
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


# Both


def _finish(
    config: VaswaniConfig,
    tensors: Tensors,
    generation: VaswaniGenerationConfig,
    paper_positions: bool,
    source: VaswaniTokenizer | None,
    target: VaswaniTokenizer | None,
) -> Converted:
    """Build the model in the dtype of its weights, and permute it if that is wanted."""
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


def _their_tokenizers(folder: Path) -> tuple[VaswaniTokenizer, VaswaniTokenizer | None]:
    """Convert the files of MarianTokenizer, or load those that `to_marian.save` has written."""
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
            problems.append(f"{name} {value!r} (it must be {token!r})")
    for number, token in (given.get("added_tokens_decoder") or {}).items():
        if vocabularies[0].get(token.get("content")) != int(number):
            problems.append(f"added token {token.get('content')!r} (not in vocab.json)")
    refuse(problems, f"The tokenizer of {folder}")
    source, target = map(_tokenizer, files, vocabularies)
    return source, target


def _tokenizer(path: Path, vocabulary: dict[str, int]) -> VaswaniTokenizer:
    """Make a tokenizer of a SentencePiece model and a vocabulary.

    Raises:
        ConversionError: the model is missing, is damaged, or uses features without a counterpart.
    """
    try:
        backend = piece_backend(SentencePiece.read(path), vocabulary, _SPECIAL)
    except ConversionError as error:
        raise ConversionError(
            f"{error} To convert the model without tokenizers, pass no_tokenizer."
        ) from error
    codes = sorted(token for token in vocabulary if token[:2] == ">>" and token[-2:] == "<<")
    backend.add_tokens([AddedToken(code, normalized=False, special=False) for code in codes])
    return VaswaniTokenizer.from_backend(backend)


__all__ = ["add_arguments", "convert", "load"]
