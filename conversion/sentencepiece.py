"""SentencePiece models (.model, .spm), as parts of tokenizers that split text the same way.

Models of type unigram and bpe can be converted, with their character table, their treatment of
spaces, user-defined symbols (unigram only) and byte fallback. Features that the tokenizers library
lacks are refused under the names of SentencePiece's options.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.utils import logging

from .errors import ConversionError, refuse

logger = logging.get_logger(__name__)

SPACE = "▁"
# Katakana of half width with a voicing mark, and the kana that they stand for.
_HALF_WIDTH = (chr(code) + mark for code in range(0xFF66, 0xFF9E) for mark in "ﾞﾟ")
_KANA = {
    parts: kana for parts in _HALF_WIDTH if len(kana := unicodedata.normalize("NFKC", parts)) == 1
}
# SentencePiece's numbers for types of models and types of pieces.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _USER_DEFINED, _UNUSED = 1, 4, 5
# Score of entries that are not pieces: worse than that of any text of known characters.
_UNREACHABLE = -1e9
_NO_ENTRY = "\uffff"  # stands for text without an entry: Unicode assigns it to no character


@dataclass(frozen=True)
class SentencePiece:
    """A model of SentencePiece: its pieces, and how it normalises text before splitting it.

    Args:
        path: its file.
        pieces: all pieces, control symbols included, in the order of their ids.
        scores: score of each piece that occurs in texts. User-defined symbols have the scores
            that the search of SentencePiece gives them.
        lowest_score: lowest score of a normal piece. Unknown characters get a score from it.
        bpe: whether the model merges byte pairs. Otherwise it finds the most probable pieces.
        byte_fallback: whether characters outside all pieces become bytes.
        charsmap: the compiled table of characters to replace.
        prefix, single_spaces: whether a space is put first, and whether runs of spaces become one.
        problems: features that the tokenizers library lacks.
    """

    path: Path
    pieces: list[str]
    scores: dict[str, float]
    lowest_score: float
    bpe: bool
    byte_fallback: bool
    charsmap: bytes
    prefix: bool
    single_spaces: bool
    problems: list[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Features without a counterpart are not refused here: see `problems`.

        Raises:
            ConversionError: the file is missing or damaged, or sentencepiece is not installed.
        """
        model = _parse(path)
        normal = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
        highest = max(normal.values())
        scores = normal | {
            # SentencePiece scores these above any sequence of pieces for the same text.
            piece.piece: len(piece.piece) * highest - 0.1
            for piece in model.pieces
            if piece.type == _USER_DEFINED
        }
        return cls(
            path=path,
            pieces=[piece.piece for piece in model.pieces],
            scores=scores,
            lowest_score=min(normal.values()),
            bpe=model.trainer_spec.model_type == _BPE,
            byte_fallback=model.trainer_spec.byte_fallback,
            charsmap=model.normalizer_spec.precompiled_charsmap,
            prefix=model.normalizer_spec.add_dummy_prefix,
            single_spaces=model.normalizer_spec.remove_extra_whitespaces,
            problems=_problems(model),
        )

    def normalizers(self) -> list[normalizers.Normalizer]:
        """List the steps that normalise a text before it is split."""
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            table = normalizers.Precompiled(self.charsmap)
            steps += [*_compositions(table, set("".join(self.pieces))), table]
        if self.single_spaces:
            steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(" ", SPACE))
        if self.prefix:
            steps.append(normalizers.Prepend(SPACE))
        return steps

    def model(self, vocabulary: dict[str, int], unknown: str, other_score: float) -> models.Model:
        """Make the model that splits normalised text into ids.

        Args:
            vocabulary: ids 0, 1, 2, ... of the pieces, the special tokens and any further entries.
            unknown: the token for characters outside all pieces.
            other_score: score of entries that are not pieces. Only unigram models have scores.
        """
        if self.bpe:
            return models.BPE(
                vocabulary,
                self._merges(),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=self.byte_fallback,
            )
        entries = sorted(vocabulary, key=vocabulary.__getitem__)
        return models.Unigram(
            [(entry, self.scores.get(entry, other_score)) for entry in entries],
            unk_id=vocabulary[unknown],
            byte_fallback=self.byte_fallback,
        )

    def _merges(self) -> list[tuple[str, str]]:
        """List the pairs of pieces that form a piece, in the order of the formed piece's score."""
        merges = [
            (score, piece[:cut], piece[cut:])
            for piece, score in self.scores.items()
            for cut in range(1, len(piece))
            if piece[:cut] in self.scores and piece[cut:] in self.scores
        ]
        merges.sort(key=lambda merge: -merge[0])
        return [(left, right) for _, left, right in merges]

    def split_inside(self, special: str) -> Regex | None:
        """Find a place to split a special token that occurs in a text, so that it stays text.

        SentencePiece reads it as text, although it is an entry of the vocabulary. The split must
        not go through a piece, nor through a run of unknown characters, which is one token.

        Returns:
            The part before the split, if the rest follows. None if there is no such place.
        """
        for place in range(1, len(special)):
            before, after = special[place - 1], special[place]
            known = before in self.scores or after in self.scores
            if known and not any(before + after in piece for piece in self.scores):
                return _first_part(special, place)
        return None


