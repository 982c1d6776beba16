r"""fairseq: a Transformer's checkpoint and its dictionaries.

    python -m vaswani.conversion fairseq checkpoint_best.pt out/ --source-dict dict.de.txt \
        --target-dict dict.en.txt --bpe-codes code

INPUT is a checkpoint of the model "transformer" or one of its architectures, of any version: one of
a training, an average, one of an ensemble. Dictionaries are those of fairseq-preprocess. One is
enough for a model that shares all its embeddings; give a joint dictionary twice to any other.
Without dictionaries, only the model is converted.

How fairseq is carried over:

* Sinusoids with tensor2tensor's frequencies, the first position numbered 2 (the padding's number
  and one), are position_encoding="sinusoidal_t2t" and position_offset=2; learned positions too
  start at 2. fairseq pads sources on the left and counts from the first real token; with padding
  on the right, as here, the numbers are the same.
* label_smoothing is the criterion's times K / (K - 1), for K entries of the target's dictionary:
  fairseq spreads it over the K - 1 wrong ones, this package over all, and both losses are the same.
* layerdrop leaves out layers in training alone: all are kept, and the rate is lost.
* generation is that of fairseq-generate without options: 5 beams, score / length, an end at as many
  finished hypotheses as beams, 1 to 200 tokens and then the end token, never the padding token.
  Where the checkpoint has settings of the search (cfg.generation), beam, lenpen, unnormalized,
  min_len, max_len_a and max_len_b are taken from there. With max_len_a, each sentence is limited by
  its own length; fairseq takes the longest of the batch, and ends at max_target_positions, too.
  The best translation is fairseq's. Others (num_return_sequences) may differ, for fairseq keeps the
  first 5 to finish, this package the best 5; so may what is cut off at the limit, since the
  probability of the end token that is forced there counts in fairseq alone.

fairseq reads text whose tokens stand between spaces, and so do the tokenizers without further
options; --remove-bpe joins what "@@ " separates when decoding. With --bpe-codes, of subword-nmt
or fastBPE, they take words between spaces, as Moses' tokenizer leaves them, cut them, and join them
when decoding; white space of other kinds, which those tools take for letters, separates words too.
With --sentencepiece-model they take plain text. What has no entry in the dictionary is <unk>, and
so are "<s>", "<pad>" and "</s>" where they are written in a text. Decoding with skip_special_tokens
leaves out <unk>, which fairseq prints, and joins nothing across it. Where source and target differ
in dictionaries or in what cuts text, target_tokenizer/ in the output is the target's.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.generation_vaswani import VaswaniGenerationConfig
from .checkpoints import Converted, Inert, build_model, read_checkpoint, reading_options, refuse
from .fairseq_text import BOS, EOS, PAD, UNK, read_vocabulary
from .files import holds_tensors
from .rules import ConversionError, Drop, Rename, Rule, Stack, Tensors, to_ours

logger = logging.get_logger(__name__)

_STACKS = ("encoder", "decoder")

# Current names first: what is written in theirs gets these.
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
    # What fairseq computes itself when it loads a model.
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

# What an architecture means where a checkpoint does not say it.
_BASE: dict[str, Any] = {
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "dropout": 0.1,
    "activation_fn": "relu",
    "max_source_positions": 1024,
    "max_target_positions": 1024,
}
_TINY = _BASE | {
    **dict.fromkeys(("encoder_embed_dim", "encoder_ffn_embed_dim"), 64),
    **dict.fromkeys(("encoder_layers", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_layers", "decoder_attention_heads"), 2),
}


def _both(width: int, inner: int, heads: int) -> dict[str, Any]:
    """Sizes of both stacks alike."""
    sizes = {"embed_dim": width, "ffn_embed_dim": inner, "attention_heads": heads}
    return {f"{stack}_{name}": size for stack in _STACKS for name, size in sizes.items()}


_IWSLT = _BASE | _both(512, 1024, 4)
_BIG = _BASE | _both(1024, 4096, 16) | {"dropout": 0.3}
_T2T = _BIG | {
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": _BASE,
    "transformer_tiny": _TINY,
    "transformer_iwslt_de_en": _IWSLT,
    "transformer_wmt_en_de": _BASE,
    "transformer_vaswani_wmt_en_de_big": _BIG,
    "transformer_vaswani_wmt_en_fr_big": _BIG | {"dropout": 0.1},
    "transformer_wmt_en_de_big": _BIG | {"attention_dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": _T2T,
    # Aligning words is a second training objective for the same network.
    "transformer_align": _BASE,
    "transformer_wmt_en_de_big_align": _BIG | {"attention_dropout": 0.1},
}
_ACTIVATIONS = {
    "relu": "relu",
    "relu_squared": "relu2",
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "linear": "linear",
}
# Options that are more than this model has, whatever their value.
_REFUSED = """
adaptive_input adaptive_softmax_cutoff base_layers char_inputs cross_self_attention
decoder_layers_to_keep decoder_xformers_att_config encoder_layers_to_keep
encoder_xformers_att_config layernorm_embedding no_cross_attention no_token_positional_embeddings
quant_noise_pq quant_noise_scalar tie_adaptive_proj tie_adaptive_weights
"""
# Options of the model that are carried over, or that change no output.
_WITHOUT_EFFECT = """
_name adaptive_softmax_dropout adaptive_softmax_factor arch base_shuffle base_sublayers
checkpoint_activations decoder_embed_path decoder_input_dim decoder_layerdrop decoder_learned_pos
decoder_output_dim encoder_embed_path encoder_layerdrop encoder_learned_pos export
min_params_to_wrap no_decoder_final_norm no_scale_embedding offload_activations
quant_noise_pq_block_size relu_dropout share_all_embeddings share_decoder_input_output_embed
"""
_KNOWN = {*_T2T, *_REFUSED.split(), *_WITHOUT_EFFECT.split()}
# Options of the search that are carried over, with their defaults.
_SEARCH: dict[str, Any] = {
    "beam": 5,
    "lenpen": 1.0,
    "unnormalized": False,
    "min_len": 1,
    "max_len_a": 0.0,
    "max_len_b": 200,
}
# Options that change the search and are not carried over, with the values that leave them off.
_OTHER_SEARCH: dict[str, Any] = {
    "constraints": None,
    "diverse_beam_groups": -1,
    "diversity_rate": -1.0,
    "lm_path": None,
    "match_source_len": False,
    "no_repeat_ngram_size": 0,
    "prefix_size": 0,
    "retain_dropout": False,
    "sampling": False,
    "temperature": 1.0,
    "unkpen": 0.0,
}
# A Namespace holds the model's options among those of the whole training. These are a model's.
_OF_A_MODEL = re.compile(
    r"(?:encoder|decoder|adaptive|base|cross|moe|quant_noise|scale|share|tie)_\w+"
    r"|\w*(?:attn|attention|embedding|layer_?norm|rms_?norm|deepnorm|subln|relative|rel_pos|xpos"
    r"|alibi|rotary|glu|expert|char)s?(?:_\w+)?"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `convert` but for the output."""
    parser.add_argument("checkpoint", metavar="INPUT", help="checkpoint, a .pt file")
    parser.add_argument("--source-dict", metavar="FILE", help="dict.xx.txt of the source language")
    parser.add_argument(
        "--target-dict", metavar="FILE", help="of the target, unless all embeddings are shared"
    )
    parser.add_argument("--bpe-codes", metavar="FILE", help="codes of subword-nmt or fastBPE")
    parser.add_argument("--target-bpe-codes", metavar="FILE", help="of the target; else the same")
    parser.add_argument("--sentencepiece-model", metavar="FILE", help="SentencePiece's .model")
    parser.add_argument(
        "--target-sentencepiece-model", metavar="FILE", help="of the target; else the same"
    )
    parser.add_argument(
        "--remove-bpe", action="store_true", help='join what "@@ " separates when decoding'
    )


