"""Tokenise corpora once, on all cores, into files that every process maps.

A prepared corpus is a folder of Arrow files and `preparation.json`, which is written last. The name
of the folder is a hash of the data, the tokenizers and the rules, so that a changed file or setting
gives another folder. During preparation the folder is called `KEY.unfinished`. A preparation that
was killed continues after its last complete part.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..configuration.extras import needs
from .atomic_folder import failed_save, flush
from .corpus import Corpus, content_of_file, tagged
from .duplicates import first_of_each, hashes_of, keep_rows
from .encoding import TextEncoder, fingerprint_of
from .filtering import Rules, TextFilter, length_filter
from .in_processes import cores, in_order
from .locking import MachineLock
from .reading import DataError, Pair, strictly

with needs("vaswani[train]"):
    import datasets
    import pyarrow
    import xxhash
    from datasets.utils import tqdm

# Version of the prepared folders. Raise it when their layout or content changes.
_VERSION = 2
_REPORT = "preparation.json"
_BATCH = 2000
_PART = 250 * _BATCH


@dataclass
class Prepared:
    """A prepared corpus: its folder, and the numbers of pairs read, kept and left out."""

    folder: Path
    read: int
    kept: int
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The Arrow files. `length` is the number of tokens of the longer side."""
        return sorted(self.folder.glob("*.arrow"))


def default_cache() -> Path:
    """Return the folder of prepared corpora, inside the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "vaswani"


def prepare(
    corpus: Corpus,
    tokenizer: Any,
    target_tokenizer: Any,
    rules: Rules,
    cache: Path,
    keep_texts: bool = False,
    processes: int | None = None,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Tokenise a corpus, unless its prepared folder is in the cache.

    Several processes may call this function at the same time. One process prepares the corpus, and
    the others wait for it.

    Args:
        corpus: the corpus.
        tokenizer, target_tokenizer: tokenizers of sources and targets.
        rules: rules that choose the pairs to leave out.
        cache: folder of prepared corpora.
        keep_texts: store the texts and their token counts instead of the ids.
        processes: number of tokenising processes. None means the number of cores.
        say: function that receives messages.

    Raises:
        DataError: the corpus cannot be read, changes during reading, or has no pair left.
        OSError: a file could not be written. The message says how much space is free.
    """
    before = corpus.state()
    vocabularies = tuple(map(fingerprint_of, (tokenizer, target_tokenizer)))
    parts = (_VERSION, corpus.content(), rules.key(), keep_texts, *vocabularies)
    key = xxhash.xxh3_128_hexdigest(repr(parts).encode())
    folder = cache / key
    if folder.exists() and _damage_of(folder) is None:
        return _opened(folder)  # without the lock, so that a read-only cache works
    cache.mkdir(parents=True, exist_ok=True)
    with MachineLock(cache / f"{key}.lock", say):
        if folder.exists():
            if (flaw := _damage_of(folder)) is None:
                return _opened(folder)
            say(f"{folder} {flaw}: preparing {corpus.name} again.")
            shutil.rmtree(folder)
        encoders = TextEncoder(tokenizer), TextEncoder(target_tokenizer, target=True)
        tokenise = Tokenise(encoders, rules, corpus.tag, keep_texts)
        try:
            _Preparation(folder, corpus, rules, tokenise).run(processes or cores())
        except OSError as error:
            raise failed_save(folder, error) from error
        if corpus.state() != before:
            shutil.rmtree(folder)
            raise DataError(f"{corpus.name} changed while it was read: start the command again.")
        return _opened(folder)


def _damage_of(folder: Path) -> str | None:
    """Return the flaw of a prepared folder, or None if the folder is complete."""
    try:
        report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
        if report["version"] != _VERSION:
            return f"is of version {report['version']}, not {_VERSION}"
        for name, checksum in report["files"].items():
            if content_of_file(folder / name).hex() != checksum:
                return f"has a damaged {name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged ({error})"
    return None


def _opened(folder: Path) -> Prepared:
    report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
    return Prepared(folder, report["read"], report["kept"], report["dropped"])


