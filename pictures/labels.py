"""Tokens as labels that can be read, and the fonts that have their characters."""

import contextlib
import functools
import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

_SPACE, _LONE_SPACE, _JOIN = "·", "␣", "‿"
_LONGEST = 24
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Invisible, but they shape the letters around them.
_JOINERS = "\u200c\u200d"


def token_labels(ids: Sequence[int], tokenizer: Any) -> list[str]:
    r"""One label a token: "·" where it has a space, "‿" where it is tied to the one beside it.

    So "▁house" is "·house", "hou@@" is "hou‿" and "##se" is "‿se". Bytes are shown as the character
    that they make up, numbered ("é₁", "é₂"), or by their value; invisible characters by their
    escape ("\n"). Special tokens stay as they are.

    Raises:
        ValueError: the tokenizer has no such token.
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
    run: list[int] = []  # bytes so far of tokens that stand for one byte each
    for token in tokens:
        if byte := _BYTE.fullmatch(token):
            run.append(int(byte[1], 16))
            continue
        labels += _byte_labels(bytes(run))
        run = []
        labels.append(token if token in specials else _readable(_unmarked(token, metaspace)))
    return labels + _byte_labels(bytes(run))


def _unmarked(token: str, metaspace: bool) -> str:
    """A token with the marks of its vocabulary replaced by ours."""
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
        rest = run[len(labels) :]
        for length in range(1, 5):
            try:
                character = _readable(rest[:length].decode("utf-8"))
            except UnicodeDecodeError:
                continue
            numbers = [""] if length == 1 else [chr(ord("₁") + place) for place in range(length)]
            labels += [character + number for number in numbers]
            break
        else:
            labels.append(f"0x{rest[0]:02X}")
    return labels


def _readable(text: str) -> str:
    """Text with all of it visible, and not too long."""
    if text.strip(" ") == "":
        return _LONE_SPACE * len(text)
    shown = "".join(
        _SPACE
        if character == " "
        else character
        if character.isprintable() or (character in _JOINERS and len(text) > 1)
        else _escape(character)
        for character in text
    )
    if unicodedata.category(shown[0]).startswith("M"):
        shown = "◌" + shown  # an accent needs something to stand on
    return _shortened(shown)


def _shortened(label: str) -> str:
    half = _LONGEST // 2
    return label if len(label) <= _LONGEST else f"{label[: half - 1]}…{label[-half:]}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def drawable(labels: Iterable[str]) -> tuple[list[str], list[str]]:
    """Labels that can be drawn, and the font families to draw them with, in order of preference.

    matplotlib's `font.family` comes first, then the fewest installed families that have the rest.
    A character that no font has is shown by its escape, and one warning names them.
    """
    labels = list(labels)
    families = list(matplotlib.rcParams["font.family"])
    missing = set("".join(labels))
    for family in families:
        path = font_manager.findfont(font_manager.FontProperties(family=[family]))
        missing -= _covered(missing, path)
    more, lacking = _further_families(frozenset(missing))
    if lacking:
        some = ", ".join(repr(character) for character in sorted(lacking)[:5])
        warnings.warn(
            f"No installed font has {some}{' ...' if len(lacking) > 5 else ''}: they are shown as "
            f"{_escape(min(lacking))} and the like. Install one that has, such as Noto Sans or "
            "Noto Sans CJK.",
            stacklevel=4,
        )
    shown = [
        "".join(_escape(character) if character in lacking else character for character in label)
        for label in labels
    ]
    return [_shortened(label) for label in shown], families + list(more)


def _covered(characters: AbstractSet[str], path: font_manager.FontPath) -> frozenset[str]:
    """Those of `characters` that a font file has itself, without what stands in for it."""
    font = FT2Font(path.path, face_index=path.face_index)
    return frozenset(c for c in characters if font.get_char_index(ord(c)))


@functools.lru_cache(maxsize=64)
def _further_families(missing: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Installed families for characters, and the characters that none has."""
    covered: dict[str, frozenset[str]] = {}
    for entry in font_manager.fontManager.ttflist if missing else []:
        if entry.style != "normal" or entry.name in covered or "Last Resort" in entry.name:
            continue  # the last has a box for everything
        with contextlib.suppress(OSError, RuntimeError):  # a font that was removed or is damaged
            path = font_manager.FontPath(entry.fname, entry.index)
            covered[entry.name] = _covered(missing, path)
    # Chinese, Japanese and Korean fonts have the same characters in different shapes.
    names = [unicodedata.name(character, "") for character in missing]
    region = "SC"
    for script, variant in (("HANGUL", "KR"), ("HIRAGANA", "JP"), ("KATAKANA", "JP")):
        if any(name.startswith(script) for name in names):
            region = variant

    def merit(family: str) -> tuple[int, bool, bool, bool, str]:
        return (
            len(covered[family] & missing),
            family.endswith(region),
            "Sans" in family and "Mono" not in family,
            family.startswith("Noto"),
            family,
        )

    families: list[str] = []
    while missing and covered:
        best = max(covered, key=merit)
        if not covered[best] & missing:
            break
        families.append(best)
        missing -= covered[best]
    return tuple(families), missing
