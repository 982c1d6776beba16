"""The layers of the decoder in PyTorch's operators, for prompts and single tokens (section 3.1).

They run where the compiled kernels do not: for prompts, on GPUs, on CPUs without the kernels, and
in other dtypes, such as float64.

Shapes: B sentences, K hypotheses of each (the beam), R rows (all B * K hypotheses, or the open ones
among them), T tokens of a prompt, N positions in the cache, H heads, D = d_model.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .caches_vaswani import SourceCache, TargetCache
from .linear_vaswani import is_changed, prepare


def copied_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy the parameters of a LayerNorm, so that no write during the call changes its answer.

    A module of another type is not copied.
    """
    if type(norm) is not nn.LayerNorm or is_changed(norm):
        return norm
    weight, bias = (
        None if part is None else part.detach().clone() for part in (norm.weight, norm.bias)
    )
    shape, eps = norm.normalized_shape, norm.eps
    return partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=eps)


class _DecoderLayer:
    """A layer of the decoder (3.1), with its linear layers prepared."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.past, self.source = layer.self_attn, layer.encoder_attn
        self.past_qkv = prepare(self.past.q_proj, self.past.k_proj, self.past.v_proj)
        self.past_output = prepare(self.past.out_proj)
        if self.source is not None:
            self.source_query = prepare(self.source.q_proj)
            self.source_output = prepare(self.source.out_proj)
        self.fc1 = prepare(layer.fc1, activation=layer.activation_fn)
        self.fc2 = prepare(layer.fc2)
        self.past_norm = copied_norm(layer.self_attn_layer_norm)
        if self.source is not None:
            self.source_norm = copied_norm(layer.encoder_attn_layer_norm)
        self.final_norm = copied_norm(layer.final_layer_norm)

    def __call__(
        self, states: torch.Tensor, attend_past: Callable, attend_source: Callable
    ) -> torch.Tensor:
        """Transform states (R, D).

        Args:
            states: (R, D).
            attend_past: maps queries, keys and values of the states to concatenated heads.
            attend_source: maps queries of the states to concatenated heads.
        """
        layer = self.layer
        states = layer.add_norm(
            states,
            lambda inputs: self.past_output(attend_past(self.past_qkv(inputs))),
            self.past_norm,
        )
        if self.source is not None:
            states = layer.add_norm(
                states,
                lambda inputs: self.source_output(attend_source(self.source_query(inputs))),
                self.source_norm,
            )
        return layer.add_norm(states, lambda inputs: self.fc2(self.fc1(inputs)), self.final_norm)


class _Attended(NamedTuple):
    """Keys (B * H, d_k, N) and values (B * H, N, d_v) that hypotheses attend to.

    The mask is 0 or -inf, and `scaling` is 1 / sqrt(d_k).
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    scaling: float