class Tokenise:
    """Filter and tokenise batches of pairs."""

    def __init__(
        self,
        encoders: tuple[TextEncoder, TextEncoder],
        rules: Rules,
        tag: str | None,
        keep_texts: bool = False,
    ) -> None:
        self.encoders, self.rules, self.tag, self.keep_texts = encoders, rules, tag, keep_texts
        self.text_filter = TextFilter(rules)

    def __call__(
        self, batch: Sequence[Pair | DataError]
    ) -> tuple[pyarrow.RecordBatch, Counter[str], np.ndarray | None]:
        """Return the kept pairs as an Arrow batch, dropped counts by reason, and hashes of pairs.

        The hashes are None if duplicates are not removed.
        """
        readable = [pair for pair in batch if not isinstance(pair, DataError)]
        kept, dropped = self.text_filter(readable)
        dropped["unreadable"] = len(batch) - len(readable)
        rows, fits, too_long = self.encode(tagged(kept, self.tag))
        hashes = None
        if self.rules.drop_duplicates:
            hashes = hashes_of(kept, self.rules.drop_duplicates)[fits]
        return rows, dropped + too_long, hashes

    def encode(self, pairs: Sequence[Pair]) -> tuple[pyarrow.RecordBatch, np.ndarray, Counter[str]]:
        """Return the pairs whose lengths fit as an Arrow batch, their mask, and dropped counts."""
        sides = [
            encoder([pair[side] for pair in pairs]) for side, encoder in enumerate(self.encoders)
        ]
        lengths = [
            np.array([len(ids) for ids in rows], dtype=np.int64) // encoder.dtype.itemsize
            for rows, encoder in zip(sides, self.encoders, strict=True)
        ]
        fits, too_long = length_filter(self.rules, *lengths)
        columns: dict[str, Any]
        if self.keep_texts:
            columns = {
                # Without a type, a batch without pairs would have columns of another type.
                "source": pyarrow.array([pair[0] for pair in pairs], pyarrow.string()),
                "target": pyarrow.array([pair[1] for pair in pairs], pyarrow.string()),
                "source_length": lengths[0].astype(np.int32),
                "target_length": lengths[1].astype(np.int32),
            }
        else:
            columns = {
                name: _lists(rows, length, encoder.dtype)
                for name, rows, length, encoder in zip(
                    ("input_ids", "labels"), sides, lengths, self.encoders, strict=True
                )
            }
        columns["length"] = np.maximum(*lengths).astype(np.int32)
        table = pyarrow.record_batch(columns)
        if not fits.all():
            table = table.filter(pyarrow.array(fits))
        return table, fits, too_long


def _lists(rows: list[bytes], lengths: np.ndarray, dtype: np.dtype) -> pyarrow.ListArray:
    """Return one Arrow array of the ids of many texts, without a Python object per id."""
    values = np.frombuffer(b"".join(rows), dtype)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))


