r"""From JoeyNMT 2: a Transformer's checkpoint, config.yaml and vocabularies.

    vaswani convert joeynmt models/deen out/
    vaswani convert joeynmt 30000.ckpt out/ --config config.yaml \
        --source-vocab src_vocab.txt --target-vocab trg_vocab.txt

INPUT is a checkpoint, the folder of a training, or the id of such a folder on the Hub. In a folder,
the checkpoint is best.ckpt, else latest.ckpt, else the only .ckpt file. The other files are looked
for beside the checkpoint: config.yaml, src_vocab.txt, trg_vocab.txt (else the file that
data.src.voc_file names), and SentencePiece's models.

Differences between JoeyNMT and this package:

* LayerNorm. Without the option layer_norm, an encoder is post-norm up to JoeyNMT 2.1. From 2.2 on
  it is pre-norm without the LayerNorm after the stack, which has no counterpart here. The version
  in joeynmt_version decides.
* Dropout. Both stacks get the rates of the decoder.
* Label smoothing. JoeyNMT spreads it over the entries of the target's vocabulary other than the
  right one and padding, this package over all. The rate is carried over as it is.
* Tied embeddings. With tied_embeddings but not tied_softmax, the output has two equal tables.
* Tokenizers. Levels word (at single spaces), char, and bpe with SentencePiece are carried over, and
  so are lowercase and normalize. If the tokens of source and target differ, the target's tokenizer
  is in target_tokenizer/. Decoding with skip_special_tokens leaves out <unk>, which is a special
  token here.
* Combining accents. The tokenizers library applies SentencePiece's character table. After a
  character that the table replaces, such as a ligature, it loses a combining accent.
* Ties. A long run of one mark, such as "!!!!", may be split differently by a unigram model, if
  splits are equally probable.
* Moses, subword-nmt and other tools. With --pretokenized, the tokenizers take tokens between
  spaces. Run those tools before and after. JoeyNMT lets subword-nmt split tokens again if the
  vocabulary lacks them. Do the same.
* Search. The section testing sets the beam, its length penalty, the length limit, and the tokens
  that are never generated. "max_output_length: -1" is 1.5 times the longest source of a batch in
  JoeyNMT, and 1.5 times each source's own length here. This package stops when no open hypothesis
  can win. JoeyNMT has another rule: finished hypotheses keep their place in its beam.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.positions_vaswani import SinusoidalPositions
from .errors import ConversionError, refuse
from .joeynmt_options import generation_settings, model_settings, read_config
from .joeynmt_text import Symbols, Vocabulary
from .loading import Converted, build_model
from .reading import is_state_dict, local_path, read_checkpoint
from .rules import Drop, Rename, Rule, Tensors, to_ours

# Files of a repository on the Hub.
_FILES, _CHECKPOINTS = ("*.yaml", "*.txt", "*.model"), ("best.ckpt", "latest.ckpt", "*.ckpt")
# NumPy's numbers, for scores in the statistics of a training.
_HARMLESS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")


def _check_positions(name: str, table: torch.Tensor) -> None:
    """Refuse a table of positions that differs from the paper's."""
    if table.dim() == 3 and len(table) == 1 and table.shape[-1] % 2 == 0:
        width = table.shape[-1]
        config = VaswaniConfig(d_model=width, encoder_attention_heads=1, decoder_attention_heads=1)
        sinusoids = SinusoidalPositions(config)(0, table.shape[1], torch.device("cpu"))
        # float32 holds angles in the thousands to 1e-4.
        if torch.allclose(table[0].float(), sinusoids, rtol=0, atol=1e-3):
            return
    raise ConversionError(f"{name} is not the table of sines and cosines of section 3.5.")


def _attention(theirs: str, ours: str) -> list[Rule]:
    names = {"k_layer": "k_proj", "v_layer": "v_proj", "q_layer": "q_proj"}
    names |= {"output_layer": "out_proj"}
    return [Rename(f"{theirs}.{a}.{{kind}}", f"{ours}.{b}.{{kind}}") for a, b in names.items()]


def _feed_forward(theirs: str, ours: str) -> list[Rule]:
    names = {"layer_norm": "final_layer_norm", "pwff_layer.0": "fc1", "pwff_layer.3": "fc2"}
    return [
        Rename(f"{theirs}.feed_forward.{a}.{{kind}}", f"{ours}.{b}.{{kind}}")
        for a, b in names.items()
    ]