class _Attention:
    """Attention of K hypotheses of each of B sentences (3.2.1, equation 1).

    Its buffers serve all layers and steps. With few queries, SDPA is slower.

    Args:
        shape: (B, K).
        heads: H.
        widths: d_k and d_v.
        like: a tensor with the dtype of the keys.
        dtype: dtype of the outputs.
    """

    def __init__(
        self,
        shape: torch.Size,
        heads: int,
        widths: tuple[int, int],
        like: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        sentences, beams = self.shape = shape
        by_head = (sentences, heads, beams)

        def buffer(width: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Return (B * H, K, d) and a view of it as (B, K, H, d)."""
            states = like.new_empty((*by_head, width))
            return states.flatten(0, 1), states.transpose(1, 2)

        self.query, self.query_of_rows = buffer(widths[0])
        self.heads, self.heads_of_rows = buffer(widths[1])
        # Autocast would multiply in another dtype than that of the buffers.
        self.precision: AbstractContextManager = nullcontext()
        if torch.is_autocast_enabled(like.device.type):
            self.precision = torch.autocast(like.device.type, enabled=False)
        self.output = like.new_empty((sentences * beams, heads * widths[1]), dtype=dtype)
        self.output_of_heads = self.output.view(sentences, beams, heads, widths[1])

    def __call__(self, query: torch.Tensor, attended: _Attended) -> torch.Tensor:
        """Return concatenated heads (B * K, H d_v), which the next call overwrites.

        Args:
            query: (B, K, H, d_k).
            attended: its mask is broadcast to (B * H, K, N).
        """
        keys, values, mask, scaling = attended
        self.query_of_rows.copy_(query)
        with self.precision:
            scores = torch.baddbmm(mask, self.query, keys, alpha=scaling)
            torch.bmm(torch.softmax(scores, dim=2, out=scores), values, out=self.heads)
        self.output_of_heads.copy_(self.heads_of_rows)
        return self.output


def _attend_from_prompt(query: torch.Tensor, attended: _Attended) -> torch.Tensor:
    """Attend as `_Attention` does, with a mask that is broadcast to (B, H, K, N)."""
    by_sentence = len(query), query.shape[2]
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2).to(attended.keys.dtype),
        attended.keys.transpose(1, 2).unflatten(0, by_sentence),
        attended.values.unflatten(0, by_sentence),
        attn_mask=attended.mask,
        scale=attended.scaling,
    )
    return output.transpose(1, 2).flatten(2).flatten(0, 1).to(query.dtype)


class TorchLayers:
    """The layers of a decoder, which read and fill the caches of a call of `generate`.

    Args:
        layers: modules of the decoder.
        no_mask: (1, 1, 1), the mask 0 in the dtype of the caches.
    """

    def __init__(self, layers: Any, no_mask: torch.Tensor) -> None:
        self.layers = [_DecoderLayer(layer) for layer in layers]
        self.no_mask = no_mask
        self.attention: _Attention | None = None

    def run(
        self,
        states: torch.Tensor,
        shape: torch.Size,
        rows: torch.Tensor | None,
        target: TargetCache,
        source: SourceCache | None,
        prompt_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Transform states (R, D), and store their keys and values behind those of the target.

        Args:
            states: (R, D).
            shape: (B, K), or (B, T) for a prompt.
            rows: (R,) the hypotheses of the states, among B * K; None means all.
            target: the cache of the past.
            source: the cache of the source; None for a language model.
            prompt_mask: (T, T) or (B, 1, T, T), 0 if seen and -inf if not; None for single tokens.
        """
        end = target.used + shape[1]
        heads, d_k, d_v = target.keys.shape[2], target.keys.shape[4], target.values.shape[4]
        source_mask = self.no_mask if source is None else source.mask
        attend: Callable = _attend_from_prompt
        mask = prompt_mask
        if prompt_mask is None:
            if self.attention is None or self.attention.shape != shape:
                widths = d_k, d_v
                self.attention = _Attention(shape, heads, widths, self.no_mask, states.dtype)
            attend = self.attention
            source_mask = source_mask if source is None else source_mask.flatten(0, 1)
            if target.past is not None:
                mask = target.past[:, None, :, :end].expand(-1, heads, -1, -1).flatten(0, 1)
        mask = self.no_mask if mask is None else mask
        of_source = [] if source is None else source.layers
        # By layer: the places of new keys and values, (B, K, H, d), and those of the whole past.
        new_keys = target.keys[:, :, :, target.used : end].transpose(2, 3).unbind()
        new_values = target.values[:, :, :, target.used : end].transpose(2, 3).unbind()
        keys = target.keys[:, :, :, :end].flatten(1, 2).transpose(2, 3).unbind()
        values = target.values[:, :, :, :end].flatten(1, 2).unbind()

        def attend_past(index: int, inputs: torch.Tensor) -> torch.Tensor:
            """Add new keys and values to the cache, and attend to the whole past."""
            parts = _spread(inputs, shape, rows).split((heads * d_k, heads * d_k, heads * d_v), 1)
            query, key, value = (part.view(*shape, heads, -1) for part in parts)
            new_keys[index].copy_(key)
            new_values[index].copy_(value)
            scaling = self.layers[index].past.scaling
            output = attend(query, _Attended(keys[index], values[index], mask, scaling))
            return output if rows is None else output[rows]

        def attend_source(index: int, query: torch.Tensor) -> torch.Tensor:
            query = _spread(query, shape, rows).view(*shape, heads, -1)
            scaling = self.layers[index].source.scaling
            output = attend(query, _Attended(*of_source[index], source_mask, scaling))
            return output if rows is None else output[rows]

        for index, layer in enumerate(self.layers):
            states = layer(states, partial(attend_past, index), partial(attend_source, index))
        return states


def _spread(states: torch.Tensor, shape: torch.Size, rows: torch.Tensor | None) -> torch.Tensor:
    """Return states (B * K, W) of states (R, W), with zeros at hypotheses that have no row."""
    if rows is None:
        return states
    return states.new_zeros(shape.numel(), states.shape[1]).index_copy_(0, rows, states)


__all__ = ["TorchLayers", "copied_norm"]
