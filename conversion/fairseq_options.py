"""Options of fairseq's checkpoints, converted to configurations of this package."""

import re
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..generation.settings_vaswani import VaswaniGenerationConfig
from .errors import ConversionError
from .fairseq_text import BOS, EOS, PAD, UNK
from .reading import Inert
from .rules import Tensors

logger = logging.get_logger(__name__)

STACKS = ("encoder", "decoder")

# Values of an architecture's options that a checkpoint may leave out.
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


def _sizes(embed_dim: int, ffn_embed_dim: int, attention_heads: int) -> dict[str, Any]:
    """Give both stacks the same sizes."""
    sizes = {
        "embed_dim": embed_dim,
        "ffn_embed_dim": ffn_embed_dim,
        "attention_heads": attention_heads,
    }
    return {f"{stack}_{name}": size for stack in STACKS for name, size in sizes.items()}


_IWSLT = _BASE | _sizes(512, 1024, 4)
_BIG = _BASE | _sizes(1024, 4096, 16) | {"dropout": 0.3}
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
    # The same networks, trained to align words as well.
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
# Options of parts that this model does not have. Empty or false values are harmless.
_REFUSED = """
adaptive_input adaptive_softmax_cutoff base_layers char_inputs cross_self_attention
decoder_layers_to_keep decoder_xformers_att_config encoder_layers_to_keep
encoder_xformers_att_config layernorm_embedding no_cross_attention no_token_positional_embeddings
quant_noise_pq quant_noise_scalar tie_adaptive_proj tie_adaptive_weights
"""
# Options that are carried over elsewhere in this file, or that change no output.
_WITHOUT_EFFECT = """
_name adaptive_softmax_dropout adaptive_softmax_factor arch base_shuffle base_sublayers
checkpoint_activations decoder_embed_path decoder_input_dim decoder_layerdrop decoder_learned_pos
decoder_output_dim encoder_embed_path encoder_layerdrop encoder_learned_pos export
min_params_to_wrap no_decoder_final_norm no_scale_embedding offload_activations
quant_noise_pq_block_size relative_step relu_dropout scale_parameter share_all_embeddings
share_decoder_input_output_embed
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
# Options that change the search and are not carried over, with the values that switch them off.
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
# Names of options that belong to a model. A Namespace also holds all options of the training.
_MODEL_OPTION = re.compile(
    r"(?:encoder|decoder|adaptive|base|cross|moe|quant_noise|scale|share|tie)_\w+"
    r"|\w*(?:attn|attention|embedding|layer_?norm|rms_?norm|deepnorm|subln|relative|rel_pos|xpos"
    r"|alibi|rotary|glu|expert|char)s?(?:_\w+)?"
)


def read_options(state: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the options of a checkpoint by fairseq's flat names.

    Returns:
        The options, completed by the defaults of their architecture, and the names of the options
        of the model that this file does not know.

    Raises:
        ConversionError: the checkpoint has no options.
    """
    options, config = _plain_values(state.get("args")), _plain_values(state.get("cfg"))
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
    # None is the default of every option used here.
    options = {name: value for name, value in options.items() if value not in (None, "???")}
    only_model = "arch" not in options
    unknown = [
        name
        for name, value in options.items()
        if value and name not in _KNOWN and (only_model or _MODEL_OPTION.fullmatch(name))
    ]
    options |= {name: value for name, value in training.items() if value}
    return _with_defaults(options), unknown


