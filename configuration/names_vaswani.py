"""Misspelt and foreign names of settings, and the known names that they mean."""

import difflib
import functools
from collections.abc import Collection, Iterable

# Fields of the configuration, and their names in other libraries.
_FOREIGN_NAMES = {
    "encoder_attention_heads decoder_attention_heads": (
        "attention_heads attn_heads h heads n_head n_heads nhead nheads num_attn_heads num_head "
        "num_heads num_key_value_heads transformer_heads"
    ),
    "encoder_attention_heads": (
        "enc_heads encoder_heads encoder_num_heads num_encoder_attention_heads num_encoder_heads"
    ),
    "decoder_attention_heads": (
        "dec_heads decoder_heads decoder_num_heads num_decoder_attention_heads num_decoder_heads"
    ),
    "encoder_layers decoder_layers": (
        "depth layers n n_blocks n_layer n_layers nlayers num_blocks num_layer num_layers"
    ),
    "encoder_layers": (
        "enc_depth enc_layers encoder_depth encoder_num_layers n_enc_layers n_encoder_layers "
        "num_enc_layers num_encoder_blocks num_encoder_layers"
    ),
    "decoder_layers": (
        "dec_depth dec_layers decoder_depth decoder_num_layers n_dec_layers n_decoder_layers "
        "num_dec_layers num_decoder_blocks num_decoder_layers"
    ),
    "encoder_ffn_dim decoder_ffn_dim": (
        "d_ff d_ffn d_inner d_inner_hid dff dim_feedforward feed_forward_dim feed_forward_size "
        "feedforward_channels feedforward_dim ff_dim ff_size ffn ffn_dim ffn_embed_dim ffn_hidden "
        "ffn_size filter_size inner_dim intermediate_dim intermediate_size mlp_dim n_inner "
        "transformer_ff"
    ),
    "encoder_ffn_dim": (
        "encoder_ff_dim encoder_ffn_embed_dim encoder_ffn_size encoder_intermediate_size"
    ),
    "decoder_ffn_dim": (
        "decoder_ff_dim decoder_ffn_embed_dim decoder_ffn_size decoder_intermediate_size"
    ),
    "d_model": (
        "d_embed d_hidden d_word_vec decoder_embed_dim dim emb_dim emb_size embed_dim embed_size "
        "embedding_dim embedding_size encoder_embed_dim hidden_dim latent_dim model_dim model_size "
        "n_embd num_units rnn_size width word_vec_size"
    ),
    "d_k d_v": "d_head d_kv dim_head head_dim head_size qkv_dim",
    "vocab_size": (
        "n_src_vocab n_vocab source_vocab_size src_vocab src_vocab_size vocabulary_size"
    ),
    "decoder_vocab_size": (
        "n_tgt_vocab n_trg_vocab target_vocab_size tgt_vocab tgt_vocab_size trg_vocab "
        "trg_vocab_size"
    ),
    "dropout": (
        "decoder_dropout drop_prob drop_rate dropout_prob dropout_rate embd_pdrop "
        "embedding_dropout encoder_dropout hidden_dropout hidden_dropout_p hidden_dropout_prob "
        "hidden_dropout_rate layer_prepostprocess_dropout p_drop resid_dropout resid_pdrop "
        "residual_dropout"
    ),
    "attention_dropout": (
        "attention_dropout_rate attention_probs_dropout_prob attn_dropout attn_dropout_rate "
        "attn_pdrop"
    ),
    "activation_dropout": "ff_dropout ffn_dropout relu_dropout",
    "label_smoothing": (
        "epsilon_ls label_smooth label_smoothing_eps label_smoothing_factor label_smoothing_rate "
        "smoothing"
    ),
    "activation_function": (
        "activation activation_fn feed_forward_proj hidden_act hidden_activation"
    ),
    "norm_position": (
        "decoder_normalize_before do_layer_norm_before encoder_normalize_before norm_first "
        "normalize_before pre_norm prenorm"
    ),
    "final_layer_norm": "add_final_layer_norm",
    "position_encoding": (
        "decoder_learned_pos encoder_learned_pos learned_pos learned_positions pos_enc "
        "pos_encoding position_embedding position_embedding_type positional_embedding "
        "static_position_embeddings"
    ),
    "max_position_embeddings": (
        "block_size context_length max_len max_position max_positions max_seq_len max_seq_length "
        "max_sequence_length max_source_positions max_target_positions n_ctx n_position "
        "n_positions"
    ),
    "attention_bias": "attn_bias bias qkv_bias use_bias",
    "lm_head_bias": "final_bias output_bias",
    "scale_embedding": "embed_scale embedding_scale no_scale_embedding",
    "layer_norm_eps": "layer_norm_epsilon ln_eps norm_eps norm_epsilon rms_norm_eps",
    "init_std": "initializer_range",
    "initializer": "init init_method param_init_glorot",
    "tie_word_embeddings share_encoder_decoder_embeddings": (
        "share_all_embeddings share_embedding share_embeddings share_embs tie_all_embeddings "
        "tie_embedding tie_embeddings tie_weights tied tied_embeddings tied_embeddings_all "
        "weight_tying"
    ),
    "tie_word_embeddings": (
        "proj_share_weight share_decoder_embeddings share_decoder_input_output_embed tied_softmax "
        "trg_emb_prj_weight_sharing"
    ),
    "share_encoder_decoder_embeddings": (
        "emb_src_trg_weight_sharing share_vocab tied_embeddings_src"
    ),
    "pad_token_id": "pad_id pad_idx pad_index padding_idx src_pad_idx trg_pad_idx",
    "unk_token_id": "unk_id unk_idx unk_index",
    "eos_token_id": "eos_id eos_idx eos_index trg_eos_idx",
    "bos_token_id": "bos_id bos_idx bos_index",
    "decoder_start_token_id": "decoder_start_id decoder_start_token sos_id sos_idx trg_sos_idx",
}


