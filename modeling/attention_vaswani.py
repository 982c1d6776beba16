"""Attention (section 3.2): the formula, its heads, and the cache of keys and values.

Shapes: B sentences, Q queries, K keys, H heads, D = d_model; d_k and d_v as in the paper.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache

from ..configuration.configuration_vaswani import VaswaniConfig
from .dropout_vaswani import drop_out
from .packed_attention_vaswani import attention_function
from .pickling_vaswani import PicklableModule
from .quantization_vaswani import AdaptableModule
from .training_products_vaswani import project, project_each


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V (section 3.2.1, equation 1)."""
    scores = query @ key.transpose(-2, -1) * scaling  # (B, H, Q, K)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:  # a caller's own mask, True at visible keys
            hidden, lowest = ~attention_mask, torch.finfo(scores.dtype).min
            attention_mask = scores.new_zeros(hidden.shape).masked_fill(hidden, lowest)
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1)
    if attention_mask is not None:
        # A query without any key (the source is all padding) gets zeros, as from SDPA.
        no_key = attention_mask.amax(dim=-1, keepdim=True) <= torch.finfo(scores.dtype).min
        weights = weights.masked_fill(no_key, 0.0)
    weights = drop_out(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights  # (B, Q, H, d_v), (B, H, Q, K)


def linear_with_gain(
    inputs: int, outputs: int, bias: bool = True, fairseq_gain: float = 1.0
) -> nn.Linear:
    """Make a linear layer. Its `fairseq_gain` scales Xavier's bound if initializer="fairseq"."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.fairseq_gain = fairseq_gain  # type: ignore[assignment]
    return linear


class VaswaniAttention(PicklableModule, AdaptableModule):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O (section 3.2.2).

    The model has all three kinds of 3.2.3: encoder self-attention, masked decoder self-attention,
    and encoder-decoder attention.
    """

    def __init__(
        self, config: VaswaniConfig, num_heads: int, layer_idx: int, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.num_heads = num_heads
        self.dropout = config.attention_dropout
        self.d_k = config.d_k or config.d_model // num_heads
        self.d_v = config.d_v or config.d_model // num_heads
        self.scaling = self.d_k**-0.5
        keys, values, bias = num_heads * self.d_k, num_heads * self.d_v, config.attention_bias
        self.q_proj = linear_with_gain(config.d_model, keys, bias, fairseq_gain=2**-0.5)
        self.k_proj = linear_with_gain(config.d_model, keys, bias, fairseq_gain=2**-0.5)
        self.v_proj = linear_with_gain(config.d_model, values, bias, fairseq_gain=2**-0.5)
        self.out_proj = linear_with_gain(values, config.d_model, bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from (B, Q, D) to itself, or to `encoder_hidden_states` (B, K, D)."""
        hidden_states = _cast_once(hidden_states)
        if encoder_hidden_states is None:
            layers = self.q_proj, self.k_proj, self.v_proj
            query, *keys_values = project_each(layers, hidden_states)
            key, value = self._self_keys_values(keys_values, past_key_values)
        else:
            query = project(self.q_proj, hidden_states)
            key, value = self._cross_keys_values(encoder_hidden_states, past_key_values)
        query = self._split_heads(query, self.d_k)  # (B, H, Q, d_k)
        implementation = self.config._attn_implementation
        attention = attention_function(
            implementation, attention_mask, query, eager_attention_forward
        )
        kwargs["dropout"] = self.dropout if self.training else 0.0
        output, weights = attention(
            self, query, key, value, attention_mask, scaling=self.scaling, **kwargs
        )  # (B, Q, H, d_v), (B, H, Q, K) or None
        return project(self.out_proj, output.flatten(2)), weights  # (B, Q, D)

    def _split_heads(self, states: torch.Tensor, width: int) -> torch.Tensor:
        # With tensor parallelism, H is the number of heads of this process.
        return states.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, H, Q or K, width)

    def _in_heads(self, keys_values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = keys_values
        return self._split_heads(keys, self.d_k), self._split_heads(values, self.d_v)

    def _self_keys_values(
        self, projections: list[torch.Tensor], past: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new positions to the cache."""
        keys_values = self._in_heads(projections)
        if past is None:
            return keys_values
        own = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
        return own.update(*keys_values, self.layer_idx)

    def _cross_keys_values(
        self, states: torch.Tensor, past: EncoderDecoderCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the source in the first step; later steps read the cache."""
        if past is not None and past.is_updated.get(self.layer_idx):
            cached = past.cross_attention_cache.layers[self.layer_idx]
            return cached.keys, cached.values  # type: ignore[return-value, union-attr]
        keys_values = self._in_heads(project_each((self.k_proj, self.v_proj), _cast_once(states)))
        if past is None:
            return keys_values
        past.is_updated[self.layer_idx] = True
        return past.cross_attention_cache.update(*keys_values, self.layer_idx)


def _cast_once(states: torch.Tensor) -> torch.Tensor:
    """Cast states as autocast does, which would cast them again for each linear map."""
    device = states.device.type
    if states.is_meta or not torch.is_autocast_enabled(device):
        return states
    is_exact = states.dtype == torch.float64  # autocast leaves float64 as it is
    return states if is_exact else states.to(torch.get_autocast_dtype(device))


__all__ = ["VaswaniAttention", "eager_attention_forward", "linear_with_gain"]
