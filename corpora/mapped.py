"""Prepared pairs that are read from mapped files, with bounded memory."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..configuration.extras import needs

with needs("vaswani[train]"):
    import datasets
    import pyarrow
    from datasets.table import MemoryMappedTable, concat_tables

# Rows read before the pages of the files are released. Pages that are read at random would stay
# mapped, until all of a corpus counted as the memory of each process.
_ROWS = 20_000


class MappedPairs(datasets.Dataset):
    """A data set whose rows are read from mapped Arrow files."""

    _files: "_Mappings | None" = None
    _rows_read = 0

    @classmethod
    def from_files(cls, paths: Sequence[Path], fingerprint: str) -> "MappedPairs":
        """Map Arrow stream files one after another."""
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

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        """Read the rows of a batch."""
        self._rows_read += len(keys)
        if self._files and self._rows_read > _ROWS:
            self._rows_read = 0
            self._files.release()
        return super().__getitems__(keys)


class _Mappings:
    """Mapped files, shared by all copies of a data set."""

    def __init__(self, mappings: list[mmap.mmap]) -> None:
        self._mappings = mappings

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Mappings":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the files itself, through the tables, and has no pages to release.
        return _Mappings, ([],)

    def release(self) -> None:
        """Give the pages back. Those that are needed again come from the system's file cache."""
        for mapping in self._mappings:
            if hasattr(mapping, "madvise"):
                mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


__all__ = ["MappedPairs"]
