"""Options and vocabularies of OpenNMT-py's checkpoints, converted to our configurations."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..configuration.configuration_vaswani import VaswaniConfig
from ..generation.settings_vaswani import VaswaniGenerationConfig
from .errors import ConversionError
from .reading import is_text

PAD, UNK, START, END = "<blank>", "<unk>", "<s>", "</s>"

# Defaults of OpenNMT-py. Old checkpoints lack some of these options.
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
_WIDTHS = ("hidden_size", "rnn_size", "enc_hid_size", "enc_rnn_size")
_POSITIONS: dict[str, Any] = {
    "SinusoidalInterleaved": "sinusoidal",
    "SinusoidalConcat": "sinusoidal_t2t",
}

# Values that have a counterpart here. The first one is the default.
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
# The search that OpenNMT-py's translate does by default, by version.
_SEARCH: dict[int, dict[str, Any]] = {
    2: {"length_penalty": 0.0, "early_stopping": "never", "max_length": 101},
    3: {"length_penalty": 1.0, "early_stopping": False, "max_length": 251},
}


@dataclass
class Vocabularies:
    """The tokens of both sides, in the order of their ids.

    Args:
        version: major version of the OpenNMT-py that wrote the checkpoint, 2 or 3.
        source, target: the tokens.
        start: the token that the decoder starts with.
        problems: properties that cannot be converted.
    """

    version: int
    source: list[str]
    target: list[str]
    start: str
    problems: list[str]

    @classmethod
    def read(cls, vocab: Any, path: Path) -> Self:
        """Read the entry "vocab" of a checkpoint.

        Raises:
            ConversionError: it holds no two lists of tokens.
        """
        entries: dict[str, Any] = vocab if isinstance(vocab, dict) else {}
        sides: list[Any] = [entries.get("src"), entries.get("tgt")]
        version = 3 if all(isinstance(side, list) for side in sides) else 2
        (source, target), problems = (sides, []) if version == 3 else _torchtext(sides, path)
        if entries.get("src_feats"):
            problems.append(f"src_feats ({len(entries['src_feats'])} source features)")
        if entries.get("data_task", "seq2seq") != "seq2seq":
            problems.append(f"data_task {entries['data_task']}")
        for side, tokens in (("src", source), ("tgt", target)):
            strings = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
            if not strings or not is_text(tokens):
                raise ConversionError(f"vocab of {path} holds no list of tokens for {side}.")
            if len(set(tokens)) != len(tokens):
                repeated = sorted(token for token, count in Counter(tokens).items() if count > 1)
                problems.append(
                    f"the {side} vocabulary, which has {', '.join(repeated)} more than once"
                )
        return cls(version, source, target, entries.get("decoder_start_token", START), problems)


def _torchtext(sides: list[Any], path: Path) -> tuple[list[Any], list[str]]:
    """Read the tokens of OpenNMT-py 2 from torchtext's fields, and list their problems."""
    fields: list[Any] = [getattr(side, "fields", None) for side in sides]
    try:
        special = [[field.pad_token, field.unk_token] for ((_, field), *_) in fields]
        special += [[getattr(f[0][1], n) for n in ("init_token", "eos_token")] for f in fields]
        tokens = [field.vocab.itos for ((_, field), *_) in fields]
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ConversionError(
            f"vocab of {path} is neither that of OpenNMT-py 2 (fields of torchtext) nor that of "
            "OpenNMT-py 3 (lists of tokens)."
        ) from error
    problems = []
    if special != [[PAD, UNK], [PAD, UNK], [None, None], [START, END]]:
        problems.append(f"fields with the special tokens {special}")
    if any(len(side) > 1 for side in fields):
        problems.append("source or target features (more than one field)")
    return tokens, problems


def complete_options(given: dict[str, Any], version: int) -> dict[str, Any]:
    """Add OpenNMT-py's defaults to the options of a checkpoint."""
    # Version 2 has no options for biases, because all its networks have biases.
    biases = {"add_qkvbias": version == 2, "add_ffnbias": version == 2}
    return _DEFAULTS | biases | given


def option_problems(options: dict[str, Any]) -> list[str]:
    """List the options that this model cannot follow."""
    problems = []
    for name, supported in _SUPPORTED.items():
        value = options.get(name, supported[0])
        if value not in supported:
            meaning = _MEANINGS.get((name, value)) if isinstance(value, int | str) else None
            problems.append(f"{name} {value}" + (f" ({meaning})" if meaning else ""))
    if options["num_kv"] not in (0, options["heads"]):
        problems.append(f"num_kv {options['num_kv']}")
    known = _SUPPORTED.keys() | _DEFAULTS.keys() | set(_WITHOUT_EFFECT.split())
    # None, False, 0 and empty values switch an option off.
    unknown = sorted(name for name, value in options.items() if value and name not in known)
    return problems + [f"{name} {options[name]} (unknown option)" for name in unknown]


