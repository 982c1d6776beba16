"""The installed fonts that have the characters of labels."""

import contextlib
import functools
import unicodedata
import warnings
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from .labels import escaped, shortened


def drawable(labels: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return labels that can be drawn, and the font families for them, in order of preference.

    matplotlib's `font.family` comes first, then the fewest installed families with the missing
    characters. A character without a font is shown by its escape, with one warning for all.
    """
    labels = list(labels)
    families = list(matplotlib.rcParams["font.family"])
    missing = set("".join(labels))
    for family in families:
        path = font_manager.findfont(font_manager.FontProperties(family=[family]))
        missing -= _covered(missing, path)
    more, lacking = _further_families(frozenset(missing))
    if lacking:
        names = ", ".join(repr(character) for character in sorted(lacking)[:5])
        names += " ..." if len(lacking) > 5 else ""
        warnings.warn(
            f"No installed font has {names}: they are shown by escapes such as "
            f"{escaped(min(lacking))}. Install a font with these characters, such as Noto Sans or "
            "Noto Sans CJK.",
            stacklevel=4,
        )
    shown = [
        "".join(escaped(character) if character in lacking else character for character in label)
        for label in labels
    ]
    return [shortened(label) for label in shown], families + list(more)


def _covered(characters: AbstractSet[str], path: font_manager.FontPath) -> frozenset[str]:
    """Return those of `characters` that a font file has, without its fallback fonts."""
    font = FT2Font(path.path, face_index=path.face_index)
    return frozenset(c for c in characters if font.get_char_index(ord(c)))


@functools.lru_cache(maxsize=64)
def _further_families(missing: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return installed families for characters, and the characters that no family has."""
    covered: dict[str, frozenset[str]] = {}
    for entry in font_manager.fontManager.ttflist if missing else []:
        if entry.style != "normal" or entry.name in covered or "Last Resort" in entry.name:
            continue  # Last Resort has a box for every character
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


__all__ = ["drawable"]