def piece_backend(
    model: SentencePiece, vocabulary: dict[str, int], special: Sequence[str], breaks: str = ""
) -> Tokenizer:
    """Split text as a model does, and look up its pieces in a vocabulary.

    Args:
        model: the model.
        vocabulary: ids 0, 1, 2, ... of its entries. It may hold more than the pieces.
        special: entries that count as plain text if they occur in a text, such as "<unk>".
        breaks: characters at which the caller splits text, for a character class.

    Raises:
        ConversionError: the tokenizers library lacks features that the model uses.
    """
    problems = list(model.problems)
    missing = sorted(model.scores.keys() - vocabulary.keys())
    if missing and model.bpe:
        problems.append(
            f"{len(missing)} pieces without an id, such as {missing[0]!r}, which merges need"
        )
    refuse(problems, str(model.path))
    if missing:
        logger.warning(
            f"{len(missing)} pieces of {model.path} have no id in the vocabulary and are not used, "
            f"such as {', '.join(map(repr, missing[:3]))}."
        )
    backend = Tokenizer(model.model(vocabulary, "<unk>", _UNREACHABLE))
    steps = model.normalizers()
    if not model.bpe:  # merges form pieces only
        further, split = _unknown_runs(model, vocabulary.keys() - set(special), breaks)
        steps += further
        parts = [model.split_inside(token) or _first_part(token, 1) for token in special]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, *(pre_tokenizers.Split(part, "merged_with_previous") for part in parts)]
        )
    backend.normalizer = normalizers.Sequence(steps)
    # SentencePiece removes the space that it put first, or all.
    first_spaces = r"\A +" if model.single_spaces else r"\A " if model.prefix else ""
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Replace(Regex(first_spaces), "")] if first_spaces else []),
        ]
    )
    return backend


def _unknown_runs(
    model: SentencePiece, entries: Iterable[str], breaks: str
) -> tuple[list[normalizers.Normalizer], pre_tokenizers.PreTokenizer]:
    """Make the steps that look up a run of characters outside all pieces as one token.

    A unigram model of the tokenizers library would find entries inside such a run, or across
    its ends. With byte fallback, or with user-defined symbols of other characters, entries inside a
    run are still found.

    Args:
        entries: entries of the vocabulary that a text may contain.
        breaks: characters that belong to no run, for a character class.

    Returns:
        steps after `normalizers`, and the split that keeps runs apart.
    """
    known = {piece for piece in model.scores if len(piece) == 1}
    outside = f"[^{''.join(map(re.escape, sorted(known)))}{breaks}]"
    # User-defined symbols may contain characters that are outside all other pieces.
    symbols = [piece for piece in model.scores if not known.issuperset(piece)]
    if symbols:
        symbol = _any_of(symbols)
        run = f"{symbol}|(?:(?!{symbol}){outside})+"
        return [], pre_tokenizers.Split(Regex(run), "isolated")
    split = pre_tokenizers.Split(Regex(f"{outside}+"), "isolated")
    if model.byte_fallback:
        return [], split
    runs = [entry for entry in entries if len(entry) > 1 and known.isdisjoint(entry)]
    is_entry = f"(?!{_any_of(runs)}(?!{outside}))" if runs else ""
    without = f"(?<!{outside})(?={outside}{{2}}){is_entry}{outside}+"
    return [normalizers.Replace(Regex(without), _NO_ENTRY)], split


