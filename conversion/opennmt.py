r"""OpenNMT-py 2 and 3: a Transformer's checkpoint, which holds its options and vocabularies.

    python -m vaswani.conversion opennmt model_step_100000.pt out/

A checkpoint of OpenNMT-py 3 that was saved with save_format safetensors has its weights in a second
file, which is looked for beside it. What differs between OpenNMT-py and this package:

* norm_position is "pre": that is the only Transformer OpenNMT-py has. Its generator always has a
  bias (lm_head_bias). Without add_ffnbias the biases of the feed-forward networks are zeros, and
  share_embeddings without share_decoder_embeddings is carried over as equal tables.
* The source is not ended by "</s>", the target is: encode it by `text_target`. Where the two
  vocabularies differ, the folder holds the source's tokenizer and target_tokenizer/ the target's.
* tokenizer: the vocabulary's tokens between white space (version 3: between spaces). Transforms,
  such as BPE, SentencePiece, or pyonmttok with its joiners, are done by you before and after. All
  decoding leaves out <unk> as a special token.
* generation: a checkpoint does not say how to search; the settings are the defaults of translate.
  Version 2: beam 5, no length penalty, 100 tokens. Version 3: beam 5, mean log-probability, 250
  tokens; its max_length_ratio, which shortens the limit for short sources, is not carried over.
  OpenNMT-py counts "<s>" in its length penalties, and lets ended hypotheses take room in the
  beam, so that it can find worse translations.
* Options of guided alignment (lambda_align) say nothing about translations and are left out.
"""

import argparse
import glob
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.generation_vaswani import VaswaniGenerationConfig
from ..modeling.modeling_vaswani import SinusoidalPositions
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .checkpoints import Converted, build_model, is_dense, read_checkpoint, reading_options, refuse
from .files import is_text
from .rules import ConversionError, Drop, Rename, Rule, Tensors, to_ours
from .subword_nmt import SPACES, joined_by_spaces

# Version 2 pickles its vocabularies in the fields of torchtext that cut up and pad the corpus.
_HARMLESS = (
    "argparse.Namespace",
    "functools.partial",
    *(
        f"onmt.inputters.{name}"
        for name in (
            "text_dataset.TextMultiField",
            "text_dataset._feature_tokenize",
            "inputter.AlignField",
            "inputter.make_src",
            "inputter.make_tgt",
            "inputter.parse_align_idx",
        )
    ),
    *(
        f"torchtext.{name}"
        for name in (
            "data.field.Field",
            "data.field.LabelField",
            "data.field.RawField",
            "data.utils._split_tokenizer",
            "vocab.Vocab",
        )
    ),
)

_PAD, _UNK, _START, _END = "<blank>", "<unk>", "<s>", "</s>"
_SPACE = f"[{SPACES}]"

# OpenNMT-py's defaults of the options read here; old checkpoints lack some.
_DEFAULTS = {
    "model_task": "seq2seq",
    "model_type": "text",
    "encoder_type": "rnn",
    "decoder_type": "rnn",
    "layers": -1,
    "enc_layers": 2,
    "dec_layers": 2,
    "heads": 8,
    "transformer_ff": 2048,
    "share_embeddings": False,
    "share_decoder_embeddings": False,
    "position_encoding": False,
    "position_encoding_type": "SinusoidalInterleaved",
    "pos_ffn_activation_fn": "relu",
    "norm_eps": 1e-6,
    "num_kv": 0,
    "dropout": [0.3],
    "attention_dropout": [0.1],
    "label_smoothing": 0.0,
}
_INNER_BIASES = (".fc1.bias", ".fc2.bias")
_WIDTHS = ("hidden_size", "rnn_size", "enc_hid_size", "enc_rnn_size")
_POSITIONS: dict[str, Any] = {
    "SinusoidalInterleaved": "sinusoidal",
    "SinusoidalConcat": "sinusoidal_t2t",
}

# The values for which there is a counterpart.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_task": ("seq2seq",),
    "model_type": ("text",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "position_encoding": (True,),
    "position_encoding_type": tuple(_POSITIONS),
    "max_relative_positions": (0,),
    "relative_positions_buckets": (0,),
    "sliding_window": (0,),
    "multiquery": (False,),
    "num_experts": (0,),
    "parallel_residual": (False,),
    "layer_norm": ("standard",),
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "generator_function": ("softmax",),
    "copy_attn": (False,),
    "coverage_attn": (False,),
    "n_src_feats": (0,),
    "src_feats_vocab": (None, "", {}),
    "lora_layers": (None, []),
    "lora_embedding": (False,),
    "quant_layers": (None, []),
}
_MEANINGS = {
    ("max_relative_positions", -1): "rotary positions",
    ("max_relative_positions", -2): "ALiBi",
    ("self_attn_type", "average"): "average attention",
}