def convert(checkpoint: str | Path, output: str | Path, **options: Any) -> None:
    """Write a folder that `from_pretrained` reads; arguments as for `load`.

    Raises:
        ConversionError: the checkpoint cannot be converted exactly; names all reasons.
        FileExistsError: something is at `output` already.
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
    """Convert a checkpoint, and make tokenizers where there are dictionaries.

    Args:
        checkpoint: a .pt file.
        source_dict, target_dict: dict.xx.txt; either stands for both if all embeddings are shared.
        bpe_codes, target_bpe_codes: the codes that texts were cut by; the first stands for both.
        sentencepiece_model, target_sentencepiece_model: likewise SentencePiece's models.
        remove_bpe: without these, join when decoding what "@@ " separates.

    Raises:
        ConversionError: something cannot be converted exactly, is missing or damaged; names all.
    """
    path = Path(checkpoint)
    state = read_checkpoint(path, _HARMLESS.split())
    weights = state.get("model") if isinstance(state, dict) else None
    if not holds_tensors(weights):
        raise ConversionError(f'{path} is no checkpoint of fairseq: it has no weights in "model".')
    tensors = dict(weights)
    with reading_options(path):
        options, unknown = _read_options(state, path)
        options = _complete(options)
        final_norms = _final_norms(options, tensors)
        refuse(_problems(options, unknown, final_norms), str(path))
        missing = {f"{stack}.embed_tokens.weight" for stack in _STACKS} - tensors.keys()
        if missing:
            raise ConversionError(f"{path} has no {' and no '.join(sorted(missing))}.")
        config = _config(options, tensors, final_norms["encoder"])
        generation_config = _generation_config(options)
    model = build_model(config, to_ours(RULES, tensors))
    model.generation_config = generation_config

    given = [file for file in (source_dict, target_dict) if file is not None]
    source_dict, target_dict = source_dict or target_dict, target_dict or source_dict
    if source_dict is None or target_dict is None:
        if bpe_codes or target_bpe_codes or sentencepiece_model or target_sentencepiece_model:
            raise ConversionError("What cuts text needs a dictionary to look up: give source_dict.")
        return Converted(model)
    source = read_vocabulary(source_dict, bpe_codes, sentencepiece_model, remove_bpe)
    target = read_vocabulary(
        target_dict,
        target_bpe_codes or bpe_codes,
        target_sentencepiece_model or sentencepiece_model,
        remove_bpe,
    )
    problems = [
        f"{file} makes {len(vocabulary.symbols)} entries, the {side} embedding has {size}"
        for side, file, vocabulary, size in (
            ("source", source_dict, source, config.vocab_size),
            ("target", target_dict, target, config.decoder_vocab_size),
        )
        if len(vocabulary.symbols) != size
    ]
    if config.share_encoder_decoder_embeddings and source.symbols != target.symbols:
        problems.append(f"{source_dict} and {target_dict} differ, but share their embeddings")
    if not config.share_encoder_decoder_embeddings and len(given) == 1:
        problems.append(
            f"{given[0]} alone cannot be taken for both sides, whose embeddings differ (give "
            "source_dict and target_dict, or a joint dictionary as both)"
        )
    refuse(problems, str(path))
    own = None if source == target else target.tokenizer()
    return Converted(model, source.tokenizer(), own)


# Options


def _read_options(state: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's options by fairseq's flat names, and those that nobody here knows.

    Raises:
        ConversionError: there are none.
    """
    options, config = _plain(state.get("args")), _plain(state.get("cfg"))
    training: dict[str, Any] = {}
    if not isinstance(options, dict):
        options = config.get("model") if isinstance(config, dict) else None
        if not isinstance(options, dict):
            raise ConversionError(
                f"{path} holds no options of fairseq, neither args nor cfg.model."
            )
        options = _flat(options)
        criterion, task = config.get("criterion") or {}, config.get("task") or {}
        training = {"criterion": criterion.get("_name"), "task": task.get("_name")}
        training["label_smoothing"] = criterion.get("label_smoothing")
        training["generation"] = config.get("generation")
    for name, value in options.items():
        reference = (
            re.fullmatch(r"\$\{model\.([\w.]+)\}", value) if isinstance(value, str) else None
        )
        if reference:
            options[name] = options.get(reference[1].replace(".", "_"))
    # Of what is used here, None is the default wherever fairseq stores it.
    options = {name: value for name, value in options.items() if value not in (None, "???")}
    alone = "arch" not in options  # the model's options, without those of the training
    unknown = [
        name
        for name, value in options.items()
        if value and name not in _KNOWN and (alone or _OF_A_MODEL.fullmatch(name))
    ]
    return options | {name: value for name, value in training.items() if value}, unknown


