"""The decoder, one token at a time, for the searches of `search_vaswani.py` (section 3.1).

Shapes: B sentences, K hypotheses of each (the beam), R rows (all B * K hypotheses, or the open ones
among them), S source tokens, T tokens of a prompt, N positions in the cache, D = d_model, V entries
of the target vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .caches_vaswani import SourceCache, TargetCache, move_to_front
from .compiled_vaswani import CompiledEmbedding, CompiledLayers, CompiledLinear
from .layers_vaswani import TorchLayers, copied_norm
from .library_vaswani import COMPUTED, can_compute
from .linear_vaswani import prepare
from .memory_vaswani import empty

_FIRST_POSITIONS = 64  # number of positions that are encoded at first


class IncrementalDecoder:
    """A decoder with a cache, for K hypotheses of each of B sentences.

    Compiled kernels run the layers if they can (`compiled_vaswani.py`), and PyTorch's operators
    otherwise (`layers_vaswani.py`). On a CPU, attention and its cache are in float32 even if the
    model has 16 bits, because PyTorch multiplies such small matrices faster in float32.

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
        self.norm = copied_norm(self.decoder.layer_norm)  # normalises the last layer's output
        self.logits = self._prepared(model.lm_head)  # (r, D) to (r, V), valid until the next call
        self.vocabulary = len(weight)  # V
        # Encodings, computed in advance. An int8 weight has another dtype than its embeddings.
        self.positions = weight.new_empty((0, weight.shape[1]), dtype=self.decoder.dtype)
        dtype = self.decoder.dtype
        if weight.device.type == "cpu":
            dtype = torch.promote_types(dtype, torch.float32)
        self.no_mask = weight.new_zeros((1, 1, 1), dtype=dtype)
        layers = self.decoder.layers
        self.heads = _own_heads(layers[0].self_attn) if len(layers) else 0  # H
        self.compiled: CompiledLayers | None = None
        if self.can_compile:
            self.compiled = CompiledLayers.prepare(layers, self.heads)
        self.source: SourceCache | None = None
        if source is not None and len(layers):
            given = source.new_ones(source.shape[:2]) if source_mask is None else source_mask
            real = given != 0
            self.source = SourceCache(*self._read_source(source, real), real)
            self.heads = self.source.keys.shape[2]  # heads may have been pruned
        self.padding = None  # (B, T), True at padding of the prompt
        if prompt_mask is not None and not prompt_mask.all():
            self.padding = prompt_mask == 0
        self.prefix_mask = None if prefix_mask is None else prefix_mask != 0
        self.target: TargetCache
        self.torch_layers: TorchLayers | None = None  # made when the kernels do not run the layers
        self.embedding: CompiledEmbedding | None = None
        self.position = 0  # position of the next token in the sentence, padding included

    def _prepared(self, linear: nn.Linear) -> Callable:
        """Prepare a linear layer, for the compiled kernels if they support it."""
        return (self.can_compile and CompiledLinear.prepare(linear)) or prepare(linear)

    def _read_source(
        self, source: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the source (B, S, D): keys (L, B, H, S, d_k) and values (L, B, H, S, d_v).

        `real` is (B, S), True at tokens that are not padding.
        """
        compiled = self.compiled if source.shape[:2] == real.shape else None
        if compiled is not None and compiled.reads(floats := source.float().contiguous()):
            return compiled.read_source(floats, real)
        rows, caches = source.flatten(0, 1), []
        attentions = [layer.encoder_attn for layer in self.decoder.layers]
        for name, width in (("k_proj", attentions[0].d_k), ("v_proj", attentions[0].d_v)):
            for number, attention in enumerate(attentions):
                states = self._prepared(getattr(attention, name))(rows).unflatten(1, (-1, width))
                by_head = states.unflatten(0, source.shape[:2]).transpose(1, 2)  # (B, H, S, d)
                if number == 0:
                    shape = len(attentions), *by_head.shape
                    caches.append(empty(shape, self.no_mask.dtype, states.device))
                caches[-1][number].copy_(by_head)
        keys, values = caches
        return keys, values

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T); return states (B, D) that predict the next token."""
        sentences, length = prefix.shape
        self._start_cache(sentences)
        position_ids = None
        if self.padding is not None:
            position_ids = ((~self.padding).cumsum(dim=1) - 1).clamp(min=0)
        if length == 1 and self.embedding is not None:
            states = self._embed(prefix, None)
        else:
            states = self.decoder.embed(prefix, None, position_ids=position_ids).flatten(0, 1)
        mask = self._mask_of_prompt(length) if length > 1 else None
        states = self._decode(states, prefix.shape, None, mask)
        self.position = length
        return states.view(*prefix.shape, -1)[:, -1]

    def _start_cache(self, sentences: int) -> None:
        layers = self.decoder.layers
        d_k = d_v = 0
        if len(layers):
            d_k, d_v = layers[0].self_attn.d_k, layers[0].self_attn.d_v
        shape = len(layers), sentences, self.heads
        self.target = TargetCache(shape, (d_k, d_v), self.no_mask, self.can_compile)
        if self.can_compile:
            self._show_source()
            if self.padding is None and self.decoder.dtype == torch.float32:
                embedding, factor = self.decoder.embed_tokens, self.decoder.embed_scale
                self.embedding = CompiledEmbedding.prepare(embedding, factor)

    def _show_source(self) -> None:
        """Tell the compiled layers where the keys and values of the source are."""
        if self.compiled is not None and self.source is not None:
            source = self.source
            self.compiled.attend_to_source(source.keys, source.values, source.seen)

    def _mask_of_prompt(self, length: int) -> torch.Tensor:
        """Return the mask of a prompt: (T, T) or (B, 1, T, T), 0 if seen and -inf if not."""
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
        """Extend hypotheses by one token each; return states (R, D) that predict the next token.

        Args:
            tokens: (B, K).
            parents: (B, K) the hypothesis of the previous step that each new one extends.
            open_rows: (R,) the hypotheses to compute, among B * K; None means all.
        """
        states = self._embed(tokens, open_rows)
        if tokens.shape[1] > 1 or self.padding is not None:
            self.target.descend(tokens.shape, parents, self.padding)
        states = self._decode(states, tokens.shape, open_rows)
        self.position += 1
        return states

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences but these, given by their numbers (B',).

        A sentence stays at its place, or takes the place of one that is dropped.
        """
        numbers = sentences.tolist()
        if self.source is not None:
            self.source.keep(numbers)
        self.target.keep(numbers)
        self.padding = None if self.padding is None else move_to_front(self.padding, numbers)
        self._show_source()

    def _embed(self, tokens: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Embed the tokens (B, K) of some rows at their next positions (3.4, 3.5): (R, D)."""
        self.encode_position()
        position: Any = self.position
        if self.embedding is not None:
            states = self.embedding(tokens, rows, self.positions[position])
            if states is not None:
                return states
        if self.padding is not None:  # a number for each row
            position = (position - self.padding.sum(dim=1))[:, None].expand_as(tokens).flatten()
            position = position if rows is None else position[rows]
        tokens = tokens.flatten() if rows is None else tokens.flatten()[rows]
        embeddings = self.decoder.look_up(tokens) * self.decoder.embed_scale
        return embeddings + self.positions[position]

    def encode_position(self) -> None:
        """Encode the next position in `positions` if it is not there, and some in advance."""
        end = self.position + 1
        if self.padding is not None and end > len(self.positions):
            end -= int(self.padding.sum(dim=1).min())  # padding has no position
        if end > len(self.positions):
            encode = self.decoder.embed_positions
            ahead = max(2 * end, _FIRST_POSITIONS)
            if isinstance(encode, nn.Embedding):  # sinusoids have no last position
                ahead = min(ahead, encode.num_embeddings - getattr(encode, "offset", 0))
            encoded = encode(0, max(end, ahead), self.positions.device)
            self.positions = encoded.to(self.positions)

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
            mask: mask of a prompt, as `_mask_of_prompt` returns it; None for single tokens.
        """
        target = self.target
        target.make_room(shape[1])
        if self.compiled is not None and mask is None and can_compute(floats := states.float()):
            states = self._decode_compiled(floats, shape, rows).to(states.dtype)
        else:
            if self.torch_layers is None:
                self.torch_layers = TorchLayers(self.decoder.layers, self.no_mask)
            states = self.torch_layers.run(states, shape, rows, target, self.source, mask)
        target.used += shape[1]
        return self.norm(states)

    def _decode_compiled(
        self, states: torch.Tensor, shape: torch.Size, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the layers on states (R, D), in place, of one token for each hypothesis."""
        assert self.compiled is not None
        target, end = self.target, self.target.used + shape[1]
        if rows is not None:  # later steps may read the positions of hypotheses without a row
            target.keys[:, :, :, target.used : end] = 0
            target.values[:, :, :, target.used : end] = 0
        mask = self.no_mask.new_zeros(1, end) if target.past is None else target.past
        return self.compiled.run(
            states, shape, rows, target.keys, target.values, mask, target.used, end
        )


def _own_heads(attention: Any) -> int:
    """Return the number of heads that this process computes."""
    linear = attention.k_proj
    # Quantized layers have weights of other shapes, or none. A module that wraps a layer may not
    # tell the number of its outputs.
    outputs: int = getattr(linear, "out_features", attention.num_heads * attention.d_k)
    weight: Any = getattr(linear, "weight", None)
    if hasattr(weight, "to_local"):
        outputs = len(weight.to_local())
    return outputs // int(attention.d_k)


__all__ = ["IncrementalDecoder"]