_GENERATION: dict[int, dict[str, Any]] = {
    2: {"length_penalty": 0.0, "early_stopping": "never", "max_length": 101},
    3: {"length_penalty": 1.0, "early_stopping": False, "max_length": 251},
}


def _check_positions(config: VaswaniConfig, name: str, table: torch.Tensor) -> None:
    """Refuse a table of positions that is not the one of `config`."""
    if table.shape[-1:] == (config.d_model,):
        table = table.float().reshape(-1, config.d_model)
        expected = SinusoidalPositions(config)(0, len(table), table.device)
        # Float32 leaves sines of large angles, and half precision all of them, only three digits.
        if torch.allclose(table, expected, rtol=0, atol=4e-3):
            return
    raise ConversionError(
        f"{name} is not the table of position_encoding={config.position_encoding!r}."
    )


def rules(config: VaswaniConfig) -> list[Rule]:
    """Name OpenNMT-py's tensors, with "generator." before those of the generator, and ours."""
    table: list[Rule] = [Rename("generator.{kind}", "lm_head.{kind}")]
    attention = {
        "linear_query": "q_proj",
        "linear_keys": "k_proj",
        "linear_values": "v_proj",
        "final_linear": "out_proj",
    }
    stacks = {
        "encoder": (
            "transformer",
            {"self_attn": "self_attn"},
            {"layer_norm": "self_attn_layer_norm"},
        ),
        "decoder": (
            "transformer_layers",
            {"self_attn": "self_attn", "context_attn": "encoder_attn"},
            {"layer_norm_1": "self_attn_layer_norm", "layer_norm_2": "encoder_attn_layer_norm"},
        ),
    }
    for stack, (layers, attentions, names) in stacks.items():
        embedding, theirs, ours = (
            f"{stack}.embeddings.make_embedding",
            f"{stack}.{layers}.{{i}}",
            f"model.{stack}.layers.{{i}}",
        )
        names = names | {
            "feed_forward.layer_norm": "final_layer_norm",
            "feed_forward.w_1": "fc1",
            "feed_forward.w_2": "fc2",
        }
        for there, here in attentions.items():
            names |= {f"{there}.{a}": f"{here}.{b}" for a, b in attention.items()}
        table += [
            Rename(f"{embedding}.emb_luts.0.weight", f"model.{stack}.embed_tokens.weight"),
            Drop(f"{embedding}.pe.pe", lambda *found: _check_positions(config, *found)),
            Rename(f"{stack}.layer_norm.{{kind}}", f"model.{stack}.layer_norm.{{kind}}"),
        ]
        table += [
            Rename(f"{theirs}.{there}.{{kind}}", f"{ours}.{here}.{{kind}}")
            for there, here in names.items()
        ]
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command line takes."""
    parser.add_argument("checkpoint", type=Path, metavar="INPUT", help="a .pt of OpenNMT-py")


def convert(checkpoint: str | Path, output: str | Path) -> None:
    """Write the folder `output` from a checkpoint of OpenNMT-py.

    Raises:
        ConversionError: as `load`.
        FileExistsError: `output` is there already.
    """
    load(checkpoint).save(Path(output))


def load(checkpoint: str | Path) -> Converted:
    """Read a checkpoint of OpenNMT-py: the module says what becomes of it.

    Raises:
        ConversionError: it is no such checkpoint, or asks for what this model does not have.
    """
    path = Path(checkpoint)
    content = read_checkpoint(path, _HARMLESS)
    if not isinstance(content, dict) or not {"opt", "vocab"} <= set(content):
        raise ConversionError(f"{path} lacks opt and vocab: it is no checkpoint of OpenNMT-py.")
    given = content["opt"]
    given = given if isinstance(given, dict) else getattr(given, "__dict__", {})
    with reading_options(path):
        version, source, target, problems = _vocabularies(content["vocab"], path)
        # Before these were options, there were biases.
        options = _DEFAULTS | {"add_qkvbias": version == 2, "add_ffnbias": version == 2} | given
        refuse(_problems(options) + problems, str(path))
        start = content["vocab"].get("decoder_start_token", _START)
        config = _config(options, source, target, start)
    ours = to_ours(rules(config), _weights(content, path))
    if not options["add_ffnbias"] and not any(name.endswith(_INNER_BIASES) for name in ours):
        inner = [name for name in ours if name.endswith((".fc1.weight", ".fc2.weight"))]
        ours |= {f"{name[:-6]}bias": ours[name].new_zeros(ours[name].shape[:1]) for name in inner}
    model = build_model(config, ours)
    model.generation_config = VaswaniGenerationConfig(
        num_beams=5,
        length_penalty_type="hf",
        max_length_offset=0,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        **_GENERATION[version],
    )
    if source == target:
        return Converted(model, _tokenizer(source, version, source_eos=False))
    return Converted(
        model, _tokenizer(source, version, source_eos=False), _tokenizer(target, version)
    )


def _problems(options: dict[str, Any]) -> list[str]:
    """Name the options that ask for what this model does not have."""
    problems = []
    for name, supported in _SUPPORTED.items():
        value = options.get(name, supported[0])
        if value not in supported:
            meaning = _MEANINGS.get((name, value)) if isinstance(value, int | str) else None
            problems.append(f"{name} {value}" + (f" ({meaning})" if meaning else ""))
    if options["num_kv"] not in (0, options["heads"]):
        problems.append(f"num_kv {options['num_kv']}")
    known = _SUPPORTED.keys() | _DEFAULTS.keys() | set(_WITHOUT_EFFECT.split())
    # None, False, 0 and the like switch an option off.
    unknown = sorted(name for name, value in options.items() if value and name not in known)
    return problems + [f"{name} {options[name]} (not known here)" for name in unknown]


def _vocabularies(vocab: Any, path: Path) -> tuple[int, list[str], list[str], list[str]]:
    """The version that wrote them, both sides' tokens, and what cannot be converted."""
    sides: list[Any] = [None]
    if isinstance(vocab, dict):
        sides = [vocab.get(side) for side in ("src", "tgt")]
    version = 3 if all(isinstance(side, list) for side in sides) else 2
    problems: list[str] = []
    found: list[Any] = sides
    if version == 2:
        fields: list[Any] = [getattr(side, "fields", None) for side in sides]
        try:
            names = [[field.pad_token, field.unk_token] for ((_, field), *_) in fields]
            names += [[getattr(f[0][1], n) for n in ("init_token", "eos_token")] for f in fields]
            found = [field.vocab.itos for ((_, field), *_) in fields]
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            raise ConversionError(
                f"vocab of {path} is neither that of OpenNMT-py 2 (fields of torchtext) nor that "
                "of OpenNMT-py 3 (lists of tokens)."
            ) from error
        if names != [[_PAD, _UNK], [_PAD, _UNK], [None, None], [_START, _END]]:
            problems.append(f"fields with the special tokens {names}")
        if any(len(side) > 1 for side in fields):
            problems.append("source or target features (more than one field)")
    if vocab.get("src_feats"):
        problems.append(f"src_feats ({len(vocab['src_feats'])} source features)")
    if vocab.get("data_task", "seq2seq") != "seq2seq":
        problems.append(f"data_task {vocab['data_task']}")
    for side, tokens in zip(("src", "tgt"), found, strict=True):
        whole = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
        if not whole or not is_text(tokens):
            raise ConversionError(f"vocab of {path} holds no list of tokens for {side}.")
        if len(set(tokens)) != len(tokens):
            twice = sorted(token for token, count in Counter(tokens).items() if count > 1)
            problems.append(f"the {side} vocabulary, which has {', '.join(twice)} more than once")
    return version, *found, problems