def _plain(value: Any) -> Any:
    """Options as plain data: those of Namespaces and of omegaconf's nodes."""
    if isinstance(value, Inert):
        fields = vars(value)
        return _plain(fields.get("_content", fields.get("_val", fields)))
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """The groups encoder, decoder and quant_noise by their older, flat names."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("encoder", "decoder", "quant_noise") and isinstance(value, dict):
            flat |= {f"{name}_{inner}": entry for inner, entry in value.items() if inner != "_name"}
        else:
            flat[name] = value
    return flat


def _complete(options: dict[str, Any]) -> dict[str, Any]:
    """The options with what their architecture means where they do not say it."""
    complete = ARCHITECTURES.get(_architecture(options), _BASE) | options
    for side in ("source", "target"):
        if "max_positions" in options and f"max_{side}_positions" not in options:
            complete[f"max_{side}_positions"] = options["max_positions"]
    width = complete.setdefault("decoder_embed_dim", complete["encoder_embed_dim"])
    complete.setdefault("decoder_ffn_embed_dim", complete["encoder_ffn_embed_dim"])
    complete.setdefault("decoder_input_dim", width)
    complete.setdefault("decoder_output_dim", width)
    return complete


def _architecture(options: dict[str, Any]) -> Any:
    return options.get("arch", options.get("_name"))


def _problems(
    options: dict[str, Any], unknown: list[str], final_norms: dict[str, bool]
) -> list[str]:
    """What these options ask for and this package does not compute, in fairseq's spelling."""
    problems = [_flag(name, options) for name in [*_REFUSED.split(), *unknown] if options.get(name)]
    if _architecture(options) not in ARCHITECTURES:
        problems.append(f"--arch {_architecture(options)}")
    # Before there were tasks, all models translated.
    if options.get("task", "translation") != "translation":
        problems.append(_flag("task", options))
    if options["activation_fn"] not in _ACTIVATIONS:
        problems.append(_flag("activation_fn", options))
    problems += [
        f"{_flag(name, options)} with --{other.replace('_', '-')} {options[other]}"
        for name, other in (
            ("decoder_embed_dim", "encoder_embed_dim"),
            ("decoder_input_dim", "decoder_embed_dim"),
            ("decoder_output_dim", "decoder_embed_dim"),
        )
        if int(options[name]) != options[other]
    ]
    for name in ("learned_pos", "normalize_before"):
        given = [bool(options.get(f"{stack}_{name}")) for stack in _STACKS]
        if given[0] != given[1]:
            flags = [f"--{stack}-{name.replace('_', '-')}" for stack in _STACKS]
            problems.append(f"{flags[given[1]]} without {flags[given[0]]}")
        elif name == "normalize_before" and final_norms["encoder"] != final_norms["decoder"]:
            problems.append(
                "--no-decoder-final-norm"
                if options.get("no_decoder_final_norm")
                else "a LayerNorm after one stack alone (encoder.version, decoder.version)"
            )
    if not options.get("encoder_learned_pos") and int(options["encoder_embed_dim"]) % 2:
        problems.append(f"{_flag('encoder_embed_dim', options)} (odd, without learned positions)")
    longest = [options[f"max_{side}_positions"] for side in ("source", "target")]
    if options.get("encoder_learned_pos") and longest[0] != longest[1]:
        problems.append(
            f"--max-source-positions {longest[0]} with --max-target-positions {longest[1]} and "
            "learned positions"
        )
    return problems


