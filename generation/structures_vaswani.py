"""Structures of the compiled kernels that run layers, and the positions that hypotheses see.

The structures have the fields of those in the C files, in the same order.

Shapes: R rows of states, B sentences, K hypotheses of each, H heads, N positions of a cache.
"""

import ctypes
from typing import Any

import torch

from .library_vaswani import COUNT, FLOAT, NUMBER, POINTER, address, library
from .products_vaswani import Product, Rounded

_INTEGERS: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}


class Embedding(ctypes.Structure):
    """An embedding, and the factor of its entries (3.4)."""

    _fields_ = (
        *((name, COUNT) for name in ("entries", "width")),
        *((name, POINTER) for name in ("table", "scales")),
        ("factor", FLOAT),
    )


class Norm(ctypes.Structure):
    """A LayerNorm."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("epsilon", FLOAT))


class Cache(ctypes.Structure):
    """Keys and values (B, H, N, d), each sentence and head at strides."""

    _fields_ = (
        *((name, POINTER) for name in ("keys", "values")),
        *((name, COUNT) for name in ("key_sentence", "key_head")),
        *((name, COUNT) for name in ("value_sentence", "value_head")),
        ("scaling", FLOAT),
    )

    def point_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Point to keys (B, H, N, d_k) and values (B, H, N, d_v)."""
        self.keys, self.values = keys.data_ptr(), values.data_ptr()
        self.key_sentence, self.key_head = keys.stride()[:2]
        self.value_sentence, self.value_head = values.stride()[:2]


class Listed(ctypes.Structure):
    """The positions that hypotheses see. `hypotheses_per_list` hypotheses share a list."""

    _fields_ = (
        *((name, POINTER) for name in ("places", "counts")),
        *((name, COUNT) for name in ("longest", "hypotheses_per_list")),
    )


class Batch(ctypes.Structure):
    """The hypotheses of a step, or the tokens of an encoder's sentences."""

    _fields_ = (
        *((name, COUNT) for name in ("rows", "beams", "width", "heads", "d_k", "d_v")),
        ("hypotheses", POINTER),
        ("used", COUNT),
        *((name, Listed) for name in ("past", "source")),
        ("encodes", NUMBER),
    )


class Layer(ctypes.Structure):
    """A layer of the decoder, or of the encoder, which has no source."""

    PRODUCTS = (
        *("past_qkv", "past_output", "source_query", "source_kv", "source_output"),
        *("fc1", "fc2"),
    )
    NORMS = ("past_norm", "source_norm", "final_norm")
    _fields_ = (
        *((name, Product) for name in PRODUCTS),
        *((name, Norm) for name in NORMS),
        *((name, Cache) for name in ("past", "source")),
        ("norm_first", NUMBER),
    )


class Memory(ctypes.Structure):
    """Memory of a step."""

    _fields_ = (
        ("rounded", Rounded),
        *((name, POINTER) for name in ("normed", "inner", "heads", "update", "scores")),
    )


def descend(
    mask: torch.Tensor, parents: torch.Tensor, used: int, output: torch.Tensor
) -> torch.Tensor:
    """Let each hypothesis see what its parent (B, K) saw, and itself: `output` (B, K, N).

    Args:
        mask: (B, K, N), 0 at the positions that hypotheses see.
        parents: (B, K).
        used: the position of the first hypothesis of each sentence.
        output: memory for the new mask.
    """
    library().descend(address(mask), address(parents), *mask.shape, used, address(output))
    return output


class Positions:
    """Lists of positions in a cache. Their memory is used again for the next lists."""

    def __init__(self) -> None:
        self.lists = self.longest = 0
        # The lists, one after the other, and the number of positions in each list.
        self.places, self.counts = torch.empty(0, **_INTEGERS), torch.empty(0, **_INTEGERS)

    def see(self, mask: torch.Tensor, end: int | None = None) -> None:
        """List the positions at which a mask (lists, N) is 0, before `end` if it is given.

        The mask is contiguous. Its lists may have more dimensions than one.
        """
        positions = mask.shape[-1]
        assert end is None or end <= positions
        self.lists, self.longest = mask.numel() // positions, positions if end is None else end
        if self.lists * self.longest > len(self.places):
            self.places = torch.empty(2 * self.lists * self.longest, **_INTEGERS)
        if self.lists > len(self.counts):
            self.counts = torch.empty(self.lists, **_INTEGERS)
        library().list_positions(
            *(address(mask), self.lists, self.longest, positions),
            *(self.places.data_ptr(), self.counts.data_ptr()),
        )

    def listed(self, hypotheses: int) -> Listed:
        """Return the structure, for B * K hypotheses. It is valid until the next lists."""
        assert hypotheses % self.lists == 0
        addresses = self.places.data_ptr(), self.counts.data_ptr()
        return Listed(*addresses, self.longest, hypotheses // self.lists)


__all__ = ["Batch", "Embedding", "Layer", "Listed", "Memory", "Norm", "Positions", "descend"]
