"""Reading pairs of a source and a target line from files and data sets."""

import contextlib
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..configuration.extras import needs
from ..configuration.places_vaswani import check_path
from ..tokenization.tokenization_vaswani import half_character

Pair = tuple[str, str]


class DataError(ValueError):
    """Data that cannot be read; the message names file, line and reason."""


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a utf-8 file, plain or .gz, without their ends; "-" is standard input.

    Raises:
        DataError: there is no such file, it is damaged, or a line is not utf-8.
    """
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            if path == "-":
                file = sys.stdin.buffer
            else:
                opened = gzip.open if path.endswith(".gz") else open
                file = stack.enter_context(opened(path, "rb"))
            for number, line in enumerate(file, start=1):
                # Some editors write a byte order mark first. It is no part of the text.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.rstrip("\r\n")
    except FileNotFoundError as error:
        raise DataError(f"No such file: {path}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not utf-8 ({error})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged after line {number}: {error}") from error


def read_parallel(source: str, target: str) -> tuple[list[str], list[str]]:
    """Read two files whose lines correspond.

    Raises:
        DataError: a file cannot be read, or they differ in length.
    """
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise DataError(
            f"{source} has {len(sources)} lines, {target} has {len(targets)}: parallel files must "
            f"match; line {min(len(sources), len(targets)) + 1} has no partner."
        )
    return sources, targets


def read_pairs(data: Sequence[str], columns: Sequence[str], default_split: str) -> list[Pair]:
    """Read pairs in one of the forms that `vaswani train --help` shows.

    Args:
        data: two parallel files, one TSV or JSONL file, or a data set ID[@CONFIG][:SPLIT].
        columns: of JSONL records and data sets, the source's first.
        default_split: of a data set.

    Raises:
        DataError: data are missing, empty or malformed; names file and line.
    """
    name = data[0]
    plain_name = name.removesuffix(".gz")
    if len(data) == 2:
        pairs = list(zip(*read_parallel(*data), strict=True))
    elif len(data) > 2:
        raise DataError(f"Expected one file, two parallel files or a data set, got {list(data)}")
    elif plain_name.endswith(".tsv"):
        pairs = [_tsv_pair(line, place) for line, place in _filled_lines(name)]
    elif plain_name.endswith((".jsonl", ".json")):
        pairs = [_json_pair(line, columns, place) for line, place in _filled_lines(name)]
    elif Path(name).is_file():
        raise DataError(
            f"{name} is one file, but neither .tsv nor .jsonl: give two parallel text files, the "
            "source's first, or rename the file."
        )
    else:
        rows = enumerate(_data_set_rows(name, default_split), start=1)
        pairs = [_row_pair(row, columns, f"{name}, record {number}") for number, row in rows]
    if not pairs:
        raise DataError(f"{' '.join(data)} is empty: no sentence pairs.")
    return pairs


def _filled_lines(path: str) -> Iterator[tuple[str, str]]:
    """Yield the lines that are not blank, and where they stand."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            yield line, f"{path}, line {number}"


def _data_set_rows(name: str, default_split: str) -> Any:
    """Load the rows of ID[@CONFIG][:SPLIT], from the Hub or a local folder."""
    data_set, _, split = name.partition(":")
    place, _, configuration = data_set.partition("@")
    try:
        check_path(place)
    except FileNotFoundError as error:
        raise DataError(str(error)) from error
    with needs("vaswani[train]"):  # only here: text is translated without it
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    try:
        return load_dataset(place, configuration or None, split=split or default_split)
    except (ConnectionError, OSError, ValueError, DatasetsError) as error:
        kind = "a folder here, but no" if Path(place).is_dir() else "neither a file here nor a"
        reason = f"{error} {error.__cause__ or ''}".strip()
        raise DataError(f"{name} is {kind} data set that can be loaded: {reason}") from error


def _tsv_pair(line: str, place: str) -> Pair:
    """Split a TSV line; further columns are ignored."""
    fields = line.split("\t")
    if len(fields) < 2:
        raise DataError(f"{place}: no tab between source and target: {line!r}")
    return fields[0], fields[1]


def _json_pair(line: str, columns: Sequence[str], place: str) -> Pair:
    """Read a JSON line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also endless numbers and nesting
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: {line.strip()} is no JSON object with two columns.")
    return _row_pair(row, columns, place)


def _row_pair(row: dict[str, Any], columns: Sequence[str], place: str) -> Pair:
    """Pick the two columns of a record, or of its "translation" as many data sets have it."""
    if isinstance(row.get("translation"), dict):
        row = row["translation"]
    missing = [column for column in columns if column not in row]
    if missing:
        raise DataError(
            f"{place} has no {missing[0]!r} but {', '.join(map(repr, row))}: name the two to use "
            "with --columns."
        )
    for column in columns:
        if not isinstance(row[column], str):
            raise DataError(f"{place}: {column!r} is {row[column]!r}, not text.")
        if flaw := half_character(row[column]):  # only JSON can hold one
            raise DataError(f"{place}: {column!r} {flaw}.")
    return row[columns[0]], row[columns[1]]


__all__ = ["DataError", "Pair", "read_lines", "read_pairs", "read_parallel"]