def _flag(name: str, options: dict[str, Any]) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if options[name] is True else f"{flag} {options[name]}"


def _final_norms(options: dict[str, Any], tensors: Tensors) -> dict[str, bool]:
    """Whether a LayerNorm follows each stack: in pre-norm, but not in the oldest versions."""
    norms = {}
    for stack, since in (("encoder", 2), ("decoder", 3)):
        version = tensors.get(f"{stack}.version", torch.ones(1))
        norms[stack] = bool(options.get(f"{stack}_normalize_before")) and version.item() >= since
    norms["decoder"] &= not options.get("no_decoder_final_norm")
    return norms


def _config(options: dict[str, Any], tensors: Tensors, final_norm: bool) -> VaswaniConfig:
    """The configuration that complete options and the sizes of the dictionaries make."""
    learned = bool(options.get("encoder_learned_pos"))
    pre_norm = bool(options.get("encoder_normalize_before"))
    everywhere = bool(options.get("share_all_embeddings"))
    entries = {stack: len(tensors[f"{stack}.embed_tokens.weight"]) for stack in _STACKS}
    smoothing = 0.0
    if str(options.get("criterion")).startswith("label_smoothed_cross_entropy"):
        # Theirs lies on the wrong tokens alone, ours on all.
        smoothing = options.get("label_smoothing", 0.0)
        smoothing *= entries["decoder"] / max(entries["decoder"] - 1, 1)
    return VaswaniConfig(
        vocab_size=entries["encoder"],
        decoder_vocab_size=entries["decoder"],
        d_model=options["encoder_embed_dim"],
        encoder_layers=options["encoder_layers"],
        decoder_layers=options["decoder_layers"],
        encoder_attention_heads=options["encoder_attention_heads"],
        decoder_attention_heads=options["decoder_attention_heads"],
        encoder_ffn_dim=options["encoder_ffn_embed_dim"],
        decoder_ffn_dim=options["decoder_ffn_embed_dim"],
        dropout=options["dropout"],
        attention_dropout=options.get("attention_dropout", 0.0),
        activation_dropout=options.get("activation_dropout") or options.get("relu_dropout", 0.0),
        label_smoothing=smoothing,
        activation_function=_ACTIVATIONS[options["activation_fn"]],
        norm_position="pre" if pre_norm else "post",
        final_layer_norm=None if final_norm == pre_norm else final_norm,
        position_encoding="learned" if learned else "sinusoidal_t2t",
        position_offset=PAD + 1,
        max_position_embeddings=options["max_source_positions"] if learned else None,
        attention_bias=True,
        scale_embedding=not options.get("no_scale_embedding"),
        tie_word_embeddings=everywhere or bool(options.get("share_decoder_input_output_embed")),
        share_encoder_decoder_embeddings=everywhere,
        pad_token_id=PAD,
        unk_token_id=UNK,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=EOS,
    )


