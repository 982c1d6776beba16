"""Reading pairs of a source and a target line from files and data sets, in constant memory."""

import contextlib
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..configuration.errors import InputError
from ..configuration.extras import needs
from ..configuration.places_vaswani import check_path
from ..tokenization.kinds_vaswani import lone_surrogate
from .names import data_set_name, form_of, without_compression

Pair = tuple[str, str]

# Number of rows of a data set or Parquet file read at once.
_ROWS = 1000


class DataError(InputError):
    """Data that cannot be read; the message names file, line and reason."""


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a utf-8 file without their line ends.

    The file may be plain, .gz or .zst. The name "-" reads stdin.

    Raises:
        DataError: the file is missing or damaged, stdin is closed, or a line is not utf-8.
    """
    return strictly(_lines(path))


def read_parallel(source: str, target: str) -> tuple[list[str], list[str]]:
    """Read two files whose lines correspond.

    Raises:
        DataError: a file cannot be read, or the files differ in length.
    """
    pairs = list(strictly(_parallel_pairs(source, target)))
    return [source for source, _ in pairs], [target for _, target in pairs]


def read_pairs(data: Sequence[str], columns: Sequence[str], default_split: str) -> list[Pair]:
    """Read pairs in one of the forms that `vaswani train --help` shows.

    Args:
        data: two parallel files, one file, or a data set ID[@CONFIG][:SPLIT].
        columns: names of the source and the target column in JSONL, Parquet files and data sets.
        default_split: split to read when the name of a data set has none.

    Raises:
        DataError: the data are missing, empty or malformed. The message names file and line.
    """
    pairs = list(strictly(iterate_pairs(data, columns, default_split)))
    if not pairs:
        raise DataError(f"{' '.join(data)} is empty: no sentence pairs.")
    return pairs


def iterate_pairs(
    data: Sequence[str], columns: Sequence[str], default_split: str
) -> Iterator[Pair | DataError]:
    """Yield the pairs of one file, two parallel files or a data set.

    A pair that cannot be read is yielded as a DataError.

    Raises:
        DataError: the data cannot be opened, or cannot be read to the end.
    """
    name = data[0]
    for path in data:
        refuse_csv(path)
    if len(data) == 2:
        return _parallel_pairs(*data)
    if len(data) > 2:
        raise DataError(f"Expected one file, two parallel files or a data set, got {list(data)}")
    match form_of(name):
        case "tsv":
            return (_tsv_pair(line, place) for line, place in _filled_lines(name, mark="\t"))
        case "jsonl":
            return (_json_pair(line, columns, place) for line, place in _filled_lines(name))
        case "parquet":
            return _record_pairs(_parquet_rows(name), columns, name)
    if Path(name).is_file():
        raise DataError(
            f"{name} is one file, but neither .tsv, .jsonl nor .parquet: give two parallel text "
            "files, the source's first, or rename the file."
        )
    return _record_pairs(_data_set_rows(name, default_split), columns, name)


def strictly(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, and raise the first DataError among them."""
    for item in items:
        if isinstance(item, DataError):
            raise item
        yield item


def _lines(path: str) -> Iterator[str | DataError]:
    """Yield the lines of a file. A line that is not utf-8 is yielded as a DataError."""
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            file = _opened(path, stack)
            for number, line in enumerate(file, start=1):
                try:
                    # Some editors start a file with a byte order mark, which "utf-8-sig" removes.
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    yield DataError(f"{path}, line {number}: not utf-8 ({error})")
                else:
                    yield text.rstrip("\r\n")
    except FileNotFoundError as error:
        raise DataError(f"No such file: {path}") from error
    except (OSError, EOFError, zlib.error) as error:
        fault = "is damaged" if getattr(error, "errno", None) is None else "cannot be read"
        raise DataError(f"{path} {fault} after line {number}: {error}") from error


def _opened(path: str, stack: contextlib.ExitStack) -> Iterable[bytes]:
    if path == "-":
        if sys.stdin is None:
            raise DataError("Standard input is closed: name a file.")
        return sys.stdin.buffer
    refuse_other_compression(path)
    if path.endswith(".gz"):
        return stack.enter_context(gzip.open(path, "rb"))
    if path.endswith(".zst"):
        with needs("vaswani[train]"):
            import pyarrow
        stream: Any = stack.enter_context(pyarrow.input_stream(path, compression="zstd"))
        return io.BufferedReader(stream, 2**20)
    return stack.enter_context(open(path, "rb"))


def _parallel_pairs(source: str, target: str) -> Iterator[Pair | DataError]:
    sources, targets = _lines(source), _lines(target)
    number = 0
    while True:
        source_line, target_line = next(sources, None), next(targets, None)
        if source_line is None or target_line is None:
            break
        number += 1
        if isinstance(source_line, str) and isinstance(target_line, str):
            yield source_line, target_line
        else:
            error = source_line if isinstance(source_line, DataError) else target_line
            yield error  # type: ignore[misc]
    if source_line is not None or target_line is not None:
        lines = [
            number + (line is not None) + sum(1 for _ in rest)
            for line, rest in ((source_line, sources), (target_line, targets))
        ]
        raise DataError(
            f"{source} has {lines[0]} lines, {target} has {lines[1]}: parallel files must match; "
            f"line {number + 1} has no partner."
        )