def _index(token: str, vocabulary: list[str]) -> int:
    if token not in vocabulary:
        raise ConversionError(f"A vocabulary lacks {token!r}, without which nothing can be built.")
    return vocabulary.index(token)


def _weights(content: dict[str, Any], path: Path) -> Tensors:
    """All weights, those of the generator as "generator.", under the names of today."""
    weights, generator = content.get("model"), content.get("generator")
    generator = {} if generator is None else generator
    if weights is None:
        stem = path.name.removesuffix(".pt")
        files = sorted(path.parent.glob(f"{glob.escape(stem)}*.safetensors"))
        files = [file for file in files if re.fullmatch(r"(\.\w+)?", file.stem[len(stem) :])]
        if not files:
            raise ConversionError(
                f"{path} holds no model, and there is no {stem}.safetensors beside it."
            )
        try:
            weights = {name: weight for file in files for name, weight in load_file(file).items()}
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"The weights beside {path} are damaged: {error}") from error
    for part in (weights, generator):
        if not isinstance(part, Mapping) or not all(isinstance(name, str) for name in part):
            raise ConversionError(f"model or generator of {path} is no dict of weights.")
    merged = {_name_of_today(name): weight for name, weight in weights.items()}
    merged |= {f"generator.{name.removeprefix('0.')}": w for name, w in generator.items()}
    for name, weight in merged.items():
        if not isinstance(weight, torch.Tensor) or not is_dense(weight):
            raise ConversionError(f"{name} of {path} is no dense tensor of floating-point numbers.")
    return merged