def meant_names(name: str, known: Collection[str]) -> list[str]:
    """List the known names that `name` means, as a misspelling or in another library.

    The list is empty for an unrelated name.
    """
    folded = name.lower().replace("-", "_")
    for fields, foreign in _FOREIGN_NAMES.items():
        # A model with a single stack has one of the two fields.
        meant = [field for field in fields.split() if field in known]
        if folded in foreign.split() and meant:
            return meant
    near = []
    for field in known:
        # Short names may differ in one letter and mean different things, as d_k and d_v do.
        allowed = 1 + (len(field) > 5)
        if abs(len(folded) - len(field)) <= allowed:
            distance = _distance(folded, field)
            if distance <= allowed:
                near.append((distance, field))
    return [field for _, field in sorted(near)[:1]]


def complaints(names: Iterable[str], known: Collection[str]) -> str:
    """Describe the names that are not in `known`, and what each may mean; else return ""."""
    found = []
    for name in names:
        if name not in known:
            meant = meant_names(name, known) or difflib.get_close_matches(name, known, n=1)
            right = " and ".join(map(repr, meant))
            hint = f"did you mean {right}?" if right else "it resembles no known name."
            found.append(f"{name!r} is unknown: {hint}")
    return " ".join(found)


@functools.lru_cache(4096)  # every loaded file has the same names
def _distance(word: str, target: str) -> int:
    """Count the letters to insert, delete, replace or swap until `word` becomes `target`."""
    before: list[int] = []
    row = list(range(len(target) + 1))
    for i, letter in enumerate(word, start=1):
        above, row = row, [i]
        for j, wanted in enumerate(target, start=1):
            cheapest = min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and (word[i - 2], letter) == (wanted, target[j - 2]):
                cheapest = min(cheapest, before[j - 2] + 1)
            row.append(cheapest)
        before = above
    return row[-1]


__all__ = ["complaints", "meant_names"]
