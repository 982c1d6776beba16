"""fairseq's dictionaries, and tokenizers that give the same token ids."""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers.utils import logging

from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .errors import ConversionError
from .reading import read_text
from .sentencepiece import SentencePiece, piece_backend
from .subword_nmt import SPACES, Codes, pair_backend, read_codes, word_backend

logger = logging.get_logger(__name__)

BOS, PAD, EOS, UNK = range(4)
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


@dataclass
class Vocabulary:
    """A dictionary, and how text is split into its entries.

    Args:
        symbols: entries, in the order of their ids.
        codes: codes of byte-pair encoding, if any.
        pieces: SentencePiece model, if any.
        remove_bpe: join tokens at "@@ " when decoding.
    """

    symbols: list[str]
    codes: Codes | None
    pieces: SentencePiece | None
    remove_bpe: bool

    def tokenizer(self) -> VaswaniTokenizer:
        """Make the tokenizer.

        Raises:
            ConversionError: it could not always split text as fairseq's tools do.
        """
        last_index = {symbol: index for index, symbol in enumerate(self.symbols)}
        # A later line may replace an entry. The earlier one then gets a name that no text contains.
        ids = {
            symbol if last_index[symbol] == index else f"{symbol} {index}": index
            for index, symbol in enumerate(self.symbols)
        }
        if self.pieces is not None:
            backend = _piece_backend(ids, self.pieces)
        elif self.codes is not None:
            backend = pair_backend(ids, _SPECIAL, self.codes)
        else:
            backend = word_backend(ids, _SPECIAL, self.remove_bpe)
        made = VaswaniTokenizer.from_backend(backend)
        made.add_special_tokens({"bos_token": _SPECIAL[BOS]})
        if len(made) > len(self.symbols):
            made.init_kwargs["unknown_from"] = len(self.symbols)
        if self.codes is not None or self.remove_bpe:
            made.init_kwargs["unknown_ends_word"] = True
        return made


def read_vocabulary(
    dictionary: str | Path, codes: str | Path | None, pieces: str | Path | None, remove_bpe: bool
) -> Vocabulary:
    """Read a dictionary and its codes, if any.

    Raises:
        ConversionError: a file is missing or damaged, both codes and pieces are given, or the
            dictionary does not fit the codes or the pieces.
    """
    if codes and pieces:
        raise ConversionError(f"Text is split by {codes} or by {pieces}, not by both.")
    symbols = read_dictionary(Path(dictionary))
    merges = read_codes(Path(codes)) if codes else None
    if merges is not None:
        _check_entries(symbols, _entries_of(merges), f"{dictionary} cannot come from {codes}")
    model = SentencePiece.read(Path(pieces)) if pieces else None
    if model is not None:
        _check_entries(symbols, set(model.pieces), f"{dictionary} cannot come from {pieces}")
    return Vocabulary(symbols, merges, model, remove_bpe)


def _entries_of(codes: Codes) -> set[str]:
    """Return the entries of several letters that text has after it is split by these codes."""
    merged = {left + right for left, right in codes.pairs}
    inside = {f"{symbol}@@" for symbol in merged if not symbol.endswith("</w>")}
    at_end = {symbol.removesuffix("</w>") for symbol in merged if symbol.endswith("</w>")}
    # If "</w>" is a separate symbol, any symbol can end a word without a merge.
    return inside | at_end | (merged if codes.separate_end else set())


def _check_entries(symbols: list[str], possible: set[str], complaint: str) -> None:
    """Refuse a dictionary with no possible entry, and warn if most entries are impossible.

    Single letters and fillers are always possible.
    """
    entries = [
        entry
        for entry in symbols[len(_SPECIAL) :]
        if len(entry.removesuffix("@@")) > 1 and not entry.startswith("madeupword")
    ]
    impossible = [entry for entry in entries if entry not in possible]
    if 2 * len(impossible) <= len(entries):
        return
    counts = f"{len(impossible)} of {len(entries)} entries, such as {impossible[0]!r}, of"
    if len(impossible) == len(entries):
        raise ConversionError(
            f"{counts} {complaint}: pass the file that split the text for fairseq, or convert "
            "without such a file, and split the text yourself."
        )
    logger.warning(
        f"{counts} {complaint}. If another file split the text for fairseq, many words will be "
        "unknown tokens: pass that file."
    )


def read_dictionary(path: Path) -> list[str]:
    """Read the entries of dict.xx.txt, after the special tokens.

    Raises:
        ConversionError: fairseq could not read the file either, or the file replaces a special
            token.
    """
    symbols = list(_SPECIAL)
    known = set(symbols)
    text = re.sub("\r\n?", "\n", read_text(path)).removesuffix("\n")
    for number, line in enumerate(text.split("\n"), start=1):
        word, _, count = line.rstrip().rpartition(" ")
        replaces = count == "#fairseq:overwrite"
        if replaces:
            word, _, count = word.rpartition(" ")
        if not re.fullmatch(r"[+-]?\d+", count):
            raise ConversionError(
                f"{path}, line {number} is not an entry with its count: {line!r}."
            )
        if word in known and (word in _SPECIAL or not replaces):
            raise ConversionError(f"{path}, line {number}: there is an entry {word!r} already.")
        known.add(word)
        symbols.append(word)
    return symbols


def _piece_backend(ids: dict[str, int], model: SentencePiece) -> Tokenizer:
    """Split text with SentencePiece, and look up the pieces.

    Pieces that the dictionary lacks get ids after its own.
    """
    vocabulary = dict(ids)
    for piece in sorted(set(model.pieces)):
        vocabulary.setdefault(piece, len(vocabulary))
    backend = piece_backend(model, vocabulary, _SPECIAL, breaks=SPACES)
    # fairseq splits the joined pieces at white space once more.
    steps = [pre_tokenizers.Split(Regex(f"[{SPACES}]+"), "removed"), backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step])
    return backend


__all__ = ["BOS", "EOS", "PAD", "UNK", "Vocabulary", "read_dictionary", "read_vocabulary"]