def _name_of_today(name: str) -> str:
    """Rename the LayerNorms of old checkpoints, as OpenNMT-py does when it loads them."""
    name = re.sub(r"(layer_norm(_\d+)?)\.a_2$", r"\1.weight", name)
    return re.sub(r"(layer_norm(_\d+)?)\.b_2$", r"\1.bias", name)


def _config(
    options: dict[str, Any], source: list[str], target: list[str], start: str
) -> VaswaniConfig:
    pads = [_index(_PAD, side) for side in (source, target)]
    _index(_UNK, source)
    if pads[0] != pads[1]:
        raise ConversionError(f"{_PAD!r} has different numbers in the two vocabularies: {pads}.")
    tied = options["share_decoder_embeddings"]
    dropout, attention_dropout = (
        options[name][0] if isinstance(options[name], list) else options[name]
        for name in ("dropout", "attention_dropout")
    )
    widths = [options[name] for name in _WIDTHS if options.get(name, -1) > 0]
    same = options["layers"] > 0
    return VaswaniConfig(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        d_model=widths[0],
        encoder_layers=options["layers" if same else "enc_layers"],
        decoder_layers=options["layers" if same else "dec_layers"],
        encoder_attention_heads=options["heads"],
        decoder_attention_heads=options["heads"],
        encoder_ffn_dim=options["transformer_ff"],
        decoder_ffn_dim=options["transformer_ff"],
        dropout=dropout,
        attention_dropout=attention_dropout,
        activation_dropout=dropout,
        label_smoothing=options["label_smoothing"],
        activation_function=options["pos_ffn_activation_fn"],
        norm_position="pre",
        position_encoding=_POSITIONS[options["position_encoding_type"]],
        attention_bias=options["add_qkvbias"],
        lm_head_bias=True,
        layer_norm_eps=options["norm_eps"],
        tie_word_embeddings=tied,
        share_encoder_decoder_embeddings=tied and options["share_embeddings"],
        pad_token_id=pads[1],
        unk_token_id=_index(_UNK, target),
        eos_token_id=_index(_END, target),
        bos_token_id=_index(_START, target),
        decoder_start_token_id=_index(start, target),
    )


