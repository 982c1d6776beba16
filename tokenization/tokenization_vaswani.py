r"""The tokenizer of the Transformer: one class for six kinds of vocabulary (section 5.1).

Decoding restores the text that was encoded, up to the normalisation of the kind:

=========  =============================================  ===================  ==================
kind       tokens                                         normalisation        restores
=========  =============================================  ===================  ==================
bpe        byte pairs; unseen characters become bytes     none                 any text
wordpiece  word pieces, longest match first               none                 known characters
unigram    pieces of the most probable segmentation       none                 known characters
char       characters                                     none                 known characters
regex      matches of a pattern, and the text between     none                 known tokens
word       words between white space                      white space becomes  known words
                                                          single spaces
=========  =============================================  ===================  ==================

The tokenizer never lowercases or normalises Unicode. If you need that, prepare the data first.

* Spaces. The kinds bpe, wordpiece and unigram write a space as "▁", and start every text with one.
  A word is therefore the same token everywhere. In the text, "▁" becomes "▂1" and "▂" becomes "▂2".
* Punctuation. These three kinds split punctuation from words before they learn or apply merges. A
  word is therefore the same token before a comma and before a space. `split_punctuation=False`
  leaves punctuation to the merges.
* `space_after`. A word carries the space after it, and every text ends with a space, as in Sennrich
  et al. (2016). The last part of a compound can then be the same token as the word alone. Choose
  this for text with spaces around punctuation.
* Special tokens. "</s>" in a text is text, because no learned token can equal a special token. A
  piece never continues after "<". The kind word escapes such words by "\"; the kinds regex and char
  cut them after "<".
"""

import contextlib
import copy
import functools
import gzip
import itertools
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, Unpack

from tokenizers import AddedToken, Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils import extract_commit_hash, logging

from ..configuration.places_vaswani import check_path
from ..configuration.remote_code_vaswani import save_remote_code
from .kinds_vaswani import (
    EOS,
    PAD,
    UNK,
    completed,
    join_marks_to_added_tokens,
    lines_that_fit,
    lone_surrogate,
    subword_backend,
    trainer_of,
    untrained,
    vocab_size_of_trainer,
)

logger = logging.get_logger(__name__)

_MASK = "<mask>"
_TARGET_MODE_LOCK = threading.RLock()  # a call that encodes targets changes the backend