def model_config(options: dict[str, Any], vocabularies: Vocabularies) -> VaswaniConfig:
    """Make the configuration of a checkpoint.

    Raises:
        ConversionError: a vocabulary lacks a special token, or the padding tokens differ.
    """
    source, target = vocabularies.source, vocabularies.target
    pads = [_index(PAD, side) for side in (source, target)]
    _index(UNK, source)
    if pads[0] != pads[1]:
        raise ConversionError(f"{PAD!r} has different ids in the two vocabularies: {pads}.")
    tied = options["share_decoder_embeddings"]
    # The last rate of a schedule is that of the end of the training.
    dropout, attention_dropout = (
        options[name][-1] if isinstance(options[name], list) else options[name]
        for name in ("dropout", "attention_dropout")
    )
    widths = [options[name] for name in _WIDTHS if options.get(name, -1) > 0]
    both_stacks = options["layers"] > 0
    return VaswaniConfig(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        d_model=widths[0],
        encoder_layers=options["layers" if both_stacks else "enc_layers"],
        decoder_layers=options["layers" if both_stacks else "dec_layers"],
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
        unk_token_id=_index(UNK, target),
        eos_token_id=_index(END, target),
        bos_token_id=_index(START, target),
        decoder_start_token_id=_index(vocabularies.start, target),
    )


def _index(token: str, vocabulary: list[str]) -> int:
    if token not in vocabulary:
        raise ConversionError(f"A vocabulary lacks {token!r}, which every model needs.")
    return vocabulary.index(token)


def generation_config(config: VaswaniConfig, version: int) -> VaswaniGenerationConfig:
    """Make the settings that OpenNMT-py's translate has by default."""
    return VaswaniGenerationConfig(
        num_beams=5,
        length_penalty_type="hf",
        max_length_offset=0,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        **_SEARCH[version],
    )


# Options of OpenNMT-py 1.0 to 3.5 that change no translation of a trained Transformer: those of
# corpora and transforms, training, other networks, and alignments.
_WITHOUT_EFFECT = """
_all_transform aan_useffn accum_count accum_steps adagrad_accumulator_init adam_beta1 adam_beta2
add_ffnbias add_qkvbias align_debug alignment_heads alignment_layer alpha apex_opt_level
attn_debug audio_enc_pooling average_decay average_every avg_raw_probs avg_tok_max avg_tok_min
ban_unk_token batch_size batch_size_multiple batch_type beam_size beta bidir_edges
block_ngram_repeat both_embeddings bridge bridge_extra_node brnn bucket_size
bucket_size_increment bucket_size_init cnn_kernel_width config context_gate copy_attn_force
copy_attn_type copy_loss_by_seqlength coverage_penalty data data_ids data_task data_type
data_weights dec_hid_size dec_rnn_size decay_method decay_steps decoder_start_token
default_specials doc_length dropout_steps dump_beam dump_fields dump_preds dump_samples
dump_transforms early_stopping early_stopping_criteria embeddings_type enc_hid_size enc_rnn_size
epochs exp exp_host feat_merge feat_vec_exponent feat_vec_size fix_word_vecs_dec
fix_word_vecs_enc fp32 freeze_decoder freeze_encoder freeze_word_vecs_dec freeze_word_vecs_enc
full_context_alignment fuzzy_corpus_ratio fuzzy_threshold fuzzy_token fuzzymatch_max_length
fuzzymatch_min_length global_attention global_attention_function gold_align gpt2_pretok gpu
gpu_backend gpu_ranks gpu_verbose_level gpuid group_size hidden_size ignore_when_blocking
image_channel_size input_feed insert_ratio int8 isolated_tag keep_checkpoint lambda_align
lambda_coverage langid learn_subwords learn_subwords_size learning_rate learning_rate_decay
length_penalty lm_prior_lambda lm_prior_model lm_prior_tau log_file log_file_level lora_alpha
lora_dropout lora_rank loss_scale mask_length mask_ratio master_ip master_port max_context
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
same_char same_word sample_rate save_checkpoint_steps save_config save_data save_format
save_model scoring_debug scripts_nok scripts_ok seed shard_size share_vocab shared_layer_norm
single_pass skip_empty_level src src_delimiter src_embeddings src_eq_tgt src_feats
src_feats_defaults src_ggnn_size src_lang src_onmttok_kwargs src_prefix src_seq_length
src_seq_length_trunc src_spacy_language_model src_subword_alpha src_subword_model
src_subword_nbest src_subword_type src_subword_vocab src_suffix src_term_stoken src_tgt_ratio
src_vocab src_vocab_size src_vocab_threshold src_word_vec_size src_words_min_frequency
start_decay_steps state_dim stepwise_penalty switchout_temperature tags_corpus_ratio
tags_dictionary_path tensorboard tensorboard_log_dir tensorboard_log_dir_dated term_corpus_ratio
term_example_ratio term_source_delimiter termbase_path tgt tgt_embeddings tgt_file_prefix
tgt_lang tgt_onmttok_kwargs tgt_prefix tgt_seq_length tgt_seq_length_trunc
tgt_spacy_language_model tgt_subword_alpha tgt_subword_model tgt_subword_nbest tgt_subword_type
tgt_subword_vocab tgt_suffix tgt_term_etoken tgt_term_stoken tgt_vocab tgt_vocab_size
tgt_vocab_threshold tgt_word_vec_size tgt_words_min_frequency timeout tm_delimiter tm_path
tokendrop_temperature tokenmask_temperature train_eval_steps train_from train_metrics
train_steps transforms truncated_decoder update_vocab upper_corpus_ratio use_ckpting
valid_batch_size valid_metrics valid_steps verbose vocab_sample_queue_size vocab_size_multiple
w_bit warmup_steps window_size with_score word_vec_size world_size zero_out_prompt_loss
"""

__all__ = [
    "END",
    "PAD",
    "START",
    "UNK",
    "Vocabularies",
    "complete_options",
    "generation_config",
    "model_config",
    "option_problems",
]
