"""Memory for the large tensors of a search, kept from one call of `generate` to the next.

The allocator of the C library returns large blocks to the system, so each call would wait for the
system to clear them. Kept blocks need no clearing. The system may take their pages when it runs out
of memory.
"""

import math
import mmap
import weakref
from collections import defaultdict

import torch

_LEAST = 2**20  # bytes; smaller blocks stay in the C library
_MOST = 2**31  # bytes of addresses that are kept, of which only the pages in use take memory

_CPU = torch.device("cpu")

# Blocks that no tensor uses, by size. Lists need no lock, because `pop` and `append` are atomic.
_unused: defaultdict[int, list[mmap.mmap]] = defaultdict(list)


def empty(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> torch.Tensor:
    """Return a tensor without values, on a CPU from memory that an earlier tensor used."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device.type != "cpu" or size < _LEAST or not hasattr(mmap, "MADV_FREE"):
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
    if kept + len(block) <= _MOST:
        try:
            block.madvise(mmap.MADV_FREE)
        except OSError:  # a system without this advice; the block is returned to it
            return
        _unused[len(block)].append(block)


__all__ = ["empty"]