def _read_lines(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the lines of utf-8 files, plain or .gz, without line ends.

    Raises:
        ValueError: a line is not utf-8 (names file and line), or a .gz file is damaged.
    """
    for path in paths:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            try:
                for number, line in enumerate(file, start=1):
                    text = _decoded(line, f"{path}, line {number}").rstrip("\r\n")
                    # Some editors start a file with a byte order mark.
                    yield text.removeprefix("\ufeff") if number == 1 else text
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path} is damaged: {error}.") from error


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start + 1} is not utf-8 ({error.reason}); convert it first."
        ) from error


def _refuse_lone_surrogates(texts: Any) -> None:
    """Refuse text with half of a surrogate pair; `texts` is a text, a list, or lists of words."""
    for number, text in enumerate(texts if isinstance(texts, list | tuple) else [texts], start=1):
        for part in text if isinstance(text, list | tuple) else [text]:
            if isinstance(part, str) and (flaw := lone_surrogate(part)):
                raise ValueError(f"Text {number} {flaw}.")


def _without_spaces(encoding: Any) -> list[tuple[int, int]]:
    """Return the places of tokens in their text, without the space that a word carries."""
    places = []
    for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
        if 1 < len(token) == end - start:  # "▁" alone is the space itself
            start += token.startswith("▁")
            end -= token.endswith("▁")
        places.append((start, end))
    return places


class _Options(TypedDict, total=False):
    """Options of `train_from_iterator`, for the signature of `train_from_files`."""

    kind: str
    vocab_size: int
    pattern: str | None
    space_after: bool
    split_punctuation: bool
    min_frequency: int
    show_progress: bool


class VaswaniTokenizer(TokenizersBackend):
    """Encode text with "</s>" at the end of source and target, and decode (section 5.1).

    Train a tokenizer with `train_from_iterator` or `train_from_files`, or load one with
    `from_pretrained`. "<pad>", "<unk>", "</s>" are 0, 1, 2. Special tokens in a text are text.
    The kinds bpe, wordpiece and unigram find the token of `add_tokens(["<num>"])` only where a word
    may start, or end with `space_after`. `AddedToken("<num>", rstrip=True, normalized=False)` is
    found everywhere. Without `space_after`, decoding puts a space after it, except before another
    added token.

    Imported tokenizers may have other special tokens, and three more settings:

    * `source_eos=False` adds the end token to targets only (`text_target`).
    * `unknown_from=N` encodes the symbols from number N on as the unknown token. Merges need these
      symbols, but the model has no embeddings for them.
    * `unknown_ends_word=True` puts a space for an unknown token when decoding skips special tokens.
    """

    _adds_eos: bool | None = None  # the last value that was given to `add_eos_token`
    _auto_map: ClassVar[dict[str, list[str | None]]] = {
        "AutoTokenizer": ["tokenization_vaswani.VaswaniTokenizer", None]
    }

    @classmethod
    def train_from_iterator(
        cls,
        lines: Iterable[str],
        kind: str = "bpe",
        vocab_size: int = 37000,
        *,
        pattern: str | None = None,
        space_after: bool = False,
        split_punctuation: bool = True,
        min_frequency: int = 1,
        show_progress: bool = True,
    ) -> Self:
        """Learn a vocabulary; for one shared by two languages (5.1) pass the lines of both.

        Args:
            lines: the text; it is read once.
            kind: "bpe", "wordpiece", "unigram", "word", "char" or "regex"; see the module.
            vocab_size: entries of the vocabulary at most, special tokens and bytes included.
            pattern: for kind "regex", in Oniguruma's syntax; None means `SMILES_PATTERN`.
            space_after: for subwords: a word carries the space after it, not the one before it.
            split_punctuation: for subwords: no token joins a word and a punctuation mark.
            min_frequency: rarer pairs, words, characters or matches are not learned.
            show_progress: draw progress bars.

        Raises:
            TypeError: lines is one string, or a line is not a string (names the line).
            ValueError: an argument is invalid, lines hold no text, or vocab_size is too small.
        """
        if isinstance(lines, str | bytes):
            raise TypeError("lines is one string: pass an iterable of strings, such as [text].")
        backend = untrained(kind, pattern, space_after, split_punctuation)
        trained_size = vocab_size_of_trainer(vocab_size, backend.model)
        trainer = trainer_of(kind, trained_size, min_frequency, show_progress)
        fitting = lines_that_fit(lines, vocab_size, backend.model, backend.normalizer)
        backend.train_from_iterator(fitting, trainer)
        return cls.from_backend(completed(backend))

    @classmethod
    def train_from_files(
        cls, paths: str | os.PathLike | Iterable[str | os.PathLike], **options: Unpack[_Options]
    ) -> Self:
        """Call `train_from_iterator` with the lines of utf-8 files, plain or .gz.

        Raises:
            FileNotFoundError: names all missing files, before any file is read.
            ValueError: a file is not utf-8; names the file and the line. Or as
                `train_from_iterator`.
        """
        given = [paths] if isinstance(paths, str | os.PathLike) else paths
        files = [Path(path) for path in given]
        if missing := [str(path) for path in files if not path.is_file()]:
            raise FileNotFoundError(f"No such file: {', '.join(missing)}.")
        return cls.train_from_iterator(_read_lines(files), **options)

    @classmethod
    def from_backend(cls, backend: Tokenizer) -> Self:
        """Wrap a tokenizer of the tokenizers library, whose vocabulary has the special tokens."""
        backend.post_processor = TemplateProcessing(
            single=f"$A {EOS}",
            pair=f"$A {EOS} $B {EOS}",
            special_tokens=[(EOS, backend.token_to_id(EOS))],
        )
        return cls(
            tokenizer_object=backend,
            pad_token=PAD,
            unk_token=UNK,
            eos_token=EOS,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The backend's pickle lacks this setting, so the text "</s>" would become the end token.
        self.backend_tokenizer.encode_special_tokens = self.split_special_tokens

    @functools.wraps(TokenizersBackend.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode as in transformers; with `source_eos=False`, one thread at a time."""
        switches = self.init_kwargs.get("source_eos") is False
        with _TARGET_MODE_LOCK if switches else contextlib.nullcontext():
            return super().__call__(*args, **kwargs)

    def _encode_plus(self, text: Any, text_pair: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._encode_plus(text, text_pair, *args, **kwargs)
        except BaseException as error:
            # transformers switches back only after a success.
            if not self._in_target_context_manager:
                self._switch_to_input_mode()
            if isinstance(error, TypeError):  # tokenizers raises it for such text, and for numbers
                for texts in (text, text_pair):
                    _refuse_lone_surrogates(texts)
            raise

    def _convert_encoding(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
        columns, encodings = super()._convert_encoding(*args, **kwargs)
        carried = not isinstance(self.backend_tokenizer.model, models.WordLevel)
        if carried and "offset_mapping" in columns:
            columns["offset_mapping"] = [_without_spaces(encoding) for encoding in encodings]
        if self.init_kwargs.get("unknown_from") is not None:
            columns["input_ids"] = [self.known_ids(ids) for ids in columns["input_ids"]]
        return columns, encodings

    def known_ids(self, ids: Iterable[int]) -> list[int]:
        """Replace the symbols from number `unknown_from` on by the unknown token.

        Tokens that were added to the tokenizer stay, because the model can get embeddings for them.
        """
        first = self.init_kwargs.get("unknown_from")
        if first is None:
            return list(ids)
        end = self.backend_tokenizer.get_vocab_size(with_added_tokens=False)
        unknown = self.unk_token_id
        return [unknown if first <= token < end else token for token in ids]

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        number: int = super()._convert_token_to_id_with_added_voc(token)
        return number if token == self.unk_token else self.known_ids([number])[0]

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        decode = functools.partial(super()._decode, **kwargs)
        ids = token_ids["input_ids"] if isinstance(token_ids, dict) else token_ids
        # The Trainer pads predictions of several batches with -100.
        ids = [ids] if isinstance(ids, int) else [token for token in ids if token != -100]
        if not (skip_special_tokens and self.init_kwargs.get("unknown_ends_word")):
            return decode(ids, skip_special_tokens=skip_special_tokens)
        # Decode the parts between unknown tokens one by one, or "r@@ <unk> r" would become "rr".
        # Added tokens are parts too, because they carry no mark of the end of a word.
        first_added = self.backend_tokenizer.get_vocab_size(with_added_tokens=False)
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == self.unk_token_id:
                parts.append([])
            elif token >= first_added:
                parts += [token], []
            else:
                parts[-1].append(token)
        texts = [decode(part, skip_special_tokens=True) for part in parts]
        return " ".join(text for text in texts if text)

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        """Add tokens, and warn of new special tokens that will be read as text."""
        if special_tokens and self.split_special_tokens:
            known = {token.content for token in self.added_tokens_decoder.values()}
            known |= {str(token) for token in self._special_tokens_map.values()}
            if hidden := [str(token) for token in new_tokens if str(token) not in known]:
                logger.warning(
                    f"{', '.join(hidden)} in a text will not become special tokens: use "
                    "tokenizer.add_tokens instead, or set tokenizer.split_special_tokens = False."
                )
        added: int = super()._add_tokens(new_tokens, special_tokens)
        return added

    @property
    def add_eos_token(self) -> bool:
        """Whether the end token is added to a text."""
        if self._adds_eos is not None or "add_eos_token" in self.init_kwargs:
            return bool(self._add_eos_token)
        processor = self.backend_tokenizer.post_processor
        if processor is None or self.eos_token is None:
            return False
        *_, end_part = json.loads(processor.__getstate__()).get("single") or [{}]
        return bool(end_part.get("SpecialToken", {}).get("id") == self.eos_token)

    @add_eos_token.setter
    def add_eos_token(self, value: bool) -> None:
        self._adds_eos = self._add_eos_token = value
        self.update_post_processor()

    def _switch_to_input_mode(self) -> None:
        if self.init_kwargs.get("source_eos") is False and self.add_eos_token:
            self.add_eos_token = False

    def _switch_to_target_mode(self) -> None:
        if self.init_kwargs.get("source_eos") is False:
            self.add_eos_token = True

    def for_masked_words(self) -> Self:
        """Return a copy with a token "<mask>", for a masked language model.

        The copy recognises special tokens that are written in a text, such as the mask. A text that
        starts with a closing mark such as "." gets no space before it, so that "<mask>." is read as
        "word." is.
        """
        new = copy.deepcopy(self)
        new._recognise_special_tokens()
        # The parts of words carry the spaces, so spaces beside the mask must not become tokens. The
        # other kinds remove spaces, or have tokens for them.
        strip = not isinstance(self.backend_tokenizer.model, models.WordLevel)
        mask = AddedToken(_MASK, lstrip=strip, rstrip=strip, normalized=False, special=True)
        new.add_special_tokens({"mask_token": mask})
        join_marks_to_added_tokens(new.backend_tokenizer)
        return new

    def for_language_model(self) -> Self:
        """Return a copy for a language model, which puts "</s>" before a text and not after it.

        The model continues the text. The copy pads on the left, and recognises special tokens
        that are written in a text: trainers of language models write "</s>" after each text.
        """
        new = copy.deepcopy(self)
        new.bos_token = new.eos_token
        new.add_eos_token = False
        new.add_bos_token = True
        new.padding_side = new.init_kwargs["padding_side"] = "left"
        new._recognise_special_tokens()
        return new

    def _recognise_special_tokens(self) -> None:
        self.split_special_tokens = self.backend_tokenizer.encode_special_tokens = False
        self.init_kwargs["split_special_tokens"] = False  # train_new_from_iterator reads it

    def train_new_from_iterator(
        self,
        text_iterator: Iterable[str | Sequence[str]],
        vocab_size: int,
        *args: object,
        **kwargs: object,
    ) -> Self:
        """Train as in transformers, but keep the bytes of bpe and wordpiece's unmarked pieces.

        Raises:
            TypeError: a line is not a string (names the line).
            ValueError: text_iterator holds no text, or vocab_size is too small.
        """
        backend = self.backend_tokenizer
        if isinstance(backend.model, models.WordPiece):
            kwargs.setdefault("continuing_subword_prefix", "")
        fitting = lines_that_fit(text_iterator, vocab_size, backend.model, backend.normalizer)
        trained_size = vocab_size_of_trainer(vocab_size, backend.model)
        new = super().train_new_from_iterator(fitting, trained_size, *args, **kwargs)
        new.init_kwargs.pop("unknown_from", None)
        new._tokenizer = completed(new._tokenizer)
        new._tokenizer.encode_special_tokens = new.split_special_tokens
        return new

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> Self:
        """Load a tokenizer as in transformers, but refuse a missing path at once.

        Raises:
            OSError: the path does not exist, or holds no tokenizer.
        """
        check_path(pretrained_model_name_or_path, kwargs.get("cache_dir"), kwargs.get("revision"))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_pretrained(
        cls,
        resolved_vocab_files: dict[str, str | None],
        pretrained_model_name_or_path: str,
        *args: Any,
        **kwargs: Any,
    ) -> Self:
        file = resolved_vocab_files.get("tokenizer_file")
        if file is None:
            raise OSError(f"{pretrained_model_name_or_path} has no tokenizer.json.")
        try:
            tokenizer = super()._from_pretrained(
                resolved_vocab_files, pretrained_model_name_or_path, *args, **kwargs
            )
        except Exception:
            try:
                Tokenizer.from_file(file)
            except Exception as flaw:  # tokenizers raises bare Exceptions
                raise OSError(
                    f"{file} is damaged: {flaw}. Download it again; for the Hub, pass "
                    "force_download=True."
                ) from flaw
            raise
        # The target's tokenizer is loaded later, with these settings, from the same revision.
        names = ("cache_dir", "local_files_only")
        tokenizer.origin = {name: kwargs[name] for name in names if kwargs.get(name)}
        if revision := extract_commit_hash(file, None):
            tokenizer.origin["revision"] = revision
        return tokenizer

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike,
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        # Padding and truncation belong to the last call, not to the tokenizer.
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        # transformers copies the code of a class that is remote code (_auto_class is set).
        if self._auto_class is None:
            file_names = file_names + save_remote_code(save_directory)
        try:
            return super()._save_pretrained(
                save_directory, file_names, legacy_format, filename_prefix
            )
        except Exception as error:
            if type(error) is not Exception:
                raise
            # tokenizers raises bare Exceptions, for a full disk for example.
            raise OSError(
                f"The tokenizer could not be saved in {save_directory}: {error}"
            ) from error


def separates_words(tokenizer: Any) -> bool:
    """Tell whether the ids of a text are the ids of its words between spaces, one after another."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(tokenizer, VaswaniTokenizer):
        return False
    if not tokenizer.split_special_tokens or backend.truncation or backend.padding:
        return False
    state = json.loads(backend.to_str())
    if state["model"].get("dropout"):
        return False
    choices = (False, True)
    for model, *options in itertools.product((models.BPE(), models.WordPiece()), choices, choices):
        known = json.loads(subword_backend(model, *options).to_str())
        if all(state[part] == known[part] for part in ("normalizer", "pre_tokenizer")):
            return True
    return False