_ENCODER, _DECODER = "encoder.layers.{i}", "decoder.layers.{i}"
RULES: tuple[Rule, ...] = (
    Rename("src_embed.lut.weight", "model.encoder.embed_tokens.weight"),
    Rename("trg_embed.lut.weight", "model.decoder.embed_tokens.weight"),
    Drop("{stack}.pe.pe", _check_positions),
    *_attention(f"{_ENCODER}.src_src_att", f"model.{_ENCODER}.self_attn"),
    Rename(f"{_ENCODER}.layer_norm.{{kind}}", f"model.{_ENCODER}.self_attn_layer_norm.{{kind}}"),
    *_feed_forward(_ENCODER, f"model.{_ENCODER}"),
    *_attention(f"{_DECODER}.trg_trg_att", f"model.{_DECODER}.self_attn"),
    Rename(f"{_DECODER}.x_layer_norm.{{kind}}", f"model.{_DECODER}.self_attn_layer_norm.{{kind}}"),
    *_attention(f"{_DECODER}.src_trg_att", f"model.{_DECODER}.encoder_attn"),
    Rename(
        f"{_DECODER}.dec_layer_norm.{{kind}}", f"model.{_DECODER}.encoder_attn_layer_norm.{{kind}}"
    ),
    *_feed_forward(_DECODER, f"model.{_DECODER}"),
    Rename("{stack}.layer_norm.{kind}", "model.{stack}.layer_norm.{kind}"),
    Rename("decoder.output_layer.weight", "lm_head.weight"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `convert`, all but the output."""
    parser.add_argument(
        "checkpoint", metavar="INPUT", help=".ckpt file, folder of a training, or its id on the Hub"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="default: config.yaml beside the checkpoint"
    )
    parser.add_argument(
        "--source-vocab", metavar="FILE", help="default: src_vocab.txt beside the checkpoint"
    )
    parser.add_argument(
        "--target-vocab", metavar="FILE", help="default: trg_vocab.txt beside the checkpoint"
    )
    parser.add_argument(
        "--pretokenized", action="store_true", help="texts will be tokens between spaces"
    )


def convert(checkpoint: str | Path, output: str | Path, **options: Any) -> None:
    """Write a folder for `from_pretrained`; the options are the arguments of `load`.

    Raises:
        ConversionError: the model cannot be converted exactly.
        FileExistsError: `output` exists already.
    """
    load(checkpoint, **options).save(Path(output))


def load(
    checkpoint: str | Path,
    *,
    config: str | Path | None = None,
    source_vocab: str | Path | None = None,
    target_vocab: str | Path | None = None,
    pretokenized: bool = False,
) -> Converted:
    """Convert a model and its tokenizers in memory.

    Args:
        checkpoint: a .ckpt file, the folder of a training, or its id on the Hub.
        config: config.yaml. By default it is beside the checkpoint.
        source_vocab, target_vocab: files of the vocabularies. By default they are there, too.
        pretokenized: make tokenizers that take tokens between spaces.

    Raises:
        ConversionError: files are missing, damaged or inconsistent, or options have no counterpart
            here.
    """
    file = _checkpoint_file(local_path(checkpoint, _FILES, _CHECKPOINTS))
    problems: list[str] = []
    options = read_config(Path(config) if config else file.parent / "config.yaml", problems)
    data = options.section("data")
    symbols = Symbols.read(data.section("special_symbols"))
    source, target = [
        Vocabulary.read(data.section(side), side, named, file.parent, symbols, pretokenized)
        for side, named in (("src", source_vocab), ("trg", target_vocab))
    ]
    data.ignore("train", "dev", "test", "dataset_type", "dataset_cfg", "sample_train_subset")
    data.ignore("sample_dev_subset", "random_train_subset", "random_dev_subset")
    data.refuse_unread()
    fields = model_settings(options, source.tokens, target.tokens)
    generation = generation_settings(options.section("testing"), len(symbols.further))
    backends = [backend for side in (source, target) if (backend := side.backend()) is not None]
    refuse(problems, str(file))

    tensors = _weights(file)
    for name, vocabulary in (("src_embed", source), ("trg_embed", target)):
        table = tensors.get(f"{name}.lut.weight")
        if table is not None and len(table) != len(vocabulary.tokens):
            raise ConversionError(
                f"{vocabulary.file} makes a vocabulary of {len(vocabulary.tokens)} tokens, but "
                f"{name} of the checkpoint has {len(table)}."
            )
    model = build_model(VaswaniConfig(**fields), to_ours(RULES, tensors))
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    one_tokenizer = backends[0].to_str() == backends[1].to_str()
    tokenizers = [symbols.tokenizer(backend) for backend in backends]
    return Converted(model, tokenizers[0], None if one_tokenizer else tokenizers[1])


def _checkpoint_file(given: Path) -> Path:
    """Find the checkpoint in the folder of a training."""
    if given.is_file():
        return given
    found = sorted(given.glob("*.ckpt"))
    for name in ("best.ckpt", "latest.ckpt"):
        if (given / name).is_file():
            return given / name
    if len(found) == 1 and found[0].is_file():
        return found[0]
    names = ", ".join(path.name for path in found) or "no .ckpt"
    raise ConversionError(f"{given} holds {names}: name the checkpoint to convert.")


def _weights(file: Path) -> Tensors:
    content = read_checkpoint(file, _HARMLESS)
    state = content.get("model_state") if isinstance(content, dict) else None
    if not is_state_dict(state):
        raise ConversionError(f"{file} holds no model_state: it is not a checkpoint of JoeyNMT.")
    return dict(state)


__all__ = ["RULES", "add_arguments", "convert", "load"]
