"""Names of weights and settings in Marian and MarianMTModel, and the order of d_model."""

import numpy as np
import torch

from .errors import ConversionError
from .rules import Drop, Rename, Rule, Tensors

SOURCE_TABLE, TARGET_TABLE, HEAD = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
# Fields of MarianConfig that VaswaniConfig has under the same name.
SAME_FIELDS = """
d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads
encoder_ffn_dim decoder_ffn_dim dropout attention_dropout activation_dropout activation_function
init_std max_position_embeddings scale_embedding share_encoder_decoder_embeddings
tie_word_embeddings use_cache pad_token_id eos_token_id bos_token_id decoder_start_token_id
"""
MAX_LENGTH = 512  # tokens of a translation, as in transformers' own conversion of OPUS-MT


def transformers_rules() -> list[Rule]:
    """Pair MarianMTModel's names with ours. Only the bias of the logits has another name."""
    layer = "model.{stack}.layers.{i}"
    names = [SOURCE_TABLE, TARGET_TABLE, HEAD, f"{layer}.{{part}}.{{kind}}"]
    names.append(f"{layer}.{{attention}}.{{part}}.{{kind}}")
    return [
        *(Rename(name, name) for name in names),
        Rename("final_logits_bias", "lm_head.bias", _as_vector, _as_row),
        Drop("model.{stack}.embed_positions.weight", _check_table),
    ]


def marian_rules(norm_position: str) -> list[Rule]:
    """Pair Marian's own names, with layers numbered from 0, with ours. Matrices are transposed."""

    def matrix(theirs: str, ours: str) -> Rename:
        return Rename(theirs, ours, _transposed, _transposed)

    def vector(theirs: str, ours: str) -> Rename:
        return Rename(theirs, ours, _as_vector, _as_row)

    def norm(theirs: str, ours: str, suffix: str = "") -> list[Rule]:
        kinds = {"scale": "weight", "bias": "bias"}
        return [
            vector(f"{theirs}_ln_{kind}{suffix}", f"{ours}.{name}") for kind, name in kinds.items()
        ]

    suffix = "_pre" if norm_position == "pre" else ""
    rules: list[Rule] = [
        Rename("encoder_Wemb", SOURCE_TABLE),
        Rename("decoder_Wemb", TARGET_TABLE),
        Rename("decoder_ff_logit_out_Wt", HEAD),
        vector("decoder_ff_logit_out_b", "lm_head.bias"),
    ]
    their_layer, our_layer = "{stack}_l{i}", "model.{stack}.layers.{i}"
    for theirs, ours in (("self", "self_attn"), ("context", "encoder_attn")):
        for letter in ("q", "k", "v", "o"):
            projection = f"{our_layer}.{ours}.{'out' if letter == 'o' else letter}_proj"
            rules.append(matrix(f"{their_layer}_{theirs}_W{letter}", f"{projection}.weight"))
            rules.append(vector(f"{their_layer}_{theirs}_b{letter}", f"{projection}.bias"))
        rules += norm(f"{their_layer}_{theirs}_Wo", f"{our_layer}.{ours}_layer_norm", suffix)
    for number in (1, 2):
        rules.append(matrix(f"{their_layer}_ffn_W{number}", f"{our_layer}.fc{number}.weight"))
        rules.append(vector(f"{their_layer}_ffn_b{number}", f"{our_layer}.fc{number}.bias"))
    rules += norm(f"{their_layer}_ffn_ffn", f"{our_layer}.final_layer_norm", suffix)
    rules += norm("{stack}_top", "model.{stack}.layer_norm")
    return rules


def _as_vector(row: torch.Tensor) -> torch.Tensor:
    return row.squeeze(0)


def _as_row(vector: torch.Tensor) -> torch.Tensor:
    return vector[None]


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.T.contiguous()


def _check_table(name: str, table: torch.Tensor) -> None:
    """Refuse a table of positions that differs from the sinusoids of MarianMTModel.

    Raises:
        ConversionError: the table differs.
    """
    length, width = table.shape if table.dim() == 2 else (0, 0)
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    expected = torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), axis=1))
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(table.dtype, 1e-5)
    if table.shape != expected.shape or not torch.allclose(
        table.double(), expected, rtol=0, atol=tolerance
    ):
        raise ConversionError(f"{name} is not MarianMTModel's table of sinusoids.")


# The order of d_model


def to_interleaved(width: int) -> torch.Tensor:
    """Order the channels of "all sines, all cosines" as "sine, cosine, sine, cosine, ..."."""
    return torch.arange(width).view(2, -1).T.flatten()


def to_concatenated(width: int) -> torch.Tensor:
    """Order the channels of "sine, cosine, sine, cosine, ..." as "all sines, all cosines"."""
    return torch.arange(width).view(-1, 2).T.flatten()


def permuted(tensors: Tensors, order: torch.Tensor) -> Tensors:
    """Reorder the channels of d_model in all weights. The model computes the same."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        module, kind = name.split(".")[-2:]
        if module.endswith("layer_norm") or module in ("out_proj", "fc2"):
            result[name] = tensor[order]
        elif kind == "weight":  # embeddings, and matrices whose input is d_model
            result[name] = tensor[:, order].contiguous()
    return result


__all__ = [
    "HEAD",
    "MAX_LENGTH",
    "SAME_FIELDS",
    "SOURCE_TABLE",
    "TARGET_TABLE",
    "marian_rules",
    "permuted",
    "to_concatenated",
    "to_interleaved",
    "transformers_rules",
]