def _tokenizer(tokens: list[str], version: int, source_eos: bool = True) -> VaswaniTokenizer:
    """Make a tokenizer of tokens between white space, which ends sources by "</s>" or does not."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNK))
    backend.normalizer = normalizers.Replace(Regex(rf"\A{_SPACE}+|{_SPACE}+\z"), "")
    between = Regex(f"{_SPACE}+" if version == 2 else " +")
    backend.pre_tokenizer = pre_tokenizers.Split(between, "removed")
    backend.decoder = joined_by_spaces()
    return VaswaniTokenizer(
        tokenizer_object=backend,
        pad_token=_PAD,
        unk_token=_UNK,
        bos_token=_START if _START in vocabulary else None,
        eos_token=_END if _END in vocabulary else None,
        add_eos_token=source_eos,
        source_eos=source_eos,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


# Options of OpenNMT-py 2.0 to 3.5 that change no translation of a trained Transformer: those of
# corpora and their transforms, of training, of other networks, and of alignments.
_WITHOUT_EFFECT = """
_all_transform aan_useffn accum_count accum_steps adagrad_accumulator_init adam_beta1 adam_beta2
add_ffnbias add_qkvbias align_debug alignment_heads alignment_layer alpha apex_opt_level
attn_debug average_decay average_every avg_raw_probs avg_tok_max avg_tok_min ban_unk_token
batch_size batch_size_multiple batch_type beam_size beta bidir_edges block_ngram_repeat
both_embeddings bridge bridge_extra_node brnn bucket_size bucket_size_increment bucket_size_init
cnn_kernel_width config context_gate copy_attn_force copy_attn_type copy_loss_by_seqlength
coverage_penalty data data_task data_type dec_hid_size dec_rnn_size decay_method decay_steps
decoder_start_token default_specials doc_length dropout_steps dump_beam dump_fields dump_preds
dump_samples dump_transforms early_stopping early_stopping_criteria embeddings_type enc_hid_size
enc_rnn_size epochs exp exp_host feat_merge feat_vec_exponent feat_vec_size fix_word_vecs_dec
fix_word_vecs_enc fp32 freeze_decoder freeze_encoder freeze_word_vecs_dec freeze_word_vecs_enc
full_context_alignment fuzzy_corpus_ratio fuzzy_threshold fuzzy_token fuzzymatch_max_length
fuzzymatch_min_length global_attention global_attention_function gold_align gpt2_pretok gpu
gpu_backend gpu_ranks gpu_verbose_level gpuid group_size hidden_size ignore_when_blocking
input_feed insert_ratio int8 isolated_tag keep_checkpoint lambda_align lambda_coverage langid
learn_subwords learn_subwords_size learning_rate learning_rate_decay length_penalty
lm_prior_lambda lm_prior_model lm_prior_tau log_file log_file_level lora_alpha lora_dropout
lora_rank loss_scale mask_length mask_ratio master_ip master_port max_context
max_generator_batches max_grad_norm max_length max_length_ratio max_sent_length max_tags
min_length model model_dtype n_best n_edge_types n_node n_sample n_steps norm_numbers
norm_quote_commas normalization num_experts_per_tok num_threads num_workers optim output
override_opts overwrite paired_etag paired_stag parallel_mode param_init param_init_glorot penn
permute_sent_ratio phrase_table poisson_lambda pool_factor post_remove_control_chars
pre_replace_unicode_punct pre_word_vecs_dec pre_word_vecs_enc precision prefetch_factor
prior_tokenization profile quant_type queue_size random_ratio random_sampling_temp
random_sampling_topk random_sampling_topp ratio replace_length replace_unk report_align
report_every report_time reset_optim residual response_pattern response_patterns reuse_copy_attn
reversible_tokenization rnn_size rnn_type rotary_dim rotary_interleave rotary_theta rotate_ratio
same_char same_word save_checkpoint_steps save_config save_data save_format save_model
scoring_debug scripts_nok scripts_ok seed shard_size share_vocab shared_layer_norm single_pass
skip_empty_level src src_delimiter src_embeddings src_eq_tgt src_feats src_feats_defaults
src_ggnn_size src_lang src_onmttok_kwargs src_prefix src_seq_length src_seq_length_trunc
src_spacy_language_model src_subword_alpha src_subword_model src_subword_nbest src_subword_type
src_subword_vocab src_suffix src_term_stoken src_tgt_ratio src_vocab src_vocab_size
src_vocab_threshold src_word_vec_size src_words_min_frequency start_decay_steps state_dim
stepwise_penalty switchout_temperature tags_corpus_ratio tags_dictionary_path tensorboard
tensorboard_log_dir tensorboard_log_dir_dated term_corpus_ratio term_example_ratio
term_source_delimiter termbase_path tgt tgt_embeddings tgt_file_prefix tgt_lang
tgt_onmttok_kwargs tgt_prefix tgt_seq_length tgt_seq_length_trunc tgt_spacy_language_model
tgt_subword_alpha tgt_subword_model tgt_subword_nbest tgt_subword_type tgt_subword_vocab
tgt_suffix tgt_term_etoken tgt_term_stoken tgt_vocab tgt_vocab_size tgt_vocab_threshold
tgt_word_vec_size tgt_words_min_frequency timeout tm_delimiter tm_path tokendrop_temperature
tokenmask_temperature train_eval_steps train_from train_metrics train_steps transforms
truncated_decoder update_vocab upper_corpus_ratio use_ckpting valid_batch_size valid_metrics
valid_steps verbose vocab_sample_queue_size vocab_size_multiple w_bit warmup_steps with_score
word_vec_size world_size zero_out_prompt_loss
"""
