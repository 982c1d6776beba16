"""Fingerprints of values in memory, which show later whether any bit has changed.

Where Linux reports writes to memory, unwritten memory is not compared again (`kernels/written.c`).
"""

import ctypes
import os
from collections.abc import Iterator, Sequence

import torch

from .library_vaswani import COUNT, POINTER, address, as_stored, library

_PART, _DIGEST = 2**14, 128  # bytes of a part, and of its digest
_ROWS_AT_ONCE = 2**12  # number of rows that are copied at once
# Fingerprints depend on this secret, because otherwise a change that keeps a fingerprint could be
# constructed. Two processes therefore have different fingerprints of the same values.
_KEY = os.urandom(_DIGEST)
_NOT_COMPARED, _UNWATCHED = 0, -2  # states of a fingerprint, as in the C file


class Fingerprint(ctypes.Structure):
    """Values, where the digests of their parts are, and when they were last compared."""

    _fields_ = (("values", POINTER), ("count", COUNT), ("digests", POINTER), ("held", COUNT))


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Digest each part of contiguous values. Other bytes almost surely have other digests."""
    digests = torch.empty(-(-values.nbytes // _PART), _DIGEST, dtype=torch.uint8, device="cpu")
    structure = Fingerprint(address(values), values.nbytes, address(digests))
    library().take_fingerprint(ctypes.byref(structure), _KEY, torch.get_num_threads())
    return digests


class Fingerprints:
    """Fingerprints of contiguous tensors, to compare all of them at once.

    The tensors must stay in memory as long as they are compared.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], digests: Sequence[torch.Tensor]) -> None:
        self.digests = digests
        self.structures = (Fingerprint * len(tensors))(
            *(
                Fingerprint(address(values), values.nbytes, address(own), _first_state(values))
                for values, own in zip(tensors, digests, strict=True)
            )
        )
        self.fit = all(
            len(own) == -(-values.nbytes // _PART)
            for values, own in zip(tensors, digests, strict=True)
        )

    def hold(self) -> bool:
        """Tell whether all tensors have the values of their fingerprints."""
        structures, threads = self.structures, torch.get_num_threads()
        return self.fit and bool(
            library().have_fingerprints(ctypes.byref(structures), len(structures), _KEY, threads)
        )


def _first_state(values: torch.Tensor) -> int:
    # A GPU writes to pinned memory without a page fault, so always compare it. CUDA must not start
    # here, because processes that are forked later could not use it.
    pinned = torch.cuda.is_initialized() and values.is_pinned()
    return _UNWATCHED if pinned else _NOT_COMPARED


def in_parts(weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the rows of weights in contiguous parts, so that a copy of a part is small."""
    for weight in weights:
        yield from as_stored(weight).split(_ROWS_AT_ONCE)


__all__ = ["Fingerprints", "fingerprint", "in_parts"]