def _filled_lines(path: str, mark: str = "") -> Iterator[tuple[str | DataError, str]]:
    """Yield lines that are not blank or contain the mark, with a text "FILE, line NUMBER"."""
    for number, line in enumerate(_lines(path), start=1):
        if isinstance(line, DataError) or line.strip() or (mark and mark in line):
            yield line, f"{path}, line {number}"


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    with needs("vaswani[train]"):
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except FileNotFoundError as error:
        raise DataError(f"No such file: {path}") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def refuse_other_compression(path: str) -> None:
    """Refuse a file by the ending of a compression that is not read.

    Raises:
        DataError: names the file and the compressions that are read.
    """
    if path.endswith((".bz2", ".xz")):
        raise DataError(
            f"{path}: this compression is not read. Use .gz or .zst, or unpack the file."
        )


def refuse_csv(path: str) -> None:
    """Refuse a CSV file, because only `datasets` reads such files.

    Raises:
        DataError: names the file and the way out.
    """
    if without_compression(path).endswith(".csv"):
        raise DataError(
            f"{path}: CSV files are read from a folder. Put the file into a folder of its own, and "
            "name the folder and its --columns."
        )


def load_rows(name: str, default_split: str, **options: Any) -> Any:
    """Load the data set ID[@CONFIG][:SPLIT], from the Hub or a local folder.

    Raises:
        DataError: there is no such data set, or it cannot be loaded.
    """
    place, configuration, split = data_set_name(name)
    with needs("vaswani[train]"):  # imported here because translating text does not need it
        from datasets import config, load_dataset
        from datasets.exceptions import DatasetsError
        from datasets.naming import camelcase_to_snakecase
    # Do not check the Hub for a cached data set, so that it loads offline.
    *user, own_name = place.split("/")
    cached = "___".join([*user, camelcase_to_snakecase(own_name)])
    if not (place and Path(config.HF_DATASETS_CACHE, cached).is_dir()):
        try:
            check_path(place)
        except FileNotFoundError as error:
            raise DataError(str(error)) from error
    try:
        if not options.get("streaming"):
            # `Corpus.content` needs the checksums of cache files, which data in memory lack.
            options["keep_in_memory"] = False
        return load_dataset(place, configuration or None, split=split or default_split, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError, DatasetsError) as error:
        kind = "a folder here, but no" if Path(place).is_dir() else "neither a file here nor a"
        reason = f"{error} {error.__cause__ or ''}".strip()
        raise DataError(f"{name} is {kind} data set that can be loaded: {reason}") from error


def _data_set_rows(name: str, default_split: str) -> Iterator[dict[str, Any]]:
    for batch in load_rows(name, default_split).with_format("arrow").iter(_ROWS):
        yield from batch.to_pylist()


def _record_pairs(
    rows: Iterable[dict[str, Any]], columns: Sequence[str], name: str
) -> Iterator[Pair | DataError]:
    for number, row in enumerate(rows, start=1):
        yield row_pair(row, columns, f"{name}, record {number}")


def _tsv_pair(line: str | DataError, place: str) -> Pair | DataError:
    """Split a TSV line into source and target, and ignore further columns."""
    if isinstance(line, DataError):
        return line
    fields = line.split("\t", 2)
    if len(fields) < 2:
        return DataError(f"{place}: no tab between source and target: {line[:80]!r}")
    return fields[0], fields[1]


def _json_pair(line: str | DataError, columns: Sequence[str], place: str) -> Pair | DataError:
    """Read the pair of a JSON line."""
    if isinstance(line, DataError):
        return line
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        return DataError(
            f"{place}: not JSON ({error}); each line must be an object with two columns"
        )
    if not isinstance(row, dict):
        start = line.strip()[:80]
        return DataError(
            f"{place}: {start!r} is not a JSON object with two columns. Each line must be an "
            "object of its own, not an array."
        )
    return row_pair(row, columns, place)


def row_pair(row: dict[str, Any], columns: Sequence[str], place: str) -> Pair | DataError:
    """Return two columns of a record, or of the dictionary in its column "translation".

    Texts in the record itself come first.
    """
    has_texts = all(isinstance(row.get(column), str) for column in columns)
    if isinstance(row.get("translation"), dict) and not has_texts:
        row = row["translation"]
    missing = [column for column in columns if column not in row]
    if missing:
        return DataError(
            f"{place} has no {missing[0]!r} but {', '.join(map(repr, row))}: name the two to use "
            "with --columns."
        )
    for column in columns:
        if not isinstance(row[column], str):
            return DataError(f"{place}: {column!r} is {row[column]!r:.80}, not text.")
        if flaw := lone_surrogate(row[column]):  # JSON alone can contain half a character
            return DataError(f"{place}: {column!r} {flaw}.")
    return row[columns[0]], row[columns[1]]


__all__ = [
    "DataError",
    "Pair",
    "iterate_pairs",
    "load_rows",
    "read_lines",
    "read_pairs",
    "read_parallel",
    "refuse_csv",
    "refuse_other_compression",
    "row_pair",
    "strictly",
]
