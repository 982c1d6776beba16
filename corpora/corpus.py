"""The training corpora of a run: one or many files each, with weights and language tags."""

import glob
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..configuration.extras import needs
from .names import data_set_name, form_of, split_weight
from .reading import DataError, Pair, iterate_pairs, load_rows, refuse_csv, refuse_other_compression

with needs("vaswani[train]"):
    import xxhash

_BLOCK = 2**22


@dataclass(frozen=True)
class Corpus:
    """Files or a data set that are read one after another and sampled together.

    Args:
        shards: one entry per shard: one file, two parallel files or the name of a data set.
        columns: names of the source and the target column of a record.
        default_split: split to read when the name of a data set has none.
        weight: share of the pairs of an epoch, relative to other corpora. None means 1 if another
            corpus has a weight. If no corpus has one, an epoch has every pair once.
        tag: language to name before each source, such as "de" for `>>de<<`.
    """

    shards: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ("source", "target")
    default_split: str = "train"
    weight: float | None = None
    tag: str | None = None

    @property
    def name(self) -> str:
        """The files of the first shard and the number of further shards, for messages."""
        more = f" and {len(self.shards) - 1} more" if len(self.shards) > 1 else ""
        return " ".join(self.shards[0]) + more

    def pairs(self) -> Iterator[Pair | DataError]:
        """Yield all pairs in order, without the tag. An unreadable pair is yielded as a DataError.

        Raises:
            DataError: a file cannot be opened, or cannot be read to its end.
        """
        for shard in self.shards:
            yield from self.pairs_of(shard)

    def pairs_of(self, shard: tuple[str, ...]) -> Iterator[Pair | DataError]:
        """Yield the pairs of one shard, without the tag, as `pairs` does."""
        return iterate_pairs(shard, self.columns, self.default_split)

    def content(self) -> str:
        """Return a hash of the content. The names of the files do not change it."""
        digest = xxhash.xxh3_128(repr((self.tag, len(self.shards))).encode())
        for shard in self.shards:
            for name in shard:
                is_file = len(shard) > 1 or bool(form_of(name))
                digest.update(_content_of(name, is_file, self.default_split))
            if not all(map(_is_text, shard)):
                digest.update(repr(self.columns).encode())
            digest.update((form_of(shard[0]) or "").encode())
        return digest.hexdigest()

    def state(self) -> list[tuple[int, int]]:
        """Return size and modification time of every file, to detect changes during reading."""
        files = [Path(name) for shard in self.shards for name in shard]
        found = [path.stat() for path in files if path.is_file()]
        return [(file.st_size, file.st_mtime_ns) for file in found]


def tag_token(tag: str) -> str:
    """Return the token of a target language in the format of the OPUS-MT models."""
    return f">>{tag}<<"


def tagged(pairs: Sequence[Pair], tag: str | None) -> Sequence[Pair]:
    """Put the token of the target language before every source."""
    if tag is None:
        return pairs
    return [(f"{tag_token(tag)} {source}", target) for source, target in pairs]


def parse_corpora(
    words: Sequence[str],
    columns: Sequence[str] = ("source", "target"),
    default_split: str = "train",
    tags: Sequence[str] = (),
) -> list[Corpus]:
    """Parse the words of --train: files, globs and data sets, each with an optional `=WEIGHT`.

    Raises:
        DataError: a weight is negative or no number, all weights are 0, a glob matches no file, a
            text file has no partner, its partner has another weight, or the number of tags does
            not fit the number of corpora.
    """
    found: list[tuple[tuple[tuple[str, ...], ...], float | None]] = []
    remaining = [_weighted(word) for word in words]
    for name, _ in remaining:
        refuse_csv(name)
    texts_only = len(remaining) == 2 and not any(form_of(name) for name, _ in remaining)
    while remaining:
        name, weight = remaining.pop(0)
        if not _is_text(name) and not (texts_only and _may_be_text(name)):
            found.append((tuple((file,) for file in _expanded(name)), weight))
            continue
        refuse_other_compression(name)
        if not remaining:
            raise DataError(
                f"{name} is one file, but neither .tsv, .jsonl nor .parquet: give two parallel "
                "text files, the source's first, or rename the file."
            )
        partner, partner_weight = remaining.pop(0)
        if form_of(partner) or Path(partner).is_dir():
            raise DataError(f"{name} needs a parallel text file after it, got {partner}.")
        if None not in (weight, partner_weight) and weight != partner_weight:
            raise DataError(
                f"{name} and {partner} are one corpus, but have the weights {weight:g} and "
                f"{partner_weight:g}: give one."
            )
        sides = _expanded(name), _expanded(partner)
        if len(sides[0]) != len(sides[1]):
            raise DataError(
                f"{name} matches {len(sides[0])} files, {partner} {len(sides[1])}: parallel files "
                "must match."
            )
        sides = _parallel(name, partner, sides)
        weight = partner_weight if weight is None else weight
        found.append((tuple(zip(*sides, strict=True)), weight))
    if len(tags) > 1 and len(tags) != len(found):
        raise DataError(
            f"{len(tags)} tags ({' '.join(tags)}) for {len(found)} corpora: give one tag for all "
            "corpora, or one tag for each."
        )
    _require_a_weight([weight for _, weight in found])
    all_tags = list(tags) if len(tags) == len(found) else [*tags, None][:1] * len(found)
    return [
        Corpus(shards, tuple(columns), default_split, weight, tag)
        for (shards, weight), tag in zip(found, all_tags, strict=True)
    ]


