"""The layers of the decoder in compiled kernels, for the incremental decoder (section 3.1).

The kernels compute what the layers compute: in float32, with weights in float32 or int8, with ReLU,
and with LayerNorm after or before each sub-layer. Other layers run with torch's operators.

Shapes: R rows of states, B sentences, K hypotheses of each, S source tokens, N positions in the
cache, L layers, H heads, D = d_model.
"""

import ctypes
from typing import Any

import torch
from torch import nn

from .kernels_vaswani import Batch, Layer, Memory, Norm, Positions, Product, library, multiply
from .linear_vaswani import compiled_product, is_changed


class CompiledLayers:
    """The layers of a decoder and its output layer, prepared for one call of `generate`."""

    def __init__(self, layers: Any, output: Product, kept: list[Any], heads: int) -> None:
        self.layers, self.output, self.kept, self.heads = layers, output, kept, heads
        self.predicted = torch.empty(0)  # logits, whose memory is used again in each step
        self.memory, self.rows, self.longest = Memory(), 0, 0
        self.buffers: list[torch.Tensor] = []
        self.source: Positions | None = None

    @classmethod
    def prepare(cls, layers: Any, output: Any, heads: int) -> "CompiledLayers | None":
        """Prepare layers with H heads, and the output layer; None if the kernels cannot serve."""
        if library() is None or torch.is_autocast_enabled("cpu") or not len(layers):
            return None
        structures, kept = (Layer * len(layers))(), []
        for structure, layer in zip(structures, layers, strict=True):
            if not _fill(structure, layer, kept):
                return None
        prepared = compiled_product(output)
        if prepared is None:
            return None
        return cls(structures, prepared[0], [*kept, prepared[1]], heads)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Predict the next tokens from states (r, D): logits (r, V), until the next call."""
        rows, vocabulary = len(states), self.output.outputs
        if len(self.predicted) < rows:
            self.predicted = states.new_empty(rows, vocabulary)
        return multiply(states, self.output, self.predicted[:rows])

    def read_source(self, source: list[tuple[torch.Tensor, torch.Tensor]], mask: Any) -> None:
        """Take keys (B * H, d_k, S) and values (B * H, S, d_v) of the source, by layer.

        Args:
            source: keys and values.
            mask: (B, S), 0 at the tokens that are seen.
        """
        self.source = Positions.seen(mask)
        for layer, (keys, values) in zip(self.layers, source, strict=True):
            by_sentence = len(mask), self.heads
            layer.source.hold(
                keys.transpose(1, 2).unflatten(0, by_sentence), values.unflatten(0, by_sentence)
            )

    def run(
        self,
        states: torch.Tensor,
        shape: torch.Size,
        hypotheses: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        used: int,
    ) -> torch.Tensor:
        """Transform states (R, D), in place, and store their keys and values.

        Args:
            states: (R, D).
            shape: (B, K).
            hypotheses: (R,) their numbers among B * K; None means all.
            keys: (L, B, H, N, d_k).
            values: (L, B, H, N, d_v).
            mask: (B * K, N) or (1, N), 0 at the positions that hypotheses see.
            used: the position of the first hypothesis of each sentence.
        """
        rows, width = states.shape
        number = shape.numel()
        past = Positions.seen(mask)
        batch = Batch(rows, shape[1], width, self.heads, keys.shape[4], values.shape[4])
        batch.hypotheses = None if hypotheses is None else hypotheses.data_ptr()
        batch.used, batch.past = used, past.listed(number)
        longest = batch.past.longest
        if self.source is not None:
            batch.source = self.source.listed(number)
            longest = max(longest, batch.source.longest)
        for index, layer in enumerate(self.layers):
            layer.past.hold(keys[index], values[index])
        self._make_room(rows, longest, values.shape[4])
        library().run_layers(
            *(ctypes.byref(self.layers), len(self.layers), ctypes.byref(batch)),
            *(states.data_ptr(), ctypes.byref(self.memory), torch.get_num_threads()),
        )
        return states

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
        floats = (1, width, outputs, self.heads * d_v, width, self.heads * self.longest)
        rounded = torch.empty(self.rows * inputs, dtype=torch.uint8)
        self.buffers = [rounded, *(torch.empty(self.rows * count) for count in floats)]
        states, scales, *others = (buffer.data_ptr() for buffer in self.buffers)
        self.memory = Memory((states, scales), *others)


def _fill(structure: Layer, layer: Any, kept: list[Any]) -> bool:
    """Describe a layer for the kernels; False if they cannot serve it."""
    past, source = layer.self_attn, layer.encoder_attn
    if (
        layer.training
        or type(layer.activation_fn) is not nn.ReLU
        or is_changed(layer.activation_fn)
    ):
        return False
    structure.norm_first = layer.norm_first
    structure.past.scaling = past.scaling
    products: dict[str, tuple] = {
        "past_qkv": (past.q_proj, past.k_proj, past.v_proj),
        "past_output": (past.out_proj,),
        "fc1": (layer.fc1,),
        "fc2": (layer.fc2,),
    }
    norms = {"past_norm": layer.self_attn_layer_norm, "final_norm": layer.final_layer_norm}
    if source is not None:
        structure.source.scaling = source.scaling
        products |= {"source_query": (source.q_proj,), "source_output": (source.out_proj,)}
        norms["source_norm"] = layer.encoder_attn_layer_norm
    for name, norm in norms.items():
        if type(norm) is not nn.LayerNorm or is_changed(norm) or norm.bias is None:
            return False
        if norm.weight.dtype != torch.float32 or type(norm.weight.data) is not torch.Tensor:
            return False
        setattr(structure, name, Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps))
    for name, linears in products.items():
        prepared = compiled_product(*linears, relu=name == "fc1")
        if prepared is None:
            return False
        product, parts = prepared
        setattr(structure, name, product)
        kept.append(parts)
    return True


__all__ = ["CompiledLayers"]
