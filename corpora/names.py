"""Names of data on command lines: FILE or ID[@CONFIG][:SPLIT], each with an optional =WEIGHT."""

import re
from pathlib import Path
from typing import NamedTuple

COMPRESSED = (".gz", ".zst")
_FORMS = {".tsv": "tsv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_WEIGHT = re.compile(r"(.+)=([^=/\\]*)")


class DataSetName(NamedTuple):
    """The parts of ID[@CONFIG][:SPLIT]. Missing parts are empty."""

    place: str
    configuration: str
    split: str


def data_set_name(name: str) -> DataSetName:
    """Split ID[@CONFIG][:SPLIT], the name of a data set of the Hub or of a local folder."""
    if Path(name).is_dir():  # a folder's own name may have these characters
        return DataSetName(name, "", "")
    data_set, _, split = name.partition(":")
    place, _, configuration = data_set.partition("@")
    return DataSetName(place, configuration, split)


def split_weight(word: str) -> tuple[str, str | None]:
    """Split NAME=WEIGHT, unless a file has that name. The weight is returned as it is written."""
    match = _WEIGHT.fullmatch(word)
    if match is None or Path(word).exists():
        return word, None
    return match[1], match[2]


def without_weight(word: str) -> str:
    """Remove the number after the last = of a name."""
    name, weight = split_weight(word)
    try:
        float(weight or "")
    except ValueError:
        return word
    return name


def without_compression(name: str) -> str:
    """Remove the ending of a compressed file."""
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name


def form_of(name: str) -> str | None:
    """Return the form of a file of pairs: tsv, jsonl or parquet. Return None for other files."""
    return _FORMS.get(Path(without_compression(name)).suffix)


__all__ = [
    "COMPRESSED",
    "DataSetName",
    "data_set_name",
    "form_of",
    "split_weight",
    "without_compression",
    "without_weight",
]
