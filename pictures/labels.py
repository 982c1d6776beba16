"""Tokens as labels that can be read."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_SPACE, _LONE_SPACE, _JOIN = "·", "␣", "‿"
_LONGEST = 24
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Invisible characters that shape the letters around them.
_JOINERS = "\u200c\u200d"


def token_labels(ids: Sequence[int], tokenizer: Any) -> list[str]:
    r"""Return a label for each token: "·" is a space, "‿" joins the token to its neighbour.

    For example, "▁house" is "·house", "hou@@" is "hou‿" and "##se" is "‿se". Bytes are shown as
    their character with a number ("é₁", "é₂"), or by their value. Invisible characters are shown by
    their escape ("\n"). Special tokens stay as they are.

    Raises:
        ValueError: the tokenizer lacks one of the tokens.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    for index, token in zip(ids, tokens, strict=True):
        if token is None:
            raise ValueError(
                f"The tokenizer ({len(tokenizer)} entries) has no token {index}: check that "
                "tokenizer and model belong together."
            )
    metaspace = any(entry.startswith("▁") for entry in tokenizer.get_vocab())
    specials = set(tokenizer.all_special_tokens)
    labels: list[str] = []
    run: list[int] = []  # values of consecutive byte tokens
    for token in tokens:
        if byte := _BYTE.fullmatch(token):
            run.append(int(byte[1], 16))
            continue
        labels += _byte_labels(bytes(run))
        run = []
        labels.append(token if token in specials else _readable(_unmarked(token, metaspace)))
    return labels + _byte_labels(bytes(run))


def _unmarked(token: str, metaspace: bool) -> str:
    """Replace the marks of the vocabulary by those of labels."""
    if metaspace:
        return token.replace("▁", " ").replace("▂1", "▁").replace("▂2", "▂")
    if len(token) > 2 and token.startswith("##"):
        return _JOIN + token[2:]
    if len(token) > 2 and token.endswith("@@"):
        return token[:-2] + _JOIN
    return token.replace("￭", _JOIN)


def _byte_labels(run: bytes) -> list[str]:
    labels: list[str] = []
    while len(labels) < len(run):
        remaining = run[len(labels) :]
        for length in range(1, 5):
            try:
                character = _readable(remaining[:length].decode("utf-8"))
            except UnicodeDecodeError:
                continue
            numbers = [""] if length == 1 else [chr(ord("₁") + place) for place in range(length)]
            labels += [character + number for number in numbers]
            break
        else:
            labels.append(f"0x{remaining[0]:02X}")
    return labels


def _readable(text: str) -> str:
    """Make all characters visible, and shorten the text."""
    if text.strip(" ") == "":
        return _LONE_SPACE * len(text)
    shown = "".join(
        _SPACE
        if character == " "
        else character
        if character.isprintable() or (character in _JOINERS and len(text) > 1)
        else escaped(character)
        for character in text
    )
    if unicodedata.category(shown[0]).startswith("M"):
        shown = "◌" + shown  # a combining accent needs a base
    return shortened(shown)


def shortened(label: str) -> str:
    """Return a label of at most 24 characters, with its middle left out."""
    half = _LONGEST // 2
    return label if len(label) <= _LONGEST else f"{label[: half - 1]}…{label[-half:]}"


def escaped(character: str) -> str:
    """Return the escape sequence of a character."""
    return character.encode("unicode_escape").decode()


__all__ = ["escaped", "shortened", "token_labels"]
