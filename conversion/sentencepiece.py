"""SentencePiece's models (.model, .spm): read, and made parts of tokenizers that cut text alike.

Models of type unigram and bpe can be had, with their table of characters, their treatment of
spaces, symbols of the user's own (unigram) and bytes for characters that no piece has. What the
tokenizers library cannot do is listed by its name in SentencePiece's options.
"""

import importlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.utils import logging

from .checkpoints import refuse
from .rules import ConversionError

logger = logging.get_logger(__name__)

SPACE = "▁"
# Types of models, and of pieces.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _USER_DEFINED, _UNUSED = 1, 4, 5
# Score of entries that SentencePiece would not choose: worse than any text of those it would.
_UNREACHABLE = -1e9


@dataclass(frozen=True)
class SentencePiece:
    """A model: the pieces that it cuts texts into, and how it normalises them before.

    Args:
        path: its file.
        pieces: all, control symbols included, in the order of their numbers.
        scores: of those that texts can have; the user's own symbols as the search counts them.
        lowest: the lowest score of a usual piece, from which that of unknown characters follows.
        bpe: byte pairs; else the most probable pieces.
        byte_fallback: characters that no piece has become bytes.
        charsmap: the compiled table of characters to replace.
        prefix, single_spaces: whether a space is put first, and spaces are united.
        problems: what the tokenizers library does not do.
    """

    path: Path
    pieces: list[str]
    scores: dict[str, float]
    lowest: float
    bpe: bool
    byte_fallback: bool
    charsmap: bytes
    prefix: bool
    single_spaces: bool
    problems: list[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; what it asks for in vain is not refused but listed in `problems`.

        Raises:
            ConversionError: there is none, it is damaged, or sentencepiece is not installed.
        """
        model = _parsed(path)
        normal = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
        highest = max(normal.values())
        scores = normal | {
            # As in SentencePiece: better than any pieces that could stand for it together.
            piece.piece: len(piece.piece) * highest - 0.1
            for piece in model.pieces
            if piece.type == _USER_DEFINED
        }
        return cls(
            path=path,
            pieces=[piece.piece for piece in model.pieces],
            scores=scores,
            lowest=min(normal.values()),
            bpe=model.trainer_spec.model_type == _BPE,
            byte_fallback=model.trainer_spec.byte_fallback,
            charsmap=model.normalizer_spec.precompiled_charsmap,
            prefix=model.normalizer_spec.add_dummy_prefix,
            single_spaces=model.normalizer_spec.remove_extra_whitespaces,
            problems=_problems(model),
        )

    def normalizers(self) -> list[normalizers.Normalizer]:
        """What is done to a text before it is cut."""
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.single_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(" ", SPACE))
        if self.prefix:
            steps.append(normalizers.Prepend(SPACE))
        return steps

    def model(self, vocabulary: dict[str, int], unknown: str, other_score: float) -> models.Model:
        """Cut normalised texts into ids.

        Args:
            vocabulary: numbers 0, 1, 2, ... of the pieces, special tokens and whatever else.
            unknown: the token for what no piece has.
            other_score: of entries that are no pieces of the model, where there are scores.
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
        """The pairs whose union is a piece, best piece first."""
        merges = [
            (score, piece[:cut], piece[cut:])
            for piece, score in self.scores.items()
            for cut in range(1, len(piece))
            if piece[:cut] in self.scores and piece[cut:] in self.scores
        ]
        merges.sort(key=lambda merge: -merge[0])
        return [(left, right) for _, left, right in merges]

    def cut(self, special: str) -> Regex | None:
        """Where to cut texts so that a special token, an entry of the model, is not found in them.

        SentencePiece takes it for text. The cut must hurt no piece, and no run of unknown
        characters, which is one unknown token; None where every cut would.
        """
        for place in range(1, len(special)):
            before, after = special[place - 1], special[place]
            known = before in self.scores or after in self.scores
            if known and not any(before + after in piece for piece in self.scores):
                return _between(special, place)
        return None


def piece_backend(
    model: SentencePiece, vocabulary: dict[str, int], special: Sequence[str]
) -> Tokenizer:
    """Cut text as a model does, and look its pieces up in a vocabulary that may hold more.

    Args:
        model: the model.
        vocabulary: numbers 0, 1, 2, ... of its entries.
        special: those that are text where they stand in a text, "<unk>" among them.

    Raises:
        ConversionError: the tokenizers library cannot do what the model asks; names all reasons.
    """
    problems = list(model.problems)
    missing = sorted(model.scores.keys() - vocabulary.keys())
    if missing and model.bpe:
        problems.append(
            f"{len(missing)} pieces without an id, {missing[0]!r} among them, which merges need"
        )
    refuse(problems, str(model.path))
    if missing:
        logger.warning(
            f"{len(missing)} pieces of {model.path} have no id in the vocabulary, "
            f"{', '.join(map(repr, missing[:3]))} among them: they are not used."
        )
    backend = Tokenizer(model.model(vocabulary, "<unk>", _UNREACHABLE))
    backend.normalizer = normalizers.Sequence(model.normalizers())
    if not model.bpe:  # which merges pieces alone
        cuts = [model.cut(token) or _between(token, 1) for token in special]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(cut, "merged_with_previous") for cut in cuts]
        )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace(Regex(r"\A +"), ""),
        ]
    )
    return backend


def _between(token: str, place: int) -> Regex:
    """The first characters of a token, where the others follow."""
    return Regex(f"{re.escape(token[:place])}(?={re.escape(token[place:])})")


def _parsed(path: Path) -> Any:
    """A model as SentencePiece stores it.

    Raises:
        ConversionError: as `SentencePiece.read`.
    """
    try:
        from google.protobuf.message import DecodeError

        # Its classes are made when it is imported: no type checker sees them.
        stored: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise ConversionError(
            f"{path} needs sentencepiece and protobuf ({error}): pip install 'vaswani[convert]'."
        ) from error
    if not path.is_file():
        raise ConversionError(f"There is no file {path}.")
    try:
        model = stored.ModelProto.FromString(path.read_bytes())
        scores = [piece.score for piece in model.pieces if piece.piece and piece.type == _NORMAL]
    except (DecodeError, UnicodeDecodeError, OSError) as error:
        raise ConversionError(f"{path} is no SentencePiece model: {error}.") from error
    try:
        if charsmap := model.normalizer_spec.precompiled_charsmap:
            normalizers.Precompiled(charsmap)
    except Exception as error:  # the library has no class of its own for them
        raise ConversionError(f"{path} is no SentencePiece model: {error}.") from error
    # A file cut off between two pieces can be decoded; the options come after the pieces.
    whole = model.HasField("trainer_spec") and model.HasField("normalizer_spec")
    if not whole or not scores or not all(map(math.isfinite, scores)):
        raise ConversionError(f"{path} is no SentencePiece model, or not a whole one.")
    return model


def _problems(model: Any) -> list[str]:
    """What the tokenizers library does not do, by SentencePiece's names."""
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
        problems += [f"user_defined_symbols of type bpe, {own[0]!r} among them"] if own else []
        problems += ["unused pieces of type bpe"] if _UNUSED in kinds else []
    return problems
