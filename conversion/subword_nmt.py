"""Text between spaces: looked up as it stands there, or cut before by subword-nmt's codes.

`word_backend` is for texts that other tools have cut. `read_codes` reads codes of subword-nmt or
fastBPE, and `pair_backend` cuts words by them as `subword-nmt apply-bpe` does, which writes "@@"
where a word goes on: "hou@@ se".
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .checkpoints import refuse
from .files import read_text
from .rules import ConversionError

# What str.split takes for a space, inside a character class; Oniguruma's \s lacks 1C to 1F.
SPACES = r"\s\x1c-\x1f"
_UNKNOWN = "<unk>"
# Ends a word of subword-nmt's oldest codes, where the end is a symbol of its own, and seals it.
_END, _SEAL, _NEITHER = "\ue000", "\ue001", "\ue002"


@dataclass
class Codes:
    """The merges of byte-pair encoding.

    Args:
        pairs: the first is merged first. A symbol at the end of a word has "</w>" behind it.
        separate_end: that mark starts as a symbol of its own (subword-nmt until 2017).
    """

    pairs: list[tuple[str, str]]
    separate_end: bool


def read_codes(path: Path) -> Codes:
    """Read the codes of subword-nmt, or those of fastBPE, which have counts.

    Raises:
        ConversionError: they are neither, or of an unknown version.
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
    """Look up what stands between spaces; what has no entry, or is special, is "<unk>".

    Args:
        ids: the vocabulary.
        special: its entries that no text has, "<unk>" among them.
        remove_bpe: join when decoding what "@@ " separates.
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
    """Decode tokens to a text with a space between any two."""
    # This decoder joins by a space whatever does not start with its prefix: here, every token.
    return decoders.WordPiece(prefix=" ", cleanup=False)


def pair_backend(ids: dict[str, int], special: Collection[str], codes: Codes) -> Tokenizer:
    """Cut words into characters, merge pairs, and look up what comes of it.

    Merges need symbols that the vocabulary lacks: these get numbers behind its own.

    Args:
        ids: the vocabulary, as texts are written once they are cut.
        special: its entries that no text has, "<unk>" among them.
        codes: what is merged.

    Raises:
        ConversionError: an entry stands for two symbols, or codes are in an order that training
            does not make.
    """
    pairs, end = codes.pairs, "</w>"
    if codes.separate_end:
        pairs, end = _sealed(pairs, ids), _END + _SEAL
    vocabulary = _symbols(ids, special, pairs, end)
    suffix = {} if codes.separate_end else {"end_of_word_suffix": end}
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token=_UNKNOWN, **suffix))
    if codes.separate_end:
        backend.normalizer = normalizers.Sequence(
            [
                normalizers.Replace(Regex(f"[{_END}{_SEAL}]"), _NEITHER),
                normalizers.Replace(Regex(rf"(?<=[^{SPACES}])(?=[{SPACES}]|\z)"), end),
            ]
        )
    backend.pre_tokenizer = _between_spaces()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(rf"\A{_UNKNOWN}\z"), _UNKNOWN + end),
            decoders.Replace(Regex(rf"{end}\z"), " "),
            decoders.Fuse(),
            # decoders.Strip panics where nothing is left to strip from.
            decoders.Replace(Regex(r" \z"), ""),
        ]
    )
    return backend


def _between_spaces() -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(f"[{SPACES}]+"), "removed")


def _symbols(
    ids: dict[str, int], special: Collection[str], pairs: list[tuple[str, str]], end: str
) -> dict[str, int]:
    """The vocabulary as the codes write it, and behind it what else they merge."""
    made = {left + right for left, right in pairs}
    symbols: dict[str, int] = {}
    problems = []
    for entry, index in ids.items():
        # Where a word goes on, the tools write "@@" and the codes nothing; where it ends, the codes
        # write "</w>" and the tools nothing.
        inside = entry.endswith("@@") and len(entry) > 2
        symbol = entry[:-2] if inside else entry + end
        if entry in special:
            symbol = entry
        if symbol in symbols or (inside and entry + end in made):
            problems.append(f"the entry {entry!r} (it stands for two symbols of the codes)")
        symbols[symbol] = index
    # The first rank at which a symbol is part of a pair.
    used: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        for symbol in pair:
            used.setdefault(symbol, rank)
    problems += [
        f"the code {left} {right} (its result is merged by an earlier one)"
        for rank, (left, right) in enumerate(pairs)
        if used.get(left + right, rank) < rank
    ]
    refuse(problems, "The byte-pair encoding")
    for left, right in pairs:
        for symbol in (left, right, left + right):
            symbols.setdefault(symbol, len(symbols))
    return symbols


def _sealed(pairs: list[tuple[str, str]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs with _END for "</w>", and behind them those that put a seal on the end of a word.

    subword-nmt drops an end that was not merged, and the symbol before it becomes the last. Here
    all last symbols get end and seal, when nothing else is left to merge.
    """
    ended = [
        (left, right.removesuffix("</w>") + _END if right.endswith("</w>") else right)
        for left, right in pairs
    ]
    symbols = dict.fromkeys(
        symbol for left, right in ended for symbol in (left, right, left + right) if symbol != _END
    )
    # Characters that no pair has, and what is unknown.
    symbols |= dict.fromkeys(c for entry in ids if len(c := entry.removesuffix("@@")) == 1)
    symbols[_UNKNOWN] = None
    seals = [(_END, _SEAL)]
    for symbol in symbols:
        seals.append((symbol, _SEAL) if symbol.endswith(_END) else (symbol, _END + _SEAL))
    return ended + seals