def _plain_values(value: Any) -> Any:
    """Turn Namespaces and omegaconf's nodes into dicts, lists and plain values."""
    if isinstance(value, Inert):
        fields = vars(value)
        return _plain_values(fields.get("_content", fields.get("_val", fields)))
    if isinstance(value, dict):
        return {name: _plain_values(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain_values(entry) for entry in value]
    return value


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Give the options in the groups encoder, decoder and quant_noise their older, flat names."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("encoder", "decoder", "quant_noise") and isinstance(value, dict):
            flat |= {f"{name}_{inner}": entry for inner, entry in value.items() if inner != "_name"}
        else:
            flat[name] = value
    return flat


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the architecture."""
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


def option_problems(
    options: dict[str, Any], unknown: list[str], final_norms: dict[str, bool]
) -> list[str]:
    """List the options that this model cannot follow, in fairseq's spelling."""
    problems = [_flag(name, options) for name in [*_REFUSED.split(), *unknown] if options.get(name)]
    if _architecture(options) not in ARCHITECTURES:
        problems.append(f"--arch {_architecture(options)}")
    # The oldest versions had no tasks, only translation.
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
    problems += _differing_stacks(options, final_norms)
    if not options.get("encoder_learned_pos") and int(options["encoder_embed_dim"]) % 2:
        problems.append(f"{_flag('encoder_embed_dim', options)} (odd, without learned positions)")
    longest = [options[f"max_{side}_positions"] for side in ("source", "target")]
    if options.get("encoder_learned_pos") and longest[0] != longest[1]:
        problems.append(
            f"--max-source-positions {longest[0]} with --max-target-positions {longest[1]} and "
            "learned positions"
        )
    return problems


def _differing_stacks(options: dict[str, Any], final_norms: dict[str, bool]) -> list[str]:
    """List the settings that only one of the stacks has."""
    problems = []
    for name in ("learned_pos", "normalize_before"):
        given = [bool(options.get(f"{stack}_{name}")) for stack in STACKS]
        if given[0] != given[1]:
            flags = [f"--{stack}-{name.replace('_', '-')}" for stack in STACKS]
            problems.append(f"{flags[given[1]]} without {flags[given[0]]}")
        elif name == "normalize_before" and final_norms["encoder"] != final_norms["decoder"]:
            problems.append(
                "--no-decoder-final-norm"
                if options.get("no_decoder_final_norm")
                else "a LayerNorm after only one stack (encoder.version, decoder.version)"
            )
    return problems


def _flag(name: str, options: dict[str, Any]) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if options[name] is True else f"{flag} {options[name]}"


def final_norms(options: dict[str, Any], tensors: Tensors) -> dict[str, bool]:
    """Tell for each stack whether a LayerNorm follows it.

    Pre-norm stacks have one, except in the oldest versions of fairseq.
    """
    norms = {}
    for stack, first_version in (("encoder", 2), ("decoder", 3)):
        name = f"{stack}.version"
        version = tensors[name].item() if name in tensors else 1
        pre_norm = bool(options.get(f"{stack}_normalize_before"))
        norms[stack] = pre_norm and version >= first_version
    norms["decoder"] &= not options.get("no_decoder_final_norm")
    return norms


def model_config(options: dict[str, Any], tensors: Tensors, final_norm: bool) -> VaswaniConfig:
    """Make the configuration of a checkpoint; the tensors have the sizes of the vocabularies."""
    learned = bool(options.get("encoder_learned_pos"))
    pre_norm = bool(options.get("encoder_normalize_before"))
    share_all = bool(options.get("share_all_embeddings"))
    entries = {stack: len(tensors[f"{stack}.embed_tokens.weight"]) for stack in STACKS}
    smoothing = 0.0
    if str(options.get("criterion")).startswith("label_smoothed_cross_entropy"):
        # fairseq smooths over the wrong tokens only, this package over all tokens.
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
        tie_word_embeddings=share_all or bool(options.get("share_decoder_input_output_embed")),
        share_encoder_decoder_embeddings=share_all,
        pad_token_id=PAD,
        unk_token_id=UNK,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=EOS,
    )


def generation_config(options: dict[str, Any]) -> VaswaniGenerationConfig:
    """Make the settings of fairseq-generate, changed by the search options of the checkpoint."""
    given = options.get("generation") or {}
    search = _SEARCH | {name: given[name] for name in _SEARCH if given.get(name) is not None}
    lost = [
        f"{name} {given[name]}"
        for name, off in _OTHER_SEARCH.items()
        if given.get(name, off) != off
    ]
    if lost:
        logger.warning(f"These settings of cfg.generation are not carried over: {', '.join(lost)}.")
    # max_length counts the start token and the end token. fairseq's limits count neither.
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


__all__ = [
    "ARCHITECTURES",
    "STACKS",
    "final_norms",
    "generation_config",
    "model_config",
    "option_problems",
    "read_options",
]