def _parallel(
    source: str, target: str, sides: tuple[list[str], list[str]]
) -> tuple[list[str], list[str]]:
    """Order the files of the target as those of the source, by the texts that wildcards match.

    If the texts of both sides differ, the files are paired in alphabetical order.

    Raises:
        DataError: two files of a pair have different numbers, but other pairs have equal texts.
    """
    left, right = (
        [_matched_by_wildcards(name, file) for file in files]
        for name, files in zip((source, target), sides, strict=True)
    )
    if sorted(left) == sorted(right) and len(set(left)) == len(left):
        by_text = dict(zip(right, sides[1], strict=True))
        return sides[0], [by_text[text] for text in left]
    for source_text, target_text, *files in zip(left, right, *sides, strict=True):
        same_but_for_numbers = re.sub(r"\d+", "", source_text) == re.sub(r"\d+", "", target_text)
        if source_text != target_text and same_but_for_numbers and set(left) & set(right):
            raise DataError(
                f"{source} and {target} would pair {files[0]} with {files[1]}: look for a missing "
                "file, or list the files in pairs."
            )
    return sides


def _matched_by_wildcards(name: str, file: str) -> str:
    """Return the part of a file's name from the first wildcard to the last one."""
    start = re.search(r"[*?\[]", name)
    if not start or file == name:
        return ""
    end = len(name) - 1 - max(map(name.rfind, "*?]"))  # characters after the last wildcard
    return file[start.start() : len(file) - end]


def _weighted(word: str) -> tuple[str, float | None]:
    """Split FILE=WEIGHT, and read the weight as a number."""
    name, text = split_weight(word)
    if text is None:
        return name, None
    try:
        weight = float(text)
    except ValueError as error:
        raise DataError(
            f"{word}: {text!r} is not a weight: give a number after the =, or leave out the =."
        ) from error
    if not 0 <= weight < math.inf:
        raise DataError(f"{word}: a weight must be 0 or more, got {text}.")
    return name, weight


def _require_a_weight(weights: list[float | None]) -> None:
    if weights and all(weight == 0 for weight in weights):
        raise DataError("All weights are 0: give at least one corpus a weight above 0.")


def _is_text(name: str) -> bool:
    """Tell whether a name is a text file, which needs a parallel file as its partner."""
    if form_of(name) or Path(name).is_dir():
        return False
    return Path(name).exists() or name == "-" or bool(_matches(name))


def _may_be_text(name: str) -> bool:
    return not (form_of(name) or Path(name).is_dir() or {":", "@"} & set(name))


def _matches(name: str) -> list[str]:
    return sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else []


def _expanded(name: str) -> list[str]:
    if Path(name).exists() or not glob.has_magic(name):
        return [name]
    if found := _matches(name):
        return found
    place, configuration, split = data_set_name(name)
    if len(place) > 1 and not glob.has_magic(place + configuration) and "[" in split:
        return [name]  # part of a split, as in ID:train[:10%]
    raise DataError(f"No file matches {name}.")


def refuse_pipe(name: str) -> None:
    """Refuse standard input and pipes as training data.

    Raises:
        DataError: the name is "-", or that of something that is neither a file nor a folder.
    """
    path = Path(name)
    if name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        raise DataError(
            f"{name} can be read only once: training data must be files. Save it as a file first."
        )


def _content_of(name: str, is_file: bool, default_split: str) -> bytes:
    path = Path(name)
    refuse_pipe(name)
    if path.is_file():
        return content_of_file(path)
    if path.is_dir() and form_of(name):
        raise DataError(
            f"{name} is a folder, but its name ends like that of a file: name the files in it, as "
            f"in {name}/*{path.suffix}."
        )
    if is_file:
        may_be_id = not path.suffix and name.count("/") == 1
        hint = f" (two data sets of the Hub need splits, as in {name}:train)" if may_be_id else ""
        raise DataError(f"No such file: {name}{hint}")
    return _content_of_data_set(name, default_split)


def _content_of_data_set(name: str, default_split: str) -> bytes:
    rows = load_rows(name, default_split)
    digest = xxhash.xxh3_128(repr((len(rows), data_set_name(name).split)).encode())
    for file in rows.cache_files:
        digest.update(content_of_file(Path(file["filename"])))
    return digest.digest()


def content_of_file(path: Path) -> bytes:
    """Return a checksum of a file's bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.digest()


__all__ = ["Corpus", "content_of_file", "parse_corpora", "refuse_pipe", "tag_token", "tagged"]
