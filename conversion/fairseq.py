r"""From fairseq: a Transformer's checkpoint and its dictionaries.

    vaswani convert fairseq checkpoint_best.pt out/ --source-dict dict.de.txt \
        --target-dict dict.en.txt --bpe-codes code

INPUT is a checkpoint of any version of fairseq, with the model "transformer" or one of its
architectures. An average of checkpoints or a member of an ensemble works too. The dictionaries are
the files of fairseq-preprocess. One dictionary is enough for a model that shares all embeddings.
Any other model needs two; give a joint dictionary twice. Without dictionaries, the output has no
tokenizer.

Differences between fairseq and this package:

* Positions. fairseq has tensor2tensor's sinusoids, and the first position is number 2, the number
  of the padding token plus one. This becomes position_encoding="sinusoidal_t2t" with
  position_offset=2. Learned positions start at 2 as well. fairseq pads sources on the left, but
  counts from the first real token. Padding on the right gives the same numbers.
* Label smoothing. fairseq spreads it over the K - 1 wrong entries of the target's dictionary, this
  package over all K. The criterion's rate is multiplied by K / (K - 1), which makes the losses
  equal.
* LayerDrop (encoder_layerdrop, decoder_layerdrop). It skips layers in training only. All layers are
  kept, and the rate is lost.
* Search. The generation config has the defaults of fairseq-generate: 5 beams, scores divided by
  length, and a stop at as many finished hypotheses as beams. Translations have 1 to 200 tokens
  before the end token, and never the padding token. The checkpoint's own settings (cfg.generation)
  replace beam, lenpen, unnormalized, min_len, max_len_a and max_len_b. With max_len_a, each
  sentence is limited by its own length. fairseq takes the longest sentence of the batch, and stops
  at max_target_positions too.
* Translations. The best translation is fairseq's. Further ones (num_return_sequences) may differ,
  because fairseq keeps the first 5 hypotheses to finish and this package the best 5. Translations
  cut off at the limit may differ too, because only fairseq counts the probability of the end token
  that is forced there.

The tokenizers:

* Without options they take tokens between spaces, as fairseq does. When decoding, --remove-bpe
  joins tokens at "@@ ".
* With --bpe-codes, of subword-nmt or fastBPE, they take words between spaces, such as the output of
  Moses' tokenizer. They split words, and join them when decoding. Any white space separates words,
  but subword-nmt and fastBPE read some of it as letters.
  A symbol that the dictionary lacks becomes <unk>. `subword-nmt apply-bpe --vocabulary` would split
  the symbol again.
* With --sentencepiece-model they take plain text. After a character that SentencePiece's table
  replaces, they may lose a combining accent. A long run of one mark, such as "!!!!", may be split
  differently by a unigram model, if splits are equally probable.
* Tokens that the dictionary lacks become <unk>. So do "<s>", "<pad>" and "</s>" in a text. Decoding
  with skip_special_tokens leaves out <unk>, which fairseq prints, and joins nothing across it.
* If source and target differ in their dictionaries or in how text is split, the target's tokenizer
  is in target_tokenizer/.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from .errors import ConversionError, refuse, refusing
from .fairseq_options import (
    STACKS,
    final_norms,
    generation_config,
    model_config,
    option_problems,
    read_options,
)
from .fairseq_text import Vocabulary, read_vocabulary
from .loading import Converted, build_model
from .reading import is_state_dict, read_checkpoint
from .rules import Drop, Rename, Rule, Stack, to_ours

# Current names come first, because `to_theirs` uses the first name that fits.
RULES: list[Rule] = [
    Rename(
        "{stack}.layers.{i}.{attention}.{part}_proj.{kind}",
        "model.{stack}.layers.{i}.{attention}.{part}_proj.{kind}",
    ),
    Rename(
        "{stack}.layers.{i}.{name}_layer_norm.{kind}",
        "model.{stack}.layers.{i}.{name}_layer_norm.{kind}",
    ),
    Rename("{stack}.layers.{i}.fc{n}.{kind}", "model.{stack}.layers.{i}.fc{n}.{kind}"),
    Rename("{stack}.layer_norm.{kind}", "model.{stack}.layer_norm.{kind}"),
    Rename("{stack}.embed_tokens.weight", "model.{stack}.embed_tokens.weight"),
    Rename("{stack}.embed_positions.weight", "model.{stack}.embed_positions.weight"),
    Rename("decoder.output_projection.weight", "lm_head.weight"),
    # Older names.
    Rename("decoder.embed_out", "lm_head.weight"),
    Stack(
        "{stack}.layers.{i}.{attention}.in_proj_{kind}",
        [f"model.{{stack}}.layers.{{i}}.{{attention}}.{part}_proj.{{kind}}" for part in "qkv"],
    ),
    *(
        Rename(
            f"{stack}.layers.{{i}}.layer_norms.{number}.{{kind}}",
            f"model.{stack}.layers.{{i}}.{name}_layer_norm.{{kind}}",
        )
        for stack, names in (
            ("encoder", ("self_attn", "final")),
            ("decoder", ("self_attn", "encoder_attn", "final")),
        )
        for number, name in enumerate(names)
    ),
    # fairseq computes these tensors when it loads a model.
    Drop("{stack}.version"),
    Drop("{stack}.embed_positions._float_tensor"),
    Drop("{stack}.embed_positions.weights"),
    *(
        Drop(f"encoder.layers.{{i}}.{name}_{{kind}}")
        for name in ("in_proj", "out_proj", "fc1", "fc2")
    ),
]

# Classes in checkpoints of fairseq 0.6 to 0.12: options, their types, and meters of the training.
_HARMLESS = """
argparse.Namespace collections.defaultdict _codecs.encode _operator.getitem
builtins.bool builtins.dict builtins.float builtins.int builtins.list builtins.str builtins.tuple
fairseq.data.dictionary.Dictionary
fairseq.logging.meters.AverageMeter fairseq.meters.AverageMeter
fairseq.logging.meters.StopwatchMeter fairseq.meters.StopwatchMeter
fairseq.logging.meters.TimeMeter fairseq.meters.TimeMeter
numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.dtype
omegaconf.base.ContainerMetadata omegaconf.base.Metadata
omegaconf.dictconfig.DictConfig omegaconf.listconfig.ListConfig
omegaconf.nodes.AnyNode omegaconf.nodes.BooleanNode omegaconf.nodes.BytesNode
omegaconf.nodes.EnumNode omegaconf.nodes.FloatNode omegaconf.nodes.IntegerNode
omegaconf.nodes.PathNode omegaconf.nodes.StringNode
typing.Any typing.Dict typing.List typing.Optional typing.Tuple typing.Union
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `convert`, all but the output."""
    parser.add_argument("checkpoint", metavar="INPUT", help="checkpoint, a .pt file")
    parser.add_argument("--source-dict", metavar="FILE", help="dict.xx.txt of the source language")
    parser.add_argument(
        "--target-dict",
        metavar="FILE",
        help="dict.xx.txt of the target language; default with shared embeddings: --source-dict",
    )
    parser.add_argument("--bpe-codes", metavar="FILE", help="codes of subword-nmt or fastBPE")
    parser.add_argument(
        "--target-bpe-codes", metavar="FILE", help="codes of the target; default: --bpe-codes"
    )
    parser.add_argument("--sentencepiece-model", metavar="FILE", help="SentencePiece's .model file")
    parser.add_argument(
        "--target-sentencepiece-model",
        metavar="FILE",
        help=".model file of the target; default: --sentencepiece-model",
    )
    parser.add_argument(
        "--remove-bpe", action="store_true", help='join tokens at "@@ " when decoding'
    )


def convert(checkpoint: str | Path, output: str | Path, **options: Any) -> None:
    """Write a folder for `from_pretrained`; the options are the arguments of `load`.

    Raises:
        ConversionError: the checkpoint cannot be converted exactly.
        FileExistsError: `output` exists already.
    """
    load(checkpoint, **options).save(Path(output))


def load(
    checkpoint: str | Path,
    source_dict: str | Path | None = None,
    target_dict: str | Path | None = None,
    bpe_codes: str | Path | None = None,
    target_bpe_codes: str | Path | None = None,
    sentencepiece_model: str | Path | None = None,
    target_sentencepiece_model: str | Path | None = None,
    remove_bpe: bool = False,
) -> Converted:
    """Convert a checkpoint in memory, with tokenizers if dictionaries are given.

    Args:
        checkpoint: a .pt file.
        source_dict, target_dict: dict.xx.txt. Either one serves both sides if all embeddings are
            shared.
        bpe_codes, target_bpe_codes: codes of byte-pair encoding. The first serves both sides by
            default.
        sentencepiece_model, target_sentencepiece_model: models of SentencePiece, likewise.
        remove_bpe: join tokens at "@@ " when decoding, if neither codes nor models are given.

    Raises:
        ConversionError: something is missing, damaged, or cannot be converted exactly.
    """
    path = Path(checkpoint)
    model = _load_model(path)
    segmentation = (bpe_codes, target_bpe_codes, sentencepiece_model, target_sentencepiece_model)
    dictionaries = [file for file in (source_dict, target_dict) if file is not None]
    if not dictionaries:
        if any(segmentation):
            raise ConversionError("Codes and models need a dictionary: give source_dict.")
        return Converted(model)
    source = read_vocabulary(dictionaries[0], bpe_codes, sentencepiece_model, remove_bpe)
    target = read_vocabulary(
        dictionaries[-1],
        target_bpe_codes or bpe_codes,
        target_sentencepiece_model or sentencepiece_model,
        remove_bpe,
    )
    refuse(_misfits(model.config, dictionaries, source, target), str(path))
    return Converted(model, source.tokenizer(), None if source == target else target.tokenizer())


def _misfits(
    config: VaswaniConfig,
    dictionaries: Sequence[str | Path],
    source: Vocabulary,
    target: Vocabulary,
) -> list[str]:
    """List why dictionaries, one or two, do not fit the embeddings."""
    files = dictionaries[0], dictionaries[-1]
    sides = (
        ("source", files[0], source, config.vocab_size),
        ("target", files[1], target, config.decoder_vocab_size),
    )
    problems = [
        f"{file} makes {len(vocabulary.symbols)} entries, the {side} embedding has {size}"
        for side, file, vocabulary, size in sides
        if len(vocabulary.symbols) != size
    ]
    if config.share_encoder_decoder_embeddings and source.symbols != target.symbols:
        problems.append(f"{files[0]} and {files[1]} differ, but share their embeddings")
    if not config.share_encoder_decoder_embeddings and len(dictionaries) == 1:
        problems.append(
            f"{files[0]} alone cannot serve both sides, because their embeddings differ (give "
            "source_dict and target_dict, or a joint dictionary as both)"
        )
    return problems


def _load_model(path: Path) -> VaswaniForConditionalGeneration:
    """Convert weights, configuration and generation config."""
    state = read_checkpoint(path, _HARMLESS.split())
    weights = state.get("model") if isinstance(state, dict) else None
    if not is_state_dict(weights):
        raise ConversionError(
            f'{path} is not a checkpoint of fairseq: it has no weights in "model".'
        )
    tensors = dict(weights)
    with refusing(f"The options in {path} make no model"):
        options, unknown = read_options(state, path)
        norms = final_norms(options, tensors)
        refuse(option_problems(options, unknown, norms), str(path))
        missing = {f"{stack}.embed_tokens.weight" for stack in STACKS} - tensors.keys()
        if missing:
            raise ConversionError(f"{path} has no {' and no '.join(sorted(missing))}.")
        config = model_config(options, tensors, norms["encoder"])
        generation = generation_config(options)
    model = build_model(config, to_ours(RULES, tensors))
    model.generation_config = generation
    return model


__all__ = ["add_arguments", "convert", "load"]
