"""Read pairs of a source and a target line from the forms that train_translation.py takes."""

import json
import sys
from pathlib import Path
from typing import Any

from translate import read_lines
from vaswani.configuration.extras import needs
from vaswani.configuration.places_vaswani import check_path
from vaswani.tokenization.tokenization_vaswani import half_character

with needs("vaswani[train]", SystemExit):
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

Pair = tuple[str, str]


def read_pairs(data: list[str], columns: tuple[str, str], default_split: str) -> list[Pair]:
    """Load source and target lines from any of the forms in train_translation.py's manual.

    Exits with the file and line where something is wrong: a file is missing or empty, parallel
    files differ in length, a record lacks a column.
    """
    name = data[0]
    if len(data) == 2:
        sources, targets = ([text for _, text in read_lines(existing(path))] for path in data)
        if len(sources) != len(targets):
            sys.exit(
                f"{data[0]} has {len(sources)} lines, {data[1]} has {len(targets)}: parallel files "
                f"must match; line {min(len(sources), len(targets)) + 1} has no partner."
            )
        pairs = list(zip(sources, targets, strict=True))
    elif len(data) > 2:
        sys.exit(f"Expected one file, two parallel files or a data set, got {len(data)}: {data}")
    elif name.removesuffix(".gz").endswith(".tsv"):
        pairs = [
            tsv_pair(line, name, number)
            for number, line in read_lines(existing(name))
            if line.strip()
        ]
    elif name.removesuffix(".gz").endswith((".jsonl", ".json")):
        pairs = [
            json_pair(line, columns, name, number)
            for number, line in read_lines(existing(name))
            if line.strip()
        ]
    elif Path(name).is_file():
        sys.exit(
            f"{name} is one file, but neither .tsv nor .jsonl: give two parallel text files, the "
            "source's first, or rename the file."
        )
    else:
        rows = data_set_rows(name, default_split)
        pairs = [row_pair(row, columns, name, number) for number, row in enumerate(rows, start=1)]
    if not pairs:
        sys.exit(f"{' '.join(data)} is empty: no sentence pairs.")
    return pairs


def data_set_rows(name: str, default_split: str) -> Any:
    """The rows of ID[@CONFIG][:SPLIT], on the Hub or in a local folder."""
    data_set, _, split = name.partition(":")
    place, _, configuration = data_set.partition("@")
    try:
        check_path(place)
    except FileNotFoundError as error:
        sys.exit(str(error))
    try:
        return load_dataset(place, configuration or None, split=split or default_split)
    except (ConnectionError, OSError, ValueError, DatasetsError) as error:
        kind = "a folder here, but no" if Path(place).is_dir() else "neither a file here nor a"
        reason = f"{error} {error.__cause__ or ''}".strip()
        sys.exit(f"{name} is {kind} data set that can be loaded: {reason}")


def existing(path: str) -> str:
    """Return `path`; exit if there is no such file."""
    if not Path(path).is_file():
        sys.exit(f"No such file: {path}")
    return path


def tsv_pair(line: str, name: str, number: int) -> Pair:
    """Split a TSV line; further columns are ignored."""
    fields = line.split("\t")
    if len(fields) < 2:
        sys.exit(f"{name}, line {number}: no tab between source and target: {line!r}")
    return fields[0], fields[1]


def json_pair(line: str, columns: tuple[str, str], name: str, number: int) -> Pair:
    """Read a JSON line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # of numbers and nesting without end, too
        sys.exit(f"{name}, line {number}: not JSON ({error})")
    if not isinstance(row, dict):
        sys.exit(f"{name}, line {number}: {line.strip()} is no JSON object with two columns.")
    return row_pair(row, columns, name, number)


def row_pair(row: dict[str, Any], columns: tuple[str, str], name: str, number: int) -> Pair:
    """Pick the two columns of a record, or of its "translation" as many data sets have it."""
    if isinstance(row.get("translation"), dict):
        row = row["translation"]
    missing = [column for column in columns if column not in row]
    if missing:
        sys.exit(
            f"{name}, record {number} has no {missing[0]!r} but {', '.join(map(repr, row))}: "
            "name the two to use with --columns."
        )
    for column in columns:
        if not isinstance(row[column], str):
            sys.exit(f"{name}, record {number}: {column!r} is {row[column]!r}, not text.")
        if flaw := half_character(row[column]):  # only JSON, a record a line, can hold it
            sys.exit(f"{name}, line {number}: {column!r} {flaw}.")
    return row[columns[0]], row[columns[1]]
