"""The layers of encoder and decoder in compiled kernels, for `generate` (section 3.1).

The kernels compute what the layers compute: in float32, with weights in float32, bfloat16 or int8,
with ReLU, and with LayerNorm after or before each sub-layer. Other layers run with torch's
operators. In a bfloat16 model, states are rounded to bfloat16 before products and after the last
layer, and nowhere else.

Shapes: R rows of states, B sentences, K hypotheses of each, S source tokens, N positions in the
cache, L layers, H heads, D = d_model.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from .int8_vaswani import Int8Embedding
from .library_vaswani import COMPUTED, CORES, FLOATS, as_stored, can_compute, is_as_stored, library
from .linear_vaswani import compiled_product, is_changed, is_supported, originals
from .memory_vaswani import empty
from .products_vaswani import Product, Rounded, multiply
from .snapshots_vaswani import Snapshot, prepared_once
from .structures_vaswani import Batch, Embedding, Layer, Memory, Norm, Positions

_ROWS_AT_ONCE = 512  # tokens of the source that are computed at once


class CompiledLayers:
    """Layers with prepared weights. They serve one call of `generate`."""

    def __init__(self, layers: Any, weights: list[Any], heads: int) -> None:
        self.layers, self.weights, self.heads = layers, weights, heads
        self.threads = torch.get_num_threads()
        self.memory, self.rows, self.longest = Memory(), 0, 0
        self.buffers: list[torch.Tensor] = []
        self.past, self.source = Positions(), Positions()
        self.place_of_past: tuple = ()  # addresses and strides of keys and values

    @classmethod
    def prepare(cls, layers: Any, heads: int) -> "CompiledLayers | None":
        """Prepare layers with H heads. Return None if the kernels do not support them."""
        if not len(layers) or not _can_compile(layers[0].fc1):
            return None
        describe = functools.partial(_describe, layers, heads)
        described = prepared_once(layers, heads, [layers], describe, _modules_read)
        if described is None:
            return None
        structures, weights = described
        # Each call has its own structures, because they also point to its caches.
        return cls(type(structures).from_buffer_copy(structures), weights, heads)

    def reads(self, states: torch.Tensor) -> bool:
        """Tell whether `read_source` can read states (B, S, D)."""
        return can_compute(states) and states.shape[2] == self.layers[0].source_kv.inputs

    def read_source(
        self, states: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the source: keys (L, B, H, S, d_k) and values (L, B, H, S, d_v) of all layers.

        Padding gets zeros.

        Args:
            states: (B, S, D) the encoder's output, in float32.
            real: (B, S), True at tokens that are not padding.
        """
        sentences, tokens, width = states.shape
        d_k = self.layers[0].source_query.outputs // self.heads
        d_v = self.layers[0].source_output.inputs // self.heads
        shape = len(self.layers), sentences, self.heads, tokens
        keys, values = empty((*shape, d_k)), empty((*shape, d_v))
        for part, rows in _parts(real):
            own = states[part].flatten(0, 1)[rows]
            batch = Batch(len(rows), tokens, width, self.heads, d_k, d_v)
            batch.hypotheses = rows.data_ptr()
            self._point_to_source(keys[:, part], values[:, part])
            self._make_room(len(rows), 1, d_v)
            CORES.look(self.threads)
            library().read_source(
                *(ctypes.byref(self.layers), len(self.layers), ctypes.byref(batch)),
                *(real[part].numel(), own.data_ptr(), ctypes.byref(self.memory), self.threads),
            )
        return keys, values

    def attend_to_source(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Take the keys and values of the source.

        Args:
            keys: (L, B, H, S, d_k).
            values: (L, B, H, S, d_v).
            mask: (B, S), 0 at the tokens that are seen.
        """
        self.source.see(mask.contiguous())
        self._point_to_source(keys, values)

    def _point_to_source(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for layer, own_keys, own_values in zip(self.layers, keys, values, strict=True):
            layer.source.point_to(own_keys, own_values)

    def run(
        self,
        states: torch.Tensor,
        shape: torch.Size,
        hypotheses: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        used: int,
        end: int | None = None,
        encodes: bool = False,
    ) -> torch.Tensor:
        """Transform states (R, D), in place, and store their keys and values.

        Args:
            states: (R, D).
            shape: (B, K), or (B, S) in an encoder.
            hypotheses: (R,) their numbers among B * K; None means all.
            keys: (L, B, H, N, d_k).
            values: (L, B, H, N, d_v).
            mask: (B, K, N), (B, N) or (1, N), 0 at the positions that hypotheses see.
            used: the position of the first hypothesis of each sentence.
            end: the end of the positions that may be seen; None means N.
            encodes: whether these are an encoder's layers.
        """
        rows, width = states.shape
        number = shape.numel()
        self.past.see(mask, end)
        batch = Batch(rows, shape[1], width, self.heads, keys.shape[4], values.shape[4])
        if hypotheses is not None:
            assert hypotheses.is_contiguous()
            batch.hypotheses = hypotheses.data_ptr()
        batch.used, batch.past, batch.encodes = used, self.past.listed(number), encodes
        if self.source.lists:
            batch.source = self.source.listed(number)
        self._point_to(keys, values)
        self._make_room(rows, max(self.past.longest, self.source.longest), values.shape[4])
        CORES.look(self.threads)
        library().run_layers(
            *(ctypes.byref(self.layers), len(self.layers), ctypes.byref(batch)),
            *(states.data_ptr(), ctypes.byref(self.memory), self.threads),
        )
        return states

    def batch_of_steps(
        self, shape: torch.Size, keys: torch.Tensor, values: torch.Tensor, used: int
    ) -> Batch:
        """Describe all hypotheses (B, K) for a kernel of several steps, which lists their past.

        Args:
            shape: (B, K).
            keys: (L, B, H, N, d_k).
            values: (L, B, H, N, d_v).
            used: positions of the past that are taken.
        """
        number, (positions, d_k) = shape.numel(), keys.shape[3:]
        width = self.layers[0].past_qkv.inputs
        batch = Batch(number, shape[1], width, self.heads, d_k, values.shape[4], used=used)
        if self.source.lists:
            batch.source = self.source.listed(number)
        self._point_to(keys, values)
        self._make_room(number, max(positions, self.source.longest), values.shape[4])
        return batch

    def _point_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Tell the layers where the keys and values of the past are."""
        place = keys.data_ptr(), keys.stride(), values.data_ptr(), values.stride()
        if place != self.place_of_past:
            self.place_of_past = place
            for layer, own_keys, own_values in zip(self.layers, keys, values, strict=True):
                layer.past.point_to(own_keys, own_values)

    def _make_room(self, rows: int, longest: int, d_v: int) -> None:
        """Make room in the memory of a step."""
        if rows <= self.rows and longest <= self.longest:
            return
        self.rows, self.longest = max(rows, self.rows), max(2 * longest, self.longest)
        products = [
            product
            for layer in self.layers
            for product in (getattr(layer, name) for name in Layer.PRODUCTS)
        ]
        inputs = max(product.inputs for product in products)
        outputs = max(product.outputs for product in products)
        width = products[0].inputs
        floats = (width, outputs, self.heads * d_v, width)
        lanes = library().panel_width() // 2
        sizes = [*(self.rows * count for count in floats), self.threads * self.longest * lanes]
        rounded = Rounded.make_room(self.rows, inputs)
        self.buffers = [*rounded, *(empty((size,)) for size in sizes)]
        states, scales, *addresses = (buffer.data_ptr() for buffer in self.buffers)
        self.memory = Memory((states, scales), *addresses)


class CompiledLinear:
    """Linear layers in the kernels. Their outputs use the same memory in each step."""

    def __init__(self, product: Product, weights: Any) -> None:
        self.product, self.weights = product, weights
        self.outputs = torch.empty(0, **FLOATS)
        self.rounded: tuple[torch.Tensor, ...] = ()
        self.memory = Rounded()

    @classmethod
    def prepare(cls, *linears: Any) -> "CompiledLinear | None":
        """Prepare layers that read the same states. Return None if the kernels do not support them.

        Their outputs are concatenated.
        """
        if not all(map(_can_compile, linears)):
            return None
        layers = originals(linears)

        def describe(snapshot: Snapshot) -> Any:
            return compiled_product(*layers, snapshot=snapshot) if is_supported(*layers) else None

        described = prepared_once(layers[0], "product", layers, describe)
        return None if described is None else cls(*described)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply states (R, in): (R, out) in float32, until the next call."""
        rows = len(states)
        self.make_room(rows)
        return multiply(states.float(), self.product, self.outputs[:rows], self.memory)

    def make_room(self, rows: int) -> None:
        """Make room for the outputs of R rows."""
        if len(self.outputs) < rows:
            self.outputs = empty((rows, self.product.outputs))
            self.rounded = Rounded.make_room(rows, self.product.inputs)
            self.memory = Rounded(*(part.data_ptr() for part in self.rounded))


class CompiledEmbedding:
    """An embedding in float32 or int8, for tokens at one position (3.4, 3.5)."""

    def __init__(self, structure: Embedding, weights: Any) -> None:
        self.structure, self.weights = structure, weights

    @classmethod
    def prepare(cls, embedding: Any, factor: float) -> "CompiledEmbedding | None":
        """Prepare an embedding, whose entries are multiplied by a factor (3.4).

        Return None if the kernels do not support it.
        """
        if type(embedding) not in (nn.Embedding, Int8Embedding) or not _can_compile(embedding):
            return None
        if getattr(embedding, "max_norm", None) is not None:
            return None
        weight, scale = embedding.weight.detach(), getattr(embedding, "weight_scale", None)
        scale = None if scale is None else scale.detach()
        if weight.dim() != 2:
            return None
        if scale is not None and (weight.dtype, scale.shape) != (torch.int8, weight.shape[:1]):
            return None
        in_floats = weight if scale is None else scale
        if is_changed(embedding) or not can_compute(in_floats) or not is_as_stored(weight):
            return None
        scales = None if scale is None else scale.data_ptr()
        return cls(Embedding(*weight.shape, weight.data_ptr(), scales, factor), (weight, scale))

    def __call__(
        self, tokens: torch.Tensor, rows: torch.Tensor | None, position: torch.Tensor
    ) -> torch.Tensor | None:
        """Embed the tokens (B, K) of some rows (R,): (R, D).

        Return None if a token has no entry, if the entries do not have D values, or if the tokens
        are not integers of 64 bits.

        Args:
            tokens: (B, K).
            rows: (R,) numbers among B * K; None means all.
            position: (D,) the encoding of their position.
        """
        if len(position) != self.structure.width or tokens.dtype != torch.long:
            return None
        tokens, position = tokens.contiguous(), as_stored(position)
        states = position.new_empty(tokens.numel() if rows is None else len(rows), len(position))
        chosen = None if rows is None else rows.data_ptr()
        places = tokens.data_ptr(), chosen, len(states), position.data_ptr(), states.data_ptr()
        found = library().embed_tokens(ctypes.byref(self.structure), *places)
        return states if found else None


class CompiledEncoder(nn.Module):
    """An encoder in a prepared copy of a model, whose layers run in the kernels if they can.

    The layers compute nothing at padding. The states there are zeros before the last LayerNorm.

    Args:
        encoder: the encoder.
        copied: makes a prepared copy of it, for calls that the kernels do not compute.
    """

    def __init__(self, encoder: Any, copied: Callable[[], Any]) -> None:
        super().__init__()
        self.encoder, self.copied = encoder, copied

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode as the encoder does: (B, S) tokens to (B, S, D)."""
        encoder, config = self.encoder, self.encoder.config
        # Seq2SeqTrainer passes labels to `generate`, and nothing reads them.
        kwargs.pop("labels", None)
        options = {
            name for name, value in kwargs.items() if value is not None and value is not False
        }
        if (
            not encoder.training
            and options == {"return_dict"}
            and not config.output_attentions
            and not config.output_hidden_states
            and (attention_mask is None or torch.is_tensor(attention_mask))
        ):
            layers = CompiledLayers.prepare(encoder.layers, config.encoder_attention_heads)
            if layers is not None:
                states = encoder.embed(input_ids, inputs_embeds, attention_mask)
                fits = attention_mask is None or attention_mask.shape == states.shape[:2]
                if fits and states.dtype in COMPUTED and can_compute(states.float()):
                    computed = self._run(layers, states.float(), attention_mask).to(states.dtype)
                    return BaseModelOutput(last_hidden_state=encoder.layer_norm(computed))
        return self.copied()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _run(
        self, layers: CompiledLayers, states: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the layers on states (B, S, D), in place, with a mask (B, S) that is 0 at padding."""
        attention = self.encoder.layers[0].self_attn
        # All layers use the same memory for keys and values, one after the other.
        by_head = _sentences_at_once(states.shape), layers.heads, states.shape[1]
        keys, values = (
            states.new_empty(*by_head, d).expand(len(layers.layers), *by_head, d)
            for d in (attention.d_k, attention.d_v)
        )
        real = states.new_ones(states.shape[:2]).bool() if mask is None else mask != 0
        unseen = (~real).to(states.dtype).contiguous()
        for part, numbers in _parts(real):
            rows, shape = states[part].flatten(0, 1), states[part].shape[:2]
            computed = layers.run(
                rows[numbers], shape, numbers, keys, values, unseen[part], used=0, encodes=True
            )
            rows.zero_().index_copy_(0, numbers, computed)
        return states


def _sentences_at_once(shape: torch.Size) -> int:
    """Return how many sentences (B, S) are computed at once, so that they stay in the cache."""
    return max(1, min(shape[0], _ROWS_AT_ONCE // max(1, shape[1])))


def _parts(real: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Divide a batch into sentences that are computed at once.

    Args:
        real: (B, S), True at tokens that are not padding.

    Yields:
        The sentences of a part, and the numbers of the part's real tokens among all its tokens.
    """
    at_once = _sentences_at_once(real.shape)
    for first in range(0, len(real), at_once):
        part = slice(first, first + at_once)
        yield part, real[part].flatten().nonzero()[:, 0]


def _can_compile(linear: Any) -> bool:
    """Tell whether the kernels run here, for a layer on a CPU."""
    weight = getattr(linear, "weight", None)  # a method in torch's quantized layers
    on_cpu = torch.is_tensor(weight) and weight.device.type == "cpu"
    return on_cpu and not torch.is_autocast_enabled("cpu") and library() is not None


def _is_supported(layer: Any) -> bool:
    """Tell whether the kernels support the parts of a layer."""
    attentions = [part for part in (layer.self_attn, _source_attention(layer)) if part is not None]
    if any(part.training for part in (layer, *attentions)):
        return False
    if type(layer.activation_fn) is not nn.ReLU or is_changed(layer.activation_fn):
        return False
    return all(map(_is_supported_norm, _norms_of(layer).values())) and all(
        is_supported(*linears) for linears in _products_of(layer).values()
    )


def _is_supported_norm(norm: Any) -> bool:
    if type(norm) is not nn.LayerNorm or is_changed(norm):
        return False
    return all(
        part is not None
        and type(part.data) is torch.Tensor
        and part.shape == norm.normalized_shape
        and part.dtype in COMPUTED
        for part in (norm.weight, norm.bias)
    )


def _source_attention(layer: Any) -> Any:
    return getattr(layer, "encoder_attn", None)


def _norms_of(layer: Any) -> dict[str, Any]:
    """Return the LayerNorms of a layer by their names in `Layer`."""
    norms = {"past_norm": layer.self_attn_layer_norm, "final_norm": layer.final_layer_norm}
    if _source_attention(layer) is not None:
        norms["source_norm"] = layer.encoder_attn_layer_norm
    return norms


def _products_of(layer: Any) -> dict[str, tuple]:
    """Return the linear layers of each product by its name in `Layer`."""
    past, source = layer.self_attn, _source_attention(layer)
    products: dict[str, tuple] = {
        "past_qkv": (past.q_proj, past.k_proj, past.v_proj),
        "past_output": (past.out_proj,),
        "fc1": (layer.fc1,),
        "fc2": (layer.fc2,),
    }
    if source is not None:
        products |= {
            "source_query": (source.q_proj,),
            "source_kv": (source.k_proj, source.v_proj),
            "source_output": (source.out_proj,),
        }
    return products


def _modules_read(roots: Sequence[Any]) -> list[nn.Module]:
    """List the modules whose attributes decide how layers are described, and the list of layers."""
    (layers,) = roots
    found = [layers]
    for layer in layers:
        attentions = layer.self_attn, _source_attention(layer)  # the latter may be None
        found += (layer, *attentions, layer.activation_fn, *_norms_of(layer).values())
        for linears in _products_of(layer).values():
            found += linears
    return [part for part in found if isinstance(part, nn.Module)]


def _describe(layers: Any, heads: int, snapshot: Snapshot) -> tuple[Any, list[Any]] | None:
    """Describe layers for the kernels, and return what must be kept in memory for them.

    Return None if the kernels do not support the layers.
    """
    if not all(map(_is_supported, layers)):
        return None  # before any weight is packed
    structures = (Layer * len(layers))()
    weights: list[Any] = []
    for structure, layer in zip(structures, layers, strict=True):
        if not _fill(structure, layer, weights, snapshot):
            return None
        if not _fits(structure, layer, layers[0], heads):
            return None
    return structures, weights


def _fill(structure: Layer, layer: Any, weights: list[Any], snapshot: Snapshot) -> bool:
    """Describe a supported layer for the kernels. Return False if its norms are not on a CPU."""
    structure.norm_first = layer.norm_first
    structure.past.scaling = layer.self_attn.scaling
    if (source := _source_attention(layer)) is not None:
        structure.source.scaling = source.scaling
    for name, norm in _norms_of(layer).items():
        if any(part.device.type != "cpu" for part in (norm.weight, norm.bias)):
            return False
        weight, bias = (snapshot.copy(part).float() for part in (norm.weight, norm.bias))
        if not can_compute(weight, bias):
            return False
        weights.append((weight, bias))
        setattr(structure, name, Norm(weight.data_ptr(), bias.data_ptr(), norm.eps))
    for name, linears in _products_of(layer).items():
        product, parts = compiled_product(*linears, snapshot=snapshot, relu=name == "fc1")
        setattr(structure, name, product)
        weights.append(parts)
    return True


def _fits(structure: Layer, layer: Any, first: Any, heads: int) -> bool:
    """Tell whether a layer has the sizes of the first layer. Heads may have been pruned."""
    width, d_k, d_v = first.fc1.in_features, first.self_attn.d_k, first.self_attn.d_v
    expected = {
        "past_qkv": (width, heads * (2 * d_k + d_v)),
        "past_output": (heads * d_v, width),
        "fc1": (width, layer.fc1.out_features),
        "fc2": (layer.fc1.out_features, width),
    }
    norms = [layer.self_attn_layer_norm, layer.final_layer_norm]
    if _source_attention(layer) is not None:
        expected |= {
            "source_query": (width, heads * d_k),
            "source_kv": (width, heads * (d_k + d_v)),
            "source_output": (heads * d_v, width),
        }
        norms.append(layer.encoder_attn_layer_norm)
    products = {name: getattr(structure, name) for name in expected}
    sizes = {name: (product.inputs, product.outputs) for name, product in products.items()}
    return sizes == expected and all(norm.normalized_shape == (width,) for norm in norms)


__all__ = ["CompiledEmbedding", "CompiledEncoder", "CompiledLayers", "CompiledLinear"]