class _Preparation:
    """Write the parts of a prepared folder, continuing after the parts of a killed preparation."""

    def __init__(self, folder: Path, corpus: Corpus, rules: Rules, tokenise: Tokenise) -> None:
        self.folder, self.corpus, self.rules, self.tokenise = folder, corpus, rules, tokenise
        self.partial = folder.with_name(f"{folder.name}.unfinished")

    def run(self, processes: int) -> None:
        """Write all parts, then rename the folder to its final name."""
        self.partial.mkdir(exist_ok=True)
        parts = self._whole_parts()
        done = sum(part["read"] for part in parts)
        with tqdm(desc="Tokenizing", unit=" pairs", unit_scale=True, initial=done) as bar:
            batches = self._batches(done)
            results = in_order(self.tokenise, batches, processes)
            while part := self._write_part(len(parts), results, bar):
                parts.append(part)
        self._finish(parts)

    def _whole_parts(self) -> list[dict[str, Any]]:
        """Return the reports of the parts that an earlier preparation finished; remove the rest."""
        parts: list[dict[str, Any]] = []
        while (self.partial / f"{len(parts):05d}.json").exists():
            parts.append(json.loads((self.partial / f"{len(parts):05d}.json").read_text()))
        for path in self.partial.iterdir():
            if path.stem >= f"{len(parts):05d}":
                path.unlink()
        return parts

    def _batches(self, done: int) -> Iterator[list[Pair | DataError]]:
        """Yield batches of pairs after the first `done`. Unreadable pairs are DataErrors."""
        pairs: Iterator[Pair | DataError] = islice(self.corpus.pairs(), done, None)
        if not self.rules.skip_unreadable:
            pairs = strictly(pairs)
        while batch := list(islice(pairs, _BATCH)):
            yield batch

    def _write_part(self, number: int, results: Iterator[Any], bar: Any) -> dict[str, Any] | None:
        """Write the next part and return its report, or None at the end of the corpus."""
        read = kept = 0
        dropped: Counter[str] = Counter()
        name = f"{number:05d}"
        first = next(results, None)
        if first is None:
            return None
        with (
            (self.partial / f"{name}.arrow").open("wb") as file,
            (self.partial / f"{name}.hashes").open("wb") as hash_file,
            pyarrow.ipc.new_stream(file, first[1][0].schema) as writer,
        ):
            result = first
            while result is not None:
                batch, (rows, lost, hashes) = result
                writer.write_batch(rows)
                if hashes is not None:
                    hash_file.write(hashes.tobytes())
                dropped += lost
                read += len(batch)
                kept += len(rows)
                bar.update(len(batch))
                result = next(results, None) if read < _PART else None
        report = {"read": read, "kept": kept, "dropped": dict(dropped)}
        self._write_report(f"{name}.json", report, name)
        return report

    def _write_report(self, name: str, report: dict[str, Any], *stems: str) -> None:
        """Write a report after its files are on the disk. Its presence marks them as complete."""
        for stem in stems:
            for path in self.partial.glob(f"{stem}.*"):
                flush(path)
        path = self.partial / f".{name}"
        path.write_text(json.dumps(report), encoding="utf-8")
        flush(path)
        path.replace(self.partial / name)

    def _finish(self, parts: list[dict[str, Any]]) -> None:
        dropped: Counter[str] = Counter()
        for part in parts:
            dropped += Counter(part["dropped"])
        read, kept = (sum(part[name] for part in parts) for name in ("read", "kept"))
        if self.rules.drop_duplicates:
            duplicates = self._drop_duplicates([part["kept"] for part in parts])
            kept -= duplicates
            dropped += Counter(duplicate=duplicates)
        if not kept:
            shutil.rmtree(self.partial)
            raise DataError(_nothing_left(self.corpus, self.rules, read, dropped))
        files = sorted(self.partial.glob("*.arrow"))
        report = {
            "version": _VERSION,
            "read": read,
            "kept": kept,
            "dropped": dict(dropped),
            "corpus": self.corpus.name,
            "files": {path.name: content_of_file(path).hex() for path in files},
        }
        self._write_report(_REPORT, report)
        self.partial.rename(self.folder)
        flush(self.folder.parent)
        for path in self.folder.iterdir():
            if path.suffix in (".hashes", ".json") and path.name != _REPORT:
                path.unlink()

    def _drop_duplicates(self, sizes: list[int]) -> int:
        """Rewrite the parts that repeat earlier pairs, and return the number of removed pairs."""
        stems = [f"{number:05d}" for number in range(len(sizes))]
        first = first_of_each([self.partial / f"{stem}.hashes" for stem in stems], self.partial)
        starts = np.cumsum([0, *sizes])
        for stem, start, end in zip(stems, starts[:-1], starts[1:], strict=True):
            if not first[start:end].all():
                keep_rows(self.partial / f"{stem}.arrow", first[start:end])
        return int(len(first) - first.sum())


def _nothing_left(corpus: Corpus, rules: Rules, read: int, dropped: Counter[str]) -> str:
    if not read:
        return f"{corpus.name} is empty: no sentence pairs."
    if dropped["too long"] == read:
        return f"All {read} pairs are longer than --max-length {rules.max_length}."
    return f"No pair of {corpus.name} is left: {describe_dropped(dropped)}."


def describe_dropped(dropped: dict[str, int]) -> str:
    """Return the counts of pairs that were left out by reason, for messages."""
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)


__all__ = ["Prepared", "Tokenise", "default_cache", "describe_dropped", "prepare"]
