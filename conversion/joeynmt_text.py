"""JoeyNMT's vocabularies, and tokenizers that give the same token ids."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .errors import ConversionError, refuse
from .joeynmt_options import EOS, Section
from .reading import read_text
from .sentencepiece import SPACE, SentencePiece
from .subword_nmt import SPACES, joined_by_spaces

_NAMES = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # in the order of ids
_EMPTY_WORD = "\n"  # represents the empty word, because no line of a vocabulary contains it
_OUTER_SPACE = Regex(rf"\A[{SPACES}]+|[{SPACES}]+\z")  # the spaces that str.strip removes
# Replacements that the option normalize makes in sources and in translations.
_TIDY: list[tuple[str | Regex, str]] = [
    ("\u200b", ""),
    (Regex("[ \u3000]+"), " "),
    *((f" {mark}", mark) for mark in "?!,.:"),
    (_OUTER_SPACE, ""),
]


@dataclass
class Symbols:
    """Special tokens: unk, pad, bos and eos, then any further ones."""

    first: list[str]
    further: list[str]

    @classmethod
    def read(cls, section: Section) -> Self:
        """Read data.special_symbols, which only JoeyNMT 2.3 has."""
        first = []
        for position, (name, usual) in enumerate(_NAMES.items()):
            first.append(section.get(f"{name}_token", usual))
            section.require(f"{name}_id", position, "JoeyNMT itself uses other ids")
        further = [section.get("sep_token", None, str)]
        section.ignore("sep_id", "lang_tags")
        tags = section.values.get("lang_tags") or []
        if isinstance(tags, list):
            further += map(str, tags)
        else:
            section.complain(f"data.special_symbols.lang_tags: {tags!r} is not a list")
        symbols = cls(first, [token for token in further if token is not None])
        if len(set(symbols.all)) != len(symbols.all):
            section.complain(f"data.special_symbols: {', '.join(symbols.all)} are not different")
        section.refuse_unread()
        return symbols

    @property
    def all(self) -> list[str]:
        """All special tokens, in the order of their ids."""
        return self.first + self.further

    def tokenizer(self, backend: Tokenizer) -> VaswaniTokenizer:
        """Make a tokenizer with these special tokens, which ends texts with eos."""
        unk, pad, bos, eos = self.first
        backend.post_processor = TemplateProcessing(
            single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, EOS)]
        )
        return VaswaniTokenizer(
            tokenizer_object=backend,
            unk_token=unk,
            pad_token=pad,
            bos_token=bos,
            eos_token=eos,
            extra_special_tokens=self.further,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


@dataclass
class Vocabulary:
    """The tokens of one side, and how text is split into them.

    Args:
        section: data.src or data.trg.
        symbols: the special tokens.
        file: the file of the vocabulary.
        tokens: all tokens, in the order of their ids.
        folder: where the files of the section are.
        pretokenized: whether texts will be tokens between spaces, in place of the section's level.
    """

    section: Section
    symbols: Symbols
    file: Path
    tokens: list[str]
    folder: Path
    pretokenized: bool

    @classmethod
    def read(
        cls,
        section: Section,
        side: str,
        named: str | Path | None,
        folder: Path,
        symbols: Symbols,
        pretokenized: bool,
    ) -> Self:
        """Read the file of a vocabulary.

        Args:
            section: data.src or data.trg.
            side: "src" or "trg".
            named: the file, unless it is beside the checkpoint.
            folder: folder of the checkpoint.
            symbols: the special tokens.
            pretokenized: whether texts will be tokens between spaces.

        Raises:
            ConversionError: there is no such file.
        """
        section.ignore("lang", "max_length", "min_length", "voc_min_freq", "voc_limit")
        file = folder / f"{side}_vocab.txt"
        voc_file = section.get("voc_file", "")
        if named:
            file = Path(named)
        elif not file.is_file() and voc_file:
            file = folder / Path(voc_file).name
        option = "--source-vocab" if side == "src" else "--target-vocab"
        if not file.is_file():
            raise ConversionError(f"There is no file {file}: name it by {option}.")
        section.require("has_prompt", False, "it adds the embedding of <unk> outside the prompt")
        tokens = list(dict.fromkeys([*symbols.all, *read_text(file).splitlines()]))
        return cls(section, symbols, file, tokens, folder, pretokenized)

    def backend(self) -> Tokenizer | None:
        """Make the tokenizer, or return None and add the reason to the problems."""
        level, lowercase = self.section.get("level", ""), self.section.get("lowercase", False)
        normalize = self.section.get("normalize", False)
        if self.pretokenized:
            self.section.values["tokenizer_cfg"] = None
            level, normalize, lowercase = "word", False, False
        steps = [*(_normalize() if normalize else []), *(_lowercase() if lowercase else [])]
        tidy = _tidy_output() if normalize else []
        way_out = "tokenize before, and pass --pretokenized"
        options = self.section.section("tokenizer_cfg")
        options.ignore("lang", "nbest_size", "alpha", "dropout", "num_threads")
        # Options of the script that trains SentencePiece and subword-nmt.
        options.ignore("model_type", "character_coverage", "num_merges")
        kind = self.section.get("tokenizer_type", self.section.get("bpe_type", "sentencepiece"))
        if options.get("pretokenizer", "none").lower() != "none":
            options.complain(f"{options.name}pretokenizer: moses ({way_out})")
        backend = None
        if level in ("word", "char"):
            options.ignore("model_file", "codes", "separator", "vocab_file")
            make = self._words if level == "word" else self._characters
            backend = make(steps, tidy)
        elif level != "bpe":
            self.section.complain(f"{self.section.name}level: {level!r} is unknown")
        elif kind == "sentencepiece":
            file = self.folder / Path(options.get("model_file", "")).name
            try:
                backend = self._pieces(SentencePiece.read(file), steps, tidy)
            except ConversionError as error:
                problem = str(error).removesuffix(".")
                options.complain(f"{options.name}model_file: {problem} ({way_out})")
        else:
            options.ignore("codes", "separator")
            self.section.complain(f"{self.section.name}tokenizer_type: {kind} ({way_out})")
        self.section.ignore("tokenizer_type", "bpe_type")
        options.refuse_unread()
        self.section.refuse_unread()
        return backend

    def _words(
        self, steps: list[normalizers.Normalizer], tidy: list[decoders.Decoder]
    ) -> Tokenizer:
        """Split text at single spaces."""
        ids = {token or _EMPTY_WORD: index for index, token in enumerate(self.tokens)}
        backend = Tokenizer(models.WordLevel(ids, unk_token=self.symbols.first[0]))
        # JoeyNMT finds the empty word between two spaces.
        gap = normalizers.Replace(Regex(r"(?<= )(?= )|\A(?= )|(?<= )\z"), _EMPTY_WORD)
        backend.normalizer = normalizers.Sequence([*steps, gap])
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_EMPTY_WORD, ""), joined_by_spaces(), *tidy]
        )
        return backend

    def _characters(
        self, steps: list[normalizers.Normalizer], tidy: list[decoders.Decoder]
    ) -> Tokenizer:
        """Split text into characters."""
        ids = {token: index for index, token in enumerate(self.tokens)}
        backend = Tokenizer(models.WordLevel(ids, unk_token=self.symbols.first[0]))
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(SPACE, " "), *tidy])
        return backend

    def _pieces(
        self,
        model: SentencePiece,
        steps: list[normalizers.Normalizer],
        tidy: list[decoders.Decoder],
    ) -> Tokenizer:
        """Split text with SentencePiece, restricted to the vocabulary as by its SetVocabulary."""
        special, known = self.symbols.all, set(self.tokens)
        # SentencePiece reads these special tokens as text. Merges cannot form them.
        as_text = [] if model.bpe else [token for token in special if token not in model.scores]
        parts = {token: model.split_inside(token) for token in as_text}
        problems = self._piece_problems(model, known) + [
            f"it does not keep apart {token!r} as text and as a token"
            for token, part in parts.items()
            if part is None
        ]
        refuse(problems, str(model.path))
        ids = {token: index for index, token in enumerate(self.tokens)}
        backend = Tokenizer(model.model(ids, self.symbols.first[0], model.lowest_score))
        steps = [*steps, *model.normalizers()]
        if tags := [token for token in self.symbols.further if token in model.scores]:
            after_space = f"\\A{SPACE}(?={'|'.join(map(re.escape, tags))})"
            steps.append(normalizers.Replace(Regex(after_space), ""))
        backend.normalizer = normalizers.Sequence(steps)
        if as_text:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(p, "merged_with_previous") for p in parts.values() if p]
            )
        strip = [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Replace(_OUTER_SPACE, "")]
        backend.decoder = decoders.Sequence([*strip, *tidy])
        return backend

    def _piece_problems(self, model: SentencePiece, known: set[str]) -> list[str]:
        """List why the model does not split text as JoeyNMT would."""
        unknown_tokens = [
            t for t in self.tokens if t not in model.scores and t not in self.symbols.all
        ]
        lost = [piece for piece in model.scores if piece not in known]
        problems = list(model.problems)
        if model.byte_fallback:
            problems.append("byte_fallback")
        elif unknown_tokens:
            problems.append(f"it has no piece {unknown_tokens[0]!r}, which {self.file.name} has")
        # SentencePiece keeps characters that the vocabulary lacks. JoeyNMT reads them as <unk>.
        if lost and (model.bpe or any(len(piece) == 1 for piece in lost)):
            problems.append(f"its piece {lost[0]!r} is not in {self.file.name}")
        return problems


def _normalize() -> list[normalizers.Normalizer]:
    """The option normalize: NFKC, plain quotes, single spaces, none before some marks."""
    changes = [("\u2019", "'"), ("“", '"'), ("”", '"'), *_TIDY]
    return [normalizers.NFKC(), *(normalizers.Replace(*change) for change in changes)]


def _tidy_output() -> list[decoders.Decoder]:
    """The option normalize, for translations."""
    return [decoders.Fuse(), *(decoders.Replace(*change) for change in _TIDY)]


def _lowercase() -> list[normalizers.Normalizer]:
    """The option lowercase: str.lower, which knows the sigma at the end of a word."""
    # The Lowercase of the tokenizers library does not know this sigma.
    ending = Regex(r"\p{Cased}\p{Case_Ignorable}*\KΣ(?!\p{Case_Ignorable}*\p{Cased})")
    return [normalizers.Replace(ending, "ς"), normalizers.Lowercase()]


__all__ = ["Symbols", "Vocabulary"]