def _generation_config(options: dict[str, Any]) -> VaswaniGenerationConfig:
    """Decoding as fairseq-generate does with the options that the checkpoint holds, or none."""
    given = options.get("generation") or {}
    search = _SEARCH | {name: given[name] for name in _SEARCH if given.get(name) is not None}
    lost = [
        f"{name} {given[name]}"
        for name, off in _OTHER_SEARCH.items()
        if given.get(name, off) != off
    ]
    if lost:
        logger.warning(f"Of cfg.generation, {', '.join(lost)} cannot be carried over.")
    # fairseq's limits count neither the start token, as max_length does, nor the end token.
    longest = search["max_len_b"]
    if search["max_len_a"]:
        limit = {"max_length_factor": search["max_len_a"], "max_length_offset": longest + 1}
    else:
        longest = min(longest, options["max_target_positions"] - 1)
        limit = {"max_length_offset": 0, "max_length": longest + 2}
    return VaswaniGenerationConfig(
        num_beams=search["beam"],
        length_penalty_type="hf",
        length_penalty=0.0 if search["unnormalized"] else float(search["lenpen"]),
        early_stopping=True,
        min_length=search["min_len"] + 1,
        **limit,
        suppress_tokens=[PAD],
        forced_eos_token_id=EOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=EOS,
    )


__all__ = ["add_arguments", "convert", "load"]
