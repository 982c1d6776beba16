"""Marian's vocabularies: in YAML, in JSON, or inside a SentencePiece model."""

from collections.abc import Iterator
from pathlib import Path

from .errors import ConversionError
from .reading import is_text, parse_yaml, read_json, read_text
from .sentencepiece import SentencePiece


def is_sentencepiece(path: Path) -> bool:
    """Tell whether a vocabulary is a SentencePiece model."""
    return path.suffix == ".spm"


def read_vocabulary(path: Path, needed: tuple[str, ...] = ("</s>", "<unk>")) -> dict[str, int]:
    """Read the tokens of a vocabulary with their ids.

    Args:
        path: the file.
        needed: tokens that the vocabulary must have.

    Raises:
        ConversionError: the file cannot be read, its ids are not 0, 1, 2, ..., or a needed token is
            missing.
    """
    if is_sentencepiece(path):
        pieces = SentencePiece.read(path).pieces
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
    else:
        vocabulary = read_json(path) if path.suffix == ".json" else dict(_entries(path))
    if not is_text(vocabulary):
        raise ConversionError(f"{path} has a token that is not valid text.")
    if missing := [token for token in needed if token not in vocabulary]:
        raise ConversionError(f"{path} lacks {', '.join(missing)}.")
    if {*map(repr, vocabulary.values())} != {*map(repr, range(len(vocabulary)))}:
        raise ConversionError(f"The ids of {path} are not 0 to {len(vocabulary) - 1}, each once.")
    return vocabulary


def _entries(path: Path) -> Iterator[tuple[str, int]]:
    """Read the lines "token: id".

    A YAML parser would split tokens at rare characters and lose some of them.
    """
    key = None
    # splitlines would split at U+0085 and others, which may be tokens.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or line in ("---", "..."):
            continue
        if key is None and line.startswith("? "):
            key = line[2:]
            continue
        token, colon, value = line.rpartition(":")
        if key is not None:
            token, key = key, None
        if not colon or not value.strip().isdecimal():
            raise ConversionError(f"{path}, line {number} is not 'token: id': {line!r}.")
        yield _unquoted(token, f"{path}, line {number}"), int(value)


def _unquoted(token: str, place: str) -> str:
    token = token.strip(" ")
    if len(token) > 1 and token[0] == token[-1] and token[0] in "\"'":
        return str(parse_yaml(token, place))
    return token


__all__ = ["is_sentencepiece", "read_vocabulary"]
