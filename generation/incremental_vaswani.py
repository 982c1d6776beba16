"""The decoder, one token at a time, for the searches of `search_vaswani.py` (section 3.1).

Shapes: B sentences, K hypotheses of each (the beam), R rows (all B * K hypotheses, or the open ones
among them), S source tokens, N positions in the cache, L layers, H heads, D = d_model, V entries of
the target vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .linear_vaswani import prepare

_FIRST_CAPACITY = 64  # positions of a new cache; a beam of 4 fills them in 16 steps


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
        self.fc1, self.fc2 = prepare(layer.fc1), prepare(layer.fc2)

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
            layer.self_attn_layer_norm,
        )
        if self.source is not None:
            states = layer.add_norm(
                states,
                lambda inputs: self.source_output(attend_source(self.source_query(inputs))),
                layer.encoder_attn_layer_norm,
            )
        return layer.add_norm(
            states,
            lambda inputs: self.fc2(layer.activation_fn(self.fc1(inputs))),
            layer.final_layer_norm,
        )


class IncrementalDecoder:
    """A decoder with a cache, for K hypotheses of each of B sentences.

    The cache holds the source's keys and values once per sentence, not once per hypothesis. The
    hypotheses of a sentence also share one list of target positions, and a mask tells which
    positions are the past of a hypothesis. A choice of hypotheses changes only the mask; keys and
    values are not copied. When the list is full, positions without a descendant are dropped.

    Args:
        model: a VaswaniForConditionalGeneration, or a VaswaniForCausalLM.
        source: (B, S, D) the encoder's output; None for a language model.
        source_mask: (B, S), nonzero at real source tokens; None means no padding.
        prompt_mask: (B, T), nonzero at real tokens of the prompt, which is padded on the left; None
            means no padding.
        prefix_mask: (B, T), nonzero at tokens of the prompt that see each other in both directions.
    """

    def __init__(
        self,
        model: Any,
        source: torch.Tensor | None,
        source_mask: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        prefix_mask: torch.Tensor | None = None,
    ) -> None:
        self.decoder = model.model.decoder
        self.layers = [_DecoderLayer(layer) for layer in self.decoder.layers]
        self.to_vocabulary = prepare(model.lm_head)
        self.source_mask = None  # (B, 1, 1, S), 0 at real tokens and -inf at padding
        if source is not None and source_mask is not None and not source_mask.all():
            padding = (source_mask == 0)[:, None, None]
            self.source_mask = torch.zeros_like(padding, dtype=source.dtype)
            self.source_mask.masked_fill_(padding, -torch.inf)
        # Keys and values of the source by layer, (B, H, S, d_k or d_v).
        self.source: list[tuple[torch.Tensor, torch.Tensor]] = []
        if source is not None:
            self.source = [layer.source._keys_values(source) for layer in self.layers]
        self.padding = None  # (B, T), True at padding of the prompt
        if prompt_mask is not None and not prompt_mask.all():
            self.padding = prompt_mask == 0
        self.prefix_mask = None if prefix_mask is None else prefix_mask != 0
        # Keys, then values of all heads, by layer and position: (L, B, N, H d_k + H d_v).
        self.target = torch.empty(0)
        self.slots: list[tuple[torch.Tensor, ...]] = []  # by layer: views of all, keys and values
        self.used = 0  # positions of the N that are taken
        self.past: torch.Tensor | None = None  # (B, K, N), 0 at a hypothesis' past, else -inf
        self.position = 0  # position of the next token in the sentence, padding included
        weight = self.decoder.embed_tokens.weight
        # Encodings, computed in advance. An int8 weight has another dtype than its embeddings.
        self.positions = weight.new_empty((0, weight.shape[1]), dtype=self.decoder.dtype)

    def _cached_width(self) -> int:
        """Return the width of the keys and values of a position, in the heads of this process."""
        if self.source:
            return sum(keys.shape[1] * keys.shape[3] for keys in self.source[0])
        attention = self.layers[0].past
        return sum(len(_own_rows(map.weight)) for map in (attention.k_proj, attention.v_proj))

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T), and predict the next: logits (B, V)."""
        sentences, length = prefix.shape
        shape = (len(self.layers), sentences, 0, self._cached_width() if self.layers else 0)
        self._use(self.positions.new_empty(shape))
        position_ids = None
        if self.padding is not None:
            position_ids = ((~self.padding).cumsum(dim=1) - 1).clamp(min=0)
        states = self.decoder.embed(prefix, None, position_ids=position_ids)
        mask = self._mask_of_prompt(states) if length > 1 else None
        states = self._decode(states.flatten(0, 1), prefix.shape, None, mask)
        self.position = length
        return self.to_vocabulary(states.view(*prefix.shape, -1)[:, -1])

    def _mask_of_prompt(self, states: torch.Tensor) -> torch.Tensor:
        """Say what the prompt's tokens see of each other: (T, T) or (B, 1, T, T), 0 or -inf."""
        length = states.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=states.device).tril()
        if self.prefix_mask is not None:
            seen = seen | (self.prefix_mask[:, :, None] & self.prefix_mask[:, None])
        if self.padding is not None:
            # Padding sees itself, because softmax over nothing is NaN.
            seen = (seen & ~self.padding[:, None]) | torch.eye(length, device=seen.device).bool()
        mask = states.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return mask if mask.dim() == 2 else mask[:, None]

    def step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Extend hypotheses by one token each, and predict the next: logits (R, V).

        Args:
            tokens: (B, K).
            parents: (B, K) the hypothesis of the previous step that each new one extends.
            open_rows: (R,) the hypotheses to compute, among B * K; None means all.
        """
        states = self._embed(tokens, open_rows)
        masked = tokens.shape[1] > 1 or self.padding is not None
        mask = self._descend(tokens.shape, parents, states) if masked else None
        states = self._decode(states, tokens.shape, open_rows, mask)
        self.position += 1
        return self.to_vocabulary(states)

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences but these, given by their numbers (B',)."""
        self.source = [
            (keys.index_select(0, sentences), values.index_select(0, sentences))
            for keys, values in self.source
        ]
        self._use(self.target.index_select(1, sentences))
        if self.padding is not None:
            self.padding = self.padding.index_select(0, sentences)
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, sentences)
        if self.past is not None:
            self.past = self.past.index_select(0, sentences)

    def _use(self, target: torch.Tensor) -> None:
        """Take another buffer as the cache, with a view of keys and one of values per layer."""
        self.target = target
        self.slots = []
        for index, layer in enumerate(self.layers):
            cached, d_k, d_v = target[index], layer.past.d_k, layer.past.d_v
            heads = target.shape[3] // (d_k + d_v)
            keys = _heads(cached[:, :, : heads * d_k], heads, d_k)
            values = _heads(cached[:, :, heads * d_k :], heads, d_v)
            self.slots.append((cached, keys, values))

    def _embed(self, tokens: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Embed the tokens (B, K) of some rows at their next positions (3.4, 3.5): (R, D)."""
        if self.position >= len(self.positions):
            end = self.position + 1
            if not isinstance(self.decoder.embed_positions, nn.Embedding):
                end *= 2  # sinusoids have no last position, so compute some in advance
            self.positions = self.decoder.embed_positions(0, end, tokens.device).to(self.positions)
        position: Any = self.position
        if self.padding is not None:  # a number for each row
            position = (position - self.padding.sum(dim=1))[:, None].expand_as(tokens).flatten()
            position = position if rows is None else position[rows]
        tokens = tokens.flatten() if rows is None else tokens.flatten()[rows]
        embeddings = self.decoder.embed_tokens(tokens) * self.decoder.embed_scale
        return embeddings + self.positions[position]

    def _decode(
        self,
        states: torch.Tensor,
        shape: torch.Size,
        rows: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layers on states (R, D).

        Args:
            states: (R, D).
            shape: (B, K), or (B, T) while a prefix is read.
            rows: (R,) the hypotheses of the states, among B * K; None means all.
            mask: for the attention to the target, broadcast to (B, H, K, N).
        """
        self._make_room(shape[1])
        for index, layer in enumerate(self.layers):
            attend_past = functools.partial(self._attend_past, index, mask, shape, rows)
            attend_source = functools.partial(self._attend_source, index, shape, rows)
            states = layer(states, attend_past, attend_source)
        self.used += shape[1]
        return self.decoder.layer_norm(states)

    def _attend_past(
        self,
        index: int,
        mask: torch.Tensor | None,
        shape: torch.Size,
        rows: torch.Tensor | None,
        inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Add new keys and values to the cache, and attend to the whole past: (R, H d_v).

        The inputs are concatenated queries, keys and values (R, H (2 d_k + d_v)).
        """
        attention = self.layers[index].past
        cached, keys, values = self.slots[index]
        end = self.used + shape[1]
        inputs = _spread(inputs, shape, rows)
        width = inputs.shape[2] - cached.shape[2]  # of the queries
        cached[:, self.used : end] = inputs[:, :, width:]
        past = keys[:, :, :end], values[:, :, :end]
        return _attend(attention, inputs[:, :, :width], *past, mask, rows)

    def _attend_source(
        self, index: int, shape: torch.Size, rows: torch.Tensor | None, query: torch.Tensor
    ) -> torch.Tensor:
        attention, (keys, values) = self.layers[index].source, self.source[index]
        return _attend(attention, _spread(query, shape, rows), keys, values, self.source_mask, rows)

    def _descend(
        self, shape: torch.Size, parents: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Return a mask (B, 1, K, N): each hypothesis sees its parent's past and itself."""
        sentences, beams = shape
        if self.past is None:
            self.past = like.new_full((sentences, beams, self.target.shape[2]), -torch.inf)
            self.past[:, :, : self.used] = 0
            if self.padding is not None:
                self.past[:, :, : self.used].masked_fill_(self.padding[:, None], -torch.inf)
        elif parents is not None:
            self.past = self.past.gather(1, parents[:, :, None].expand_as(self.past))
        self._make_room(beams)
        assert self.past is not None
        end = self.used + beams
        self.past[:, :, self.used : end].diagonal(dim1=1, dim2=2).zero_()
        return self.past[:, None, :, :end]

    def _make_room(self, positions: int) -> None:
        """Make room in the cache for more positions."""
        if self.used + positions <= self.target.shape[2]:
            return
        if self.past is not None:
            self._drop_dead_ends(self.past)
        if 2 * (self.used + positions) > self.target.shape[2]:
            more = max(self.target.shape[2], 2 * positions, _FIRST_CAPACITY)
            # Positions that are not taken stay without values, because nothing reads them.
            grown = self.target.new_empty(
                (*self.target.shape[:2], self.target.shape[2] + more, self.target.shape[3])
            )
            grown[:, :, : self.used] = self.target[:, :, : self.used]
            self._use(grown)
            if self.past is not None:
                self.past = F.pad(self.past, (0, more), value=-torch.inf)

    def _drop_dead_ends(self, past: torch.Tensor) -> None:
        """Move the positions that belong to the past of a hypothesis to the front of the cache."""
        alive = (past == 0).any(dim=1)  # (B, N)
        self.used = int(alive.sum(dim=1).max())
        # Sentences with fewer live positions keep dead ones at the end. The mask hides them.
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        self.past = past.gather(2, order[:, None].expand_as(past))
        kept = order[None, :, : self.used, None].expand(
            *self.target.shape[:2], -1, self.target.shape[3]
        )
        self.target[:, :, : self.used] = self.target.gather(2, kept)


def _own_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return the part of a weight that this process holds."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _heads(states: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """View states (B, N, H * width) as heads (B, H, N, width)."""
    return states.view(*states.shape[:2], heads, width).transpose(1, 2)


def _attend(
    attention: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from queries (B, K, H d_k) to keys and values: concatenated heads (R, H d_v)."""
    output = F.scaled_dot_product_attention(
        _heads(query, keys.shape[1], attention.d_k),
        keys,
        values,
        attn_mask=mask,
        scale=attention.scaling,
    )
    width = output.shape[1] * output.shape[3]
    output = output.transpose(1, 2).reshape(-1, width)  # (B * K, H * d_v)
    return output if rows is None else output[rows]


def _spread(states: torch.Tensor, shape: torch.Size, rows: torch.Tensor | None) -> torch.Tensor:
    """Reshape states (R, W) to (B, K, W), with zeros at hypotheses that have no row."""
    if rows is not None:
        states = states.new_zeros(shape.numel(), states.shape[1]).index_copy_(0, rows, states)
    return states.view(*shape, -1)
