"""Exact duplicates among any number of pairs, found in little memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..configuration.extras import needs
from .atomic_folder import flush
from .reading import Pair

with needs("vaswani[train]"):
    import pyarrow
    import xxhash

_HASH = np.dtype([("high", "u8"), ("low", "u8")])
_RECORD = np.dtype([*_HASH.descr, ("row", "u8")])
_BUCKETS = 64


def hashes_of(pairs: Sequence[Pair], duplicates: str) -> np.ndarray:
    """Return a 128-bit hash of each pair, or of one side of it. Duplicates have equal hashes."""
    match duplicates:
        case "source":
            texts = [source for source, _ in pairs]
        case "target":
            texts = [target for _, target in pairs]
        case _:
            texts = [f"{len(source)} {source}{target}" for source, target in pairs]
    digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    return np.frombuffer(digests, dtype=_HASH)


def first_of_each(files: Sequence[Path], scratch: Path) -> np.ndarray:
    """Return a mask of the hashes whose value occurs for the first time.

    Little memory is needed: the hashes are distributed over buckets on the disk, and one bucket at
    a time is sorted. Equal hashes share a bucket.
    """
    rows = 0
    paths = [scratch / f"bucket-{number}" for number in range(_BUCKETS)]
    for path in paths:
        path.unlink(missing_ok=True)
    for file in files:
        hashes = np.fromfile(file, _HASH)
        records = np.empty(len(hashes), _RECORD)
        records["high"], records["low"] = hashes["high"], hashes["low"]
        records["row"] = np.arange(rows, rows + len(hashes))
        rows += len(hashes)
        buckets = records["high"] % _BUCKETS
        for number, path in enumerate(paths):
            with path.open("ab") as bucket:
                records[buckets == number].tofile(bucket)
    first = np.ones(rows, dtype=bool)
    for path in paths:
        records = np.fromfile(path, _RECORD) if path.exists() else np.empty(0, _RECORD)
        records = records[np.lexsort((records["row"], records["low"], records["high"]))]
        same = records["high"][1:] == records["high"][:-1]
        same &= records["low"][1:] == records["low"][:-1]
        first[records["row"][1:][same]] = False
        path.unlink(missing_ok=True)
    return first


def keep_rows(path: Path, kept: np.ndarray) -> None:
    """Rewrite an Arrow file with only the rows that the mask `kept` marks.

    A file that a killed call has already rewritten is not changed.
    """
    rewritten = path.with_suffix(".rewritten")
    with pyarrow.memory_map(str(path)) as source:
        if sum(len(batch) for batch in pyarrow.ipc.open_stream(source)) != len(kept):
            return
    with pyarrow.memory_map(str(path)) as source, rewritten.open("wb") as file:
        reader = pyarrow.ipc.open_stream(source)
        start = 0
        with pyarrow.ipc.new_stream(file, reader.schema) as writer:
            for batch in reader:
                mask = pyarrow.array(kept[start : start + len(batch)])
                start += len(batch)
                writer.write_batch(batch.filter(mask))
    flush(rewritten)
    rewritten.replace(path)


__all__ = ["first_of_each", "hashes_of", "keep_rows"]
