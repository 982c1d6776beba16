"""The decoder, one token at a time, for the searches of `search_vaswani.py` (section 3.1).

Shapes: B sentences, K hypotheses of each (the beam), R rows (all B * K hypotheses, or the open ones
among them), S source tokens, N positions in the cache, L layers, H heads, D = d_model, V entries of
the target vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .compiled_vaswani import CompiledEmbedding, CompiledLayers, CompiledLinear
from .library_vaswani import COMPUTED, compute
from .linear_vaswani import prepare
from .memory_vaswani import empty
from .structures_vaswani import descend

_FIRST_ROOM = 64  # positions of a new cache; a beam of 4 fills them in 16 steps
_SPARE_ROOM = 4  # times as much as is needed, on a CPU


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
            states, lambda inputs: self.fc2(self.fc1(inputs)), layer.final_layer_norm
        )


def _keys_and_values(
    attention: Any, source: torch.Tensor, prepared: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project the encoder's output: keys and values (B, H, S, d_k or d_v).

    Args:
        attention: of a layer to the source.
        source: (B, S, D).
        prepared: prepares a linear layer.
    """
    rows, by_sentence = source.flatten(0, 1), source.shape[:2]
    keys, values = (
        prepared(linear)(rows).unflatten(0, by_sentence)
        for linear in (attention.k_proj, attention.v_proj)
    )
    split = attention._split_heads
    return split(keys, attention.d_k), split(values, attention.d_v)


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
        dtype: of the outputs.
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


