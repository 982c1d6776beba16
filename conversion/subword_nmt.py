"""Tokenizers for tokens between spaces, with or without the byte-pair codes of subword-nmt.

`word_backend` looks up tokens that other tools have split. `read_codes` reads the codes of
subword-nmt or fastBPE. `pair_backend` splits words by these codes as `subword-nmt apply-bpe` does,
whose output has "@@" inside a word: "hou@@ se".
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..corpora.bpe_dropout import SEAL
from .errors import ConversionError, refuse
from .reading import read_text

# The spaces of str.split, for a character class: Oniguruma's \s lacks 1C to 1F.
SPACES = r"\s\x1c-\x1f"
_UNKNOWN = "<unk>"
# In subword-nmt's oldest codes, the end of a word is a symbol of its own. _END stands for that
# symbol, and SEAL closes the word. _NEITHER replaces either character in a text.
_END, _NEITHER = "\ue000", "\ue002"


@dataclass
class Codes:
    """The merges of byte-pair encoding.

    Args:
        pairs: merged pairs, in the order of merging. A symbol at the end of a word ends in "</w>".
        separate_end: whether "</w>" starts as a symbol of its own (subword-nmt until 2017).
    """

    pairs: list[tuple[str, str]]
    separate_end: bool


def read_codes(path: Path) -> Codes:
    """Read the codes of subword-nmt, or those of fastBPE, which have counts.

    Raises:
        ConversionError: the file holds something else, or codes of an unknown version.
    """
    lines = read_text(path).rstrip("\n").split("\n")
    version = None
    if lines[0].startswith("#version:"):
        version = lines.pop(0).removeprefix("#version:").strip()
        if version not in ("0.1", "0.2"):
            raise ConversionError(f"{path} has the unknown version {version!r}.")
    fields = [line.strip("\r\n ").split(" ") for line in lines]
    counted = version is None and all(len(f) == 3 and f[2].isdecimal() for f in fields)
    for line, pair in zip(lines, fields, strict=True):
        if len(pair) != 2 + counted:
            raise ConversionError(f"{path} holds {line!r}, which is not a pair of symbols.")
    pairs = list(dict.fromkeys((pair[0], pair[1]) for pair in fields))
    return Codes(pairs, separate_end=version != "0.2" and not counted)


def word_backend(ids: dict[str, int], special: Collection[str], remove_bpe: bool) -> Tokenizer:
    """Look up tokens between spaces. Special tokens and unknown ones become "<unk>".

    Args:
        ids: the vocabulary.
        special: entries that no text may stand for, such as "<unk>".
        remove_bpe: join tokens at "@@ " when decoding.
    """
    backend = Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN))
    control = "|".join(token for token in special if token != _UNKNOWN)
    backend.normalizer = normalizers.Replace(
        Regex(rf"(?<![^{SPACES}])(?:{control})(?![^{SPACES}])"), _UNKNOWN
    )
    backend.pre_tokenizer = _between_spaces()
    steps: list[Any] = [joined_by_spaces(), decoders.Fuse()]
    if remove_bpe:
        steps.append(decoders.Replace(Regex(r"@@(?: |\z)"), ""))
    backend.decoder = decoders.Sequence(steps)
    return backend


def joined_by_spaces() -> decoders.WordPiece:
    """Make a decoder that puts a space between all tokens."""
    # WordPiece puts a space before tokens without the prefix. No token here starts with a space.
    return decoders.WordPiece(prefix=" ", cleanup=False)


def pair_backend(ids: dict[str, int], special: Collection[str], codes: Codes) -> Tokenizer:
    """Split words into characters, merge pairs, and look up the symbols.

    Symbols that only the merges need get ids after those of the vocabulary.

    Args:
        ids: the vocabulary, in the notation with "@@".
        special: entries that no text may stand for, such as "<unk>".
        codes: the merges.

    Raises:
        ConversionError: an entry stands for two symbols, or training cannot have produced the
            codes in this order.
    """
    pairs, end = codes.pairs, "</w>"
    if codes.separate_end:
        pairs, end = _sealed(pairs, ids), _END + SEAL
    vocabulary = _symbol_ids(ids, special, pairs, end)
    suffix = {} if codes.separate_end else {"end_of_word_suffix": end}
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token=_UNKNOWN, **suffix))
    if codes.separate_end:
        backend.normalizer = normalizers.Sequence(
            [
                normalizers.Replace(Regex(f"[{_END}{SEAL}]"), _NEITHER),
                normalizers.Replace(Regex(rf"(?<=[^{SPACES}])(?=[{SPACES}]|\z)"), end),
            ]
        )
    backend.pre_tokenizer = _between_spaces()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(rf"\A{_UNKNOWN}\z"), _UNKNOWN + end),
            decoders.Replace(Regex(rf"{end}\z"), " "),
            decoders.Fuse(),
            # decoders.Strip panics on empty text.
            decoders.Replace(Regex(r" \z"), ""),
        ]
    )
    return backend


def _between_spaces() -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(f"[{SPACES}]+"), "removed")


def _symbol_ids(
    ids: dict[str, int], special: Collection[str], pairs: list[tuple[str, str]], end: str
) -> dict[str, int]:
    """Translate the vocabulary into the notation of the codes, and add the symbols it lacks."""
    merged = {left + right for left, right in pairs}
    symbols: dict[str, int] = {}
    problems = []
    for entry, index in ids.items():
        # The vocabulary marks symbols inside a word by "@@", the codes those at its end by "</w>".
        inside = entry.endswith("@@") and len(entry) > 2
        symbol = entry[:-2] if inside else entry + end
        if entry in special:
            symbol = entry
        if symbol in symbols or (inside and entry + end in merged):
            problems.append(f"the entry {entry!r} (it stands for two symbols of the codes)")
        symbols[symbol] = index
    first_use: dict[str, int] = {}  # the first rank at which a symbol is part of a pair
    for rank, pair in enumerate(pairs):
        for symbol in pair:
            first_use.setdefault(symbol, rank)
    problems += [
        f"the code {left} {right} (an earlier code merges its result)"
        for rank, (left, right) in enumerate(pairs)
        if first_use.get(left + right, rank) < rank
    ]
    refuse(problems, "The byte-pair encoding")
    for left, right in pairs:
        for symbol in (left, right, left + right):
            symbols.setdefault(symbol, len(symbols))
    return symbols


def _sealed(pairs: list[tuple[str, str]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Write _END for "</w>", and add pairs that close every word with _END and SEAL.

    subword-nmt drops a "</w>" that was not merged, so that the symbol before it becomes the last of
    the word. The added pairs come last: they give all last symbols the same form.
    """
    ended = [
        (left, right.removesuffix("</w>") + _END if right.endswith("</w>") else right)
        for left, right in pairs
    ]
    symbols = dict.fromkeys(
        symbol for left, right in ended for symbol in (left, right, left + right) if symbol != _END
    )
    # Characters outside all pairs, and the unknown token.
    symbols |= dict.fromkeys(c for entry in ids if len(c := entry.removesuffix("@@")) == 1)
    symbols[_UNKNOWN] = None
    seals = [(_END, SEAL)]
    for symbol in symbols:
        seals.append((symbol, SEAL) if symbol.endswith(_END) else (symbol, _END + SEAL))
    return ended + seals


__all__ = ["SPACES", "Codes", "joined_by_spaces", "pair_backend", "read_codes", "word_backend"]
