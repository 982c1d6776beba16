"""Prepared pairs, read from memory-mapped files with bounded memory."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..configuration.extras import needs

with needs("vaswani[train]"):
    import datasets
    import pyarrow.compute
    from datasets.table import MemoryMappedTable, concat_tables

# Number of rows after which the pages of the files are released. Otherwise the whole corpus would
# count as memory of each process: the system maps 64 KiB for each row that is read at random.
_ROWS = 250


class MappedPairs(datasets.Dataset):
    """A data set whose rows are read from mapped Arrow files."""

    _files: "_Mappings | None" = None
    _rows_read = 0

    @classmethod
    def from_files(cls, paths: Sequence[Path], fingerprint: str) -> "MappedPairs":
        """Map Arrow stream files and concatenate their rows."""
        mappings = [_mapping(path) for path in paths]
        tables = [
            MemoryMappedTable(
                pyarrow.ipc.open_stream(pyarrow.py_buffer(mapping)).read_all(), str(path)
            )
            for mapping, path in zip(mappings, paths, strict=True)
        ]
        pairs = cls(concat_tables(tables), fingerprint=fingerprint)
        pairs._files = _Mappings(mappings)
        return pairs

    def token_counts(self) -> np.ndarray:
        """Count the tokens of `input_ids` and `labels` in every row: (N, 2)."""
        counts = np.empty((len(self), 2), dtype=np.int32)
        chunks = [self.data.column(name).chunks for name in ("input_ids", "labels")]
        start = 0
        for number, sides in enumerate(zip(*chunks, strict=True)):
            end = start + len(sides[0])
            for side, lists in enumerate(sides):
                counts[start:end, side] = pyarrow.compute.list_value_length(lists)
            start = end
            if self._files and number % 100 == 0:
                self._files.release()
        return counts

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        """Read the rows of a batch."""
        self._rows_read += len(keys)
        if self._files and self._rows_read > _ROWS:
            self._rows_read = 0
            self._files.release()
        return super().__getitems__(keys)


class _Mappings:
    """Memory-mapped files that all copies of a data set share."""

    def __init__(self, mappings: list[mmap.mmap]) -> None:
        self._mappings = mappings

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Mappings":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping cannot be pickled. The other process maps the files when it loads the tables.
        return _Mappings, ([],)

    def release(self) -> None:
        """Release the pages. Later reads get them from the system's file cache."""
        for mapping in self._mappings:
            if hasattr(mapping, "madvise"):
                mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


__all__ = ["MappedPairs"]