class IncrementalDecoder:
    """A decoder with a cache, for K hypotheses of each of B sentences.

    The cache holds the source's keys and values once per sentence, not once per hypothesis. The
    hypotheses of a sentence also share one list of target positions, and a mask tells which
    positions are the past of a hypothesis. A choice of hypotheses changes only the mask; keys and
    values are not copied. When the list is full, positions without a descendant are dropped.

    On a CPU, attention and its cache are in float32 even if the model has 16 bits, because PyTorch
    multiplies such small matrices faster in float32.

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
        weight = self.decoder.embed_tokens.weight
        self.can_compile = self.decoder.dtype in COMPUTED and weight.device.type == "cpu"
        self.layers: list[_DecoderLayer] = []  # made when the kernels do not run the layers
        self.logits = self._prepared(model.lm_head)  # (r, V) of states (r, D), until the next call
        self.vocabulary = len(weight)  # V
        # Encodings, computed in advance. An int8 weight has another dtype than its embeddings.
        self.positions = weight.new_empty((0, weight.shape[1]), dtype=self.decoder.dtype)
        dtype = self.decoder.dtype
        if weight.device.type == "cpu":
            dtype = torch.promote_types(dtype, torch.float32)
        self.no_mask = weight.new_zeros((1, 1, 1), dtype=dtype)
        # Keys (B * H, d_k, S) and values (B * H, S, d_v) of the source, by layer.
        self.source: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.source_mask = self.no_mask  # (B, H, 1, S or 1), 0 at real tokens, -inf at padding
        if source is not None:
            self._read_source(source, source_mask)
        self.padding = None  # (B, T), True at padding of the prompt
        if prompt_mask is not None and not prompt_mask.all():
            self.padding = prompt_mask == 0
        self.prefix_mask = None if prefix_mask is None else prefix_mask != 0
        # Keys and values of the target, (L, B, H, N, d_k or d_v).
        self.keys, self.values = torch.empty(0), torch.empty(0)
        self.attention: _Attention | None = None
        self.compiled: CompiledLayers | None = None
        self.embedding: CompiledEmbedding | None = None
        self.used = 0  # positions of the N that are taken
        self.room = 0  # positions that are taken before dead ends are dropped
        self.past: torch.Tensor | None = None  # (B, K, N), 0 at a hypothesis' past, else -inf
        self.earlier_past: torch.Tensor | None = None  # memory for the next `past`
        self.position = 0  # position of the next token in the sentence, padding included

    def _prepared(self, linear: nn.Linear) -> Callable:
        """Prepare a linear layer, for the compiled kernels if they support it."""
        return (self.can_compile and CompiledLinear.prepare(linear)) or prepare(linear)

    def _read_source(self, source: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Compute keys and values of the source (B, S, D)."""
        padding = nothing = None  # (B, 1, 1, S), (B, 1, 1, 1)
        if mask is not None and not mask.all():
            padding = (mask == 0)[:, None, None]
            nothing = padding.all(dim=3, keepdim=True)
        for layer in self.decoder.layers:
            keys, values = (
                empty(states.shape, self.no_mask.dtype, states.device).copy_(states)
                for states in _keys_and_values(layer.encoder_attn, source, self._prepared)
            )  # (B, H, S, d_k or d_v)
            self.source.append((keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)))
            if nothing is not None:
                values.masked_fill_(nothing, 0)  # as from SDPA, if there is no token to attend to
        if self.source:
            shape = len(source), len(self.source[0][0]) // len(source), 1, 1
            self.source_mask = self.no_mask.new_zeros(shape)
        if padding is not None and nothing is not None:
            self.source_mask = self.source_mask.masked_fill(padding & ~nothing, -torch.inf)

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T): states that predict the next (B, D)."""
        sentences, length = prefix.shape
        self._start_cache(sentences)
        position_ids = None
        if self.padding is not None:
            position_ids = ((~self.padding).cumsum(dim=1) - 1).clamp(min=0)
        states = self.decoder.embed(prefix, None, position_ids=position_ids).flatten(0, 1)
        mask = self._mask_of_prompt(length) if length > 1 else None
        states = self._decode(states, prefix.shape, None, mask)
        self.position = length
        return states.view(*prefix.shape, -1)[:, -1]

    def _start_cache(self, sentences: int) -> None:
        heads = d_k = d_v = 0
        if len(self.decoder.layers):
            attention = self.decoder.layers[0].self_attn
            d_k, d_v = attention.d_k, attention.d_v
            if self.source:
                heads = len(self.source[0][0]) // sentences
            else:
                heads = len(_own_rows(attention.k_proj.weight)) // d_k
        shape = len(self.decoder.layers), sentences, heads, 0
        self.keys = self.no_mask.new_empty((*shape, d_k))
        self.values = self.no_mask.new_empty((*shape, d_v))
        if self.can_compile:
            self.compiled = CompiledLayers.prepare(self.decoder.layers, heads)
            self._show_source()
            if self.padding is None and self.decoder.dtype == torch.float32:
                embedding, factor = self.decoder.embed_tokens, self.decoder.embed_scale
                self.embedding = CompiledEmbedding.prepare(embedding, factor)

    def _show_source(self) -> None:
        """Tell the compiled layers where the keys and values of the source are."""
        if self.compiled is not None and self.source:
            tokens = self.source[0][1].shape[1]
            self.compiled.read_source(self.source, self.source_mask[:, 0, 0].expand(-1, tokens))

    def _mask_of_prompt(self, length: int) -> torch.Tensor:
        """Say what the prompt's tokens see of each other: (T, T) or (B, 1, T, T), 0 or -inf."""
        device = self.no_mask.device
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if self.prefix_mask is not None:
            seen = seen | (self.prefix_mask[:, :, None] & self.prefix_mask[:, None])
        if self.padding is not None:
            # Padding sees itself, because softmax over nothing is NaN.
            seen = (seen & ~self.padding[:, None]) | torch.eye(length, device=device).bool()
        mask = self.no_mask.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return mask if mask.dim() == 2 else mask[:, None]

    def step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Extend hypotheses by one token each: states that predict the next (R, D).

        Args:
            tokens: (B, K).
            parents: (B, K) the hypothesis of the previous step that each new one extends.
            open_rows: (R,) the hypotheses to compute, among B * K; None means all.
        """
        states = self._embed(tokens, open_rows)
        if tokens.shape[1] > 1 or self.padding is not None:
            self._descend(tokens.shape, parents)
        states = self._decode(states, tokens.shape, open_rows)
        self.position += 1
        return states

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences but these, given by their numbers (B',).

        A sentence stays at its place, or takes the place of one that is dropped.
        """
        numbers = sentences.tolist()

        def kept(rows: torch.Tensor) -> torch.Tensor:
            for place, sentence in enumerate(numbers):
                if place != sentence:
                    rows[place].copy_(rows[sentence])
            return rows[: len(numbers)]

        heads = self.keys.shape[2]
        for index, states in enumerate(self.source):
            keys, values = (kept(part.unflatten(0, (-1, heads))).flatten(0, 1) for part in states)
            self.source[index] = keys, values
        for cache in (self.keys, self.values):
            kept(cache[:, :, :, : self.used].transpose(0, 1))
        self.keys, self.values = self.keys[:, : len(numbers)], self.values[:, : len(numbers)]
        self.source_mask = kept(self.source_mask) if self.source else self.no_mask
        self.padding = None if self.padding is None else kept(self.padding)
        self.past = None if self.past is None else kept(self.past)
        self._show_source()

    def _embed(self, tokens: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Embed the tokens (B, K) of some rows at their next positions (3.4, 3.5): (R, D)."""
        end = self.position + 1
        if self.padding is not None and end > len(self.positions):
            end -= int(self.padding.sum(dim=1).min())  # padding has no position
        if end > len(self.positions):
            if not isinstance(self.decoder.embed_positions, nn.Embedding):
                end *= 2  # sinusoids have no last position, so compute some in advance
            self.positions = self.decoder.embed_positions(0, end, tokens.device).to(self.positions)
        position: Any = self.position
        if self.embedding is not None:
            states = self.embedding(tokens, rows, self.positions[position])
            if states is not None:
                return states
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
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers on states (R, D).

        Args:
            states: (R, D).
            shape: (B, K), or (B, T) while a prefix is read.
            rows: (R,) the hypotheses of the states, among B * K; None means all.
            mask: what the tokens of a prompt see of each other.
        """
        self._make_room(shape[1])
        end = self.used + shape[1]
        is_step = self.position > 0 or shape[1] == 1  # otherwise the tokens are a prompt
        if self.compiled is not None and is_step and compute(floats := states.float()):
            states = self._decode_compiled(floats, shape, rows, end).to(states.dtype)
            return self.decoder.layer_norm(states)
        self.layers = self.layers or [_DecoderLayer(layer) for layer in self.decoder.layers]
        heads, d_k, d_v = self.keys.shape[2], self.keys.shape[4], self.values.shape[4]
        source_mask = self.source_mask
        attend: Callable = _attend_from_prompt
        if is_step:
            if self.attention is None or self.attention.shape != shape:
                widths = d_k, d_v
                self.attention = _Attention(shape, heads, widths, self.no_mask, states.dtype)
            attend, source_mask = self.attention, source_mask.flatten(0, 1)
            if self.past is not None:
                mask = self.past[:, None, :, :end].expand(-1, heads, -1, -1).flatten(0, 1)
        mask = self.no_mask if mask is None else mask
        # By layer: the places of new keys and values, (B, K, H, d), and those of the whole past.
        new_keys = self.keys[:, :, :, self.used : end].transpose(2, 3).unbind()
        new_values = self.values[:, :, :, self.used : end].transpose(2, 3).unbind()
        keys = self.keys[:, :, :, :end].flatten(1, 2).transpose(2, 3).unbind()
        values = self.values[:, :, :, :end].flatten(1, 2).unbind()

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
            output = attend(query, _Attended(*self.source[index], source_mask, scaling))
            return output if rows is None else output[rows]

        for index, layer in enumerate(self.layers):
            states = layer(states, partial(attend_past, index), partial(attend_source, index))
        self.used = end
        return self.decoder.layer_norm(states)

    def _decode_compiled(
        self, states: torch.Tensor, shape: torch.Size, rows: torch.Tensor | None, end: int
    ) -> torch.Tensor:
        """Run the layers on states (R, D), in place, of one token for each hypothesis."""
        assert self.compiled is not None
        if rows is not None:  # a hypothesis that cannot win may still be computed later
            self.keys[:, :, :, self.used : end] = 0
            self.values[:, :, :, self.used : end] = 0
        mask = self.no_mask.new_zeros(1, end) if self.past is None else self.past
        states = self.compiled.run(
            states, shape, rows, self.keys, self.values, mask, self.used, end
        )
        self.used = end
        return states

    def _descend(self, shape: torch.Size, parents: torch.Tensor | None) -> None:
        """Let each hypothesis see its parent's past and itself."""
        sentences, beams = shape
        if self.past is None:
            self.past = self.no_mask.new_full((sentences, beams, self.room), -torch.inf)
            self.past[:, :, : self.used] = 0
            if self.padding is not None:
                self.past[:, :, : self.used].masked_fill_(self.padding[:, None], -torch.inf)
        elif parents is not None:
            if self.used + beams <= self.room and self.can_compile and compute(self.past):
                free = self.earlier_past
                if free is None or free.shape != self.past.shape:
                    free = torch.empty_like(self.past)
                self.earlier_past = self.past
                self.past = descend(self.past, parents, self.used, free)
                return
            self.past = self.past.gather(1, parents[:, :, None].expand_as(self.past))
        self._make_room(beams)
        assert self.past is not None
        end = self.used + beams
        self.past[:, :, self.used : end].diagonal(dim1=1, dim2=2).zero_()

    def _make_room(self, positions: int) -> None:
        """Make room in the cache for more positions."""
        if self.used + positions <= self.room:
            return
        if self.past is not None:
            self._drop_dead_ends(self.past)
        if 2 * (self.used + positions) <= self.room:
            return
        self.room = max(2 * self.room, 2 * positions, _FIRST_ROOM)
        if self.past is not None:
            self.past = F.pad(self.past, (0, self.room - self.past.shape[2]), value=-torch.inf)
        if self.room > self.keys.shape[3]:
            # A CPU takes memory when it is written. Room for later is free there, and copies cost.
            capacity = self.room * (_SPARE_ROOM if self.keys.device.type == "cpu" else 1)
            self.keys, self.values = (
                self._grown(cache, capacity) for cache in (self.keys, self.values)
            )

    def _grown(self, cache: torch.Tensor, capacity: int) -> torch.Tensor:
        """Copy a cache, with room for more positions."""
        *shape, _, width = cache.shape
        # Positions that are not taken stay without values, because nothing reads them.
        grown = empty((*shape, capacity, width), cache.dtype, cache.device)
        grown[:, :, :, : self.used] = cache[:, :, :, : self.used]
        return grown

    def _drop_dead_ends(self, past: torch.Tensor) -> None:
        """Move the positions that belong to the past of a hypothesis to the front of the cache."""
        alive = (past == 0).any(dim=1)  # (B, N)
        self.used = int(alive.sum(dim=1).max())
        # Sentences with fewer live positions keep dead ones at the end. The mask hides them.
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        self.past = past.gather(2, order[:, None].expand_as(past))
        kept = order[:, None, : self.used, None]
        # By layer, because the allocator returns the memory of larger copies to the system.
        for layer in (*self.keys, *self.values):
            sentences, heads, _, width = layer.shape
            layer[:, :, : self.used] = layer.gather(2, kept.expand(sentences, heads, -1, width))


def _own_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return the part of a weight that this process holds."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _spread(states: torch.Tensor, shape: torch.Size, rows: torch.Tensor | None) -> torch.Tensor:
    """Return states (B * K, W) of states (R, W), with zeros at hypotheses that have no row."""
    if rows is None:
        return states
    return states.new_zeros(shape.numel(), states.shape[1]).index_copy_(0, rows, states)
