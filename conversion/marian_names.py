"""Marian's weights by our names: two tables of rules, and the order of d_model."""

import numpy as np
import torch

from .rules import ConversionError, Drop, Rename, Rule, Tensors

SOURCE_TABLE, TARGET_TABLE, HEAD = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


def transformers_rules() -> list[Rule]:
    """MarianMTModel's names: ours, but for the bias of the logits."""
    layer = "model.{stack}.layers.{i}"
    names = [SOURCE_TABLE, TARGET_TABLE, HEAD, f"{layer}.{{part}}.{{kind}}"]
    names.append(f"{layer}.{{attention}}.{{part}}.{{kind}}")
    return [
        *(Rename(name, name) for name in names),
        Rename("final_logits_bias", "lm_head.bias", _as_vector, _as_row),
        Drop("model.{stack}.embed_positions.weight", _check_table),
    ]


def marian_rules(norm_position: str) -> list[Rule]:
    """Marian's own names, its layers counted from 0: matrices lie the other way round."""

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
    there, here = "{stack}_l{i}", "model.{stack}.layers.{i}"
    for theirs, ours in (("self", "self_attn"), ("context", "encoder_attn")):
        for x in ("q", "k", "v", "o"):
            projection = f"{here}.{ours}.{'out' if x == 'o' else x}_proj"
            rules.append(matrix(f"{there}_{theirs}_W{x}", f"{projection}.weight"))
            rules.append(vector(f"{there}_{theirs}_b{x}", f"{projection}.bias"))
        rules += norm(f"{there}_{theirs}_Wo", f"{here}.{ours}_layer_norm", suffix)
    for number in (1, 2):
        rules.append(matrix(f"{there}_ffn_W{number}", f"{here}.fc{number}.weight"))
        rules.append(vector(f"{there}_ffn_b{number}", f"{here}.fc{number}.bias"))
    rules += norm(f"{there}_ffn_ffn", f"{here}.final_layer_norm", suffix)
    rules += norm("{stack}_top", "model.{stack}.layer_norm")
    return rules


def _as_vector(row: torch.Tensor) -> torch.Tensor:
    return row.squeeze(0)


def _as_row(vector: torch.Tensor) -> torch.Tensor:
    return vector[None]


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.T.contiguous()


def _check_table(name: str, table: torch.Tensor) -> None:
    """Refuse positions other than the sinusoids that MarianMTModel makes itself.

    Raises:
        ConversionError: they were learned.
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
    """Where each channel comes from when "all sines, all cosines" becomes "sine, cosine, ..."."""
    return torch.arange(width).view(2, -1).T.flatten()


def to_concatenated(width: int) -> torch.Tensor:
    """Where each channel comes from on the way back."""
    return torch.arange(width).view(-1, 2).T.flatten()


def permuted(tensors: Tensors, order: torch.Tensor) -> Tensors:
    """Give the channels of d_model another order in all weights of ours: the model is the same."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        module, kind = name.split(".")[-2:]
        if module.endswith("layer_norm") or module in ("out_proj", "fc2"):
            result[name] = tensor[order]
        elif kind == "weight":  # tables and the maps that read d_model
            result[name] = tensor[:, order].contiguous()
    return result