def _any_of(texts: Sequence[str]) -> str:
    """Match one of several texts, the longest that is possible."""
    return f"(?:{'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})"


def _first_part(token: str, place: int) -> Regex:
    """Match the characters of a token up to a place, if the others follow."""
    return Regex(f"{re.escape(token[:place])}(?={re.escape(token[place:])})")


def _parse(path: Path) -> Any:
    """Parse the protocol buffer of a model.

    Raises:
        ConversionError: as `SentencePiece.read`.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConversionError(
            f"{path} needs sentencepiece and protobuf ({error}): pip install 'vaswani[convert]'."
        ) from error
    if not path.is_file():
        raise ConversionError(f"There is no file {path}.")
    try:
        # The module makes its classes during the import, where mypy cannot see them.
        model = sentencepiece_model_pb2.ModelProto.FromString(  # type: ignore[attr-defined]
            path.read_bytes()
        )
        scores = [piece.score for piece in model.pieces if piece.piece and piece.type == _NORMAL]
    except (DecodeError, UnicodeDecodeError, OSError) as error:
        raise ConversionError(f"{path} is not a complete SentencePiece model: {error}.") from error
    try:
        if charsmap := model.normalizer_spec.precompiled_charsmap:
            normalizers.Precompiled(charsmap)
    except Exception as error:  # the tokenizers library raises the bare class
        raise ConversionError(f"{path} is not a complete SentencePiece model: {error}.") from error
    # A file that ends between two pieces still parses. The options come after the pieces.
    complete = model.HasField("trainer_spec") and model.HasField("normalizer_spec")
    if not complete or not scores or not all(map(math.isfinite, scores)):
        raise ConversionError(f"{path} is not a complete SentencePiece model.")
    return model


def _compositions(
    table: normalizers.Precompiled, characters: set[str]
) -> list[normalizers.Normalizer]:
    """List the steps that compose characters, which SentencePiece does by its table.

    The tokenizers library looks up the shortest match in the table, or single characters.
    """
    steps: list[normalizers.Normalizer] = []
    if table.normalize_str("e\u0301") == "é":
        steps.append(normalizers.NFC())
    if table.normalize_str("ｶ") == "カ" and characters & set(_KANA.values()):
        steps += [normalizers.Replace(parts, kana) for parts, kana in _KANA.items()]
    return steps


def _problems(model: Any) -> list[str]:
    """List the features that the tokenizers library lacks, by SentencePiece's names."""
    trainer, kinds = model.trainer_spec, {piece.type for piece in model.pieces}
    problems = []
    if trainer.model_type not in (_UNIGRAM, _BPE):
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        problems.append(f"model_type {kind} (it has to be unigram or bpe)")
    if trainer.treat_whitespace_as_suffix:
        problems.append("treat_whitespace_as_suffix")
    if not model.normalizer_spec.escape_whitespaces:
        problems.append("escape_whitespaces false")
    if model.denormalizer_spec.precompiled_charsmap:
        problems.append("denormalization_rule_tsv")
    if trainer.model_type == _BPE:
        own = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
        problems += [f"user_defined_symbols of type bpe, such as {own[0]!r}"] if own else []
        problems += ["unused pieces of type bpe"] if _UNUSED in kinds else []
    return problems


__all__ = ["SPACE", "SentencePiece", "piece_backend"]
