"""Memory for the large tensors of a search, and for packed weights.

`empty` keeps memory from one call of `generate` to the next. The allocator of the C library returns
large blocks to the system, so each call would wait for the system to clear them. Kept blocks need
no clearing. The system may take their pages when it runs out of memory.

`empty_for_weights` asks for huge pages, from which a CPU reads large weights faster.
"""

import contextlib
import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

_SMALLEST_BLOCK = 2**20  # bytes; smaller blocks stay in the C library
_MOST_KEPT = 2**31  # bytes of addresses that are kept; only pages in use take memory

_BLOCK = 2**25  # bytes that several weights share; a huge page of Linux has 2 MiB
_ALIGNMENT = 64

_CPU = torch.device("cpu")

# Blocks that no tensor uses, by size. Lists need no lock, because `pop` and `append` are atomic.
_unused: defaultdict[int, list[mmap.mmap]] = defaultdict(list)


def empty(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> torch.Tensor:
    """Return a tensor without values, on a CPU from memory that an earlier tensor used."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device.type != "cpu" or size < _SMALLEST_BLOCK or not hasattr(mmap, "MADV_FREE"):
        return torch.empty(shape, dtype=dtype, device=device)
    capacity = 1 << (size - 1).bit_length()
    try:
        block = _unused[capacity].pop()
    except IndexError:
        try:
            block = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # torch needs fewer addresses, or says how many bytes are missing
            return torch.empty(shape, dtype=dtype, device=device)
    view = memoryview(block)  # lives as long as the tensor's storage
    weakref.finalize(view, _keep, block).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)


def _keep(block: mmap.mmap) -> None:
    """Keep a block for later, or return it to the system if many are kept."""
    kept = sum(size * len(blocks) for size, blocks in list(_unused.items()))
    if kept + len(block) <= _MOST_KEPT:
        try:
            block.madvise(mmap.MADV_FREE)
        except OSError:  # a system without this advice; the block is returned to it
            return
        _unused[len(block)].append(block)


class _Blocks(threading.local):
    """Blocks in huge pages, for the weights that one thread packs.

    A part that no tensor uses is given to the next weight of its size. A block is returned to the
    system when no tensor uses a part of it.
    """

    def __init__(self) -> None:
        self.last: Callable[[], mmap.mmap | None] = lambda: None  # a weak reference
        self.used = 0  # bytes of the last block
        self.unused: defaultdict[int, list[tuple[Any, int]]] = defaultdict(list)  # by size

    def part(self, size: int) -> memoryview:
        """Return memory that no tensor uses. Small sizes share a block."""
        if size > _BLOCK // 2:
            return memoryview(_in_huge_pages(size))
        size += -size % _ALIGNMENT
        block, start = self._unused_part(size) or self._new_part(size)
        view = memoryview(block)[start : start + size]  # lives as long as the tensor's storage
        place = weakref.ref(block), start
        weakref.finalize(view, self.unused[size].append, place).atexit = False
        return view

    def _unused_part(self, size: int) -> tuple[mmap.mmap, int] | None:
        while self.unused[size]:
            block, start = self.unused[size].pop()
            if (memory := block()) is not None:
                return memory, start
        return None

    def _new_part(self, size: int) -> tuple[mmap.mmap, int]:
        block = self.last()
        if block is None or self.used + size > len(block):
            block, self.used = _in_huge_pages(_BLOCK), 0
            self.last = weakref.ref(block)
            self._forget_parts_of_gone_blocks()
        start, self.used = self.used, self.used + size
        return block, start

    def _forget_parts_of_gone_blocks(self) -> None:
        for parts in list(self.unused.values()):
            for _ in range(len(parts)):  # another thread may append meanwhile
                place = parts.pop(0)
                if place[0]() is not None:
                    parts.append(place)


_blocks = _Blocks()


def empty_for_weights(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of int32 without values on the CPU, in huge pages if the system has them."""
    count = math.prod(shape)
    if count and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # torch may need fewer addresses
            part = _blocks.part(4 * count)
            return torch.frombuffer(part, dtype=torch.int32, count=count).view(shape)
    return torch.empty(shape, dtype=torch.int32, device="cpu")


def _in_huge_pages(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


__all__ = ["empty", "empty_for_weights"]
