"""The kinds of vocabulary: how each one divides a text, and how it is trained (section 5.1).

`tokenization_vaswani.py` describes the kinds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SUBWORD_KINDS = ("bpe", "wordpiece", "unigram")
KINDS = (*SUBWORD_KINDS, "word", "char", "regex")

# Tokens of reaction SMILES: bracket atoms, the organic subset and its aromatic forms, ring closures
# of two digits, the reaction arrow; then single bonds, branches, digits and dots.
SMILES_PATTERN = r"\[[^\[\]]*\]|Cl|Br|[BCNOPSFI]|[bcnops]|%\d\d|%\(\d+\)|>>|[-=#$:~/\\.()+*>]|\d"

PAD, UNK, EOS = _SPECIAL_TOKENS = ("<pad>", "<unk>", "</s>")
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SMALLEST_UNIGRAM = 10  # entries of a vocabulary
_REST_OF_SPECIAL = r"(?:pad|unk|/s)>"
# A punctuation mark, alone or repeated ("..."), with the space that it carries; by space_after.
_PUNCTUATION = {False: r"▁?(\p{P})\1*", True: r"(\p{P})\1*▁?"}
# Steps that add the outer space of every text. Metaspace would add no space to a text that begins
# with a space, and decoding would lose that space. The second table adds none beside a closing or
# an opening mark.
_OUTER_SPACE = {False: normalizers.Prepend(" "), True: normalizers.Replace(Regex(r"\z"), " ")}
_OUTER_SPACE_EXCEPT_AT_MARKS = {
    False: normalizers.Replace(Regex(r"\A(?=[^\p{Pe}\p{Pf}.,;:!?…%'])"), " "),
    True: normalizers.Replace(Regex(r"(?<=[^\p{Ps}\p{Pi}¿¡])\z"), " "),
}


def subword_backend(model: models.Model, space_after: bool, split_punctuation: bool) -> Tokenizer:
    """Return a tokenizer of subwords, whose words include the space before them (Wu et al., 2016).

    With `space_after`, words include the space after them (Sennrich et al., 2016).
    """
    backend = Tokenizer(model)
    backend.normalizer = _normalizer_with(_OUTER_SPACE[space_after])
    # No token continues after "<", so no learned token can equal "</s>" or "<0x41>".
    ends = ["▁", "<"] if space_after else ["<"]
    splits = [pre_tokenizers.Split(end, "merged_with_previous") for end in ends]
    if split_punctuation:
        splits.append(pre_tokenizers.Split(Regex(_PUNCTUATION[space_after]), "isolated"))
    if isinstance(model, models.WordPiece):
        # The time of WordPiece grows with the third power of the length of a word.
        splits.append(pre_tokenizers.Split(Regex(r"[\s\S]{500}"), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="never", split=not space_after), *splits]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            # Strip panics on the right of an empty text.
            decoders.Replace(Regex(r" \z"), "") if space_after else decoders.Strip(" ", 1, 0),
            decoders.Replace("▂1", "▁"),
            decoders.Replace("▂2", "▂"),
        ]
    )
    return backend


def _normalizer_with(outer_space: normalizers.Normalizer) -> normalizers.Normalizer:
    return normalizers.Sequence(
        [normalizers.Replace("▂", "▂2"), normalizers.Replace("▁", "▂1"), outer_space]
    )


def join_marks_to_added_tokens(backend: Tokenizer) -> None:
    """Let the backend add no space between an added token and a closing or opening mark beside it.

    For example, "<mask>." gets no space before ".", and "(<mask>" gets none after "(".

    The backend normalises each text between added tokens as a text of its own.
    """
    for space_after, outer_space in _OUTER_SPACE.items():
        if backend.normalizer.__getstate__() == _normalizer_with(outer_space).__getstate__():
            backend.normalizer = _normalizer_with(_OUTER_SPACE_EXCEPT_AT_MARKS[space_after])


def _word_backend() -> Tokenizer:
    r"""Split at white space, and escape "</s>", "<pad>", "<unk>" and words that start with "\"."""
    backend = Tokenizer(models.WordLevel(unk_token=UNK))
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"(?<!\S)\\"), "\\\\"),
            normalizers.Replace(Regex(rf"(?<!\S)<(?={_REST_OF_SPECIAL}(?!\S))"), "\\<"),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    # The WordPiece decoder joins words by a space if they do not start with its prefix, a space.
    backend.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"\A\\"), ""), decoders.WordPiece(prefix=" ", cleanup=False)]
    )
    return backend


def _regex_backend(pattern: str) -> Tokenizer:
    """Split into the matches of a pattern and the text between them."""
    if not pattern:
        raise ValueError("pattern is empty: pass a regular expression that matches tokens.")
    try:
        matches = Regex(pattern)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}.") from error
    backend = Tokenizer(models.WordLevel(unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(matches, "isolated"),
            pre_tokenizers.Split(Regex(rf"\A<(?={_REST_OF_SPECIAL}\z)"), "isolated"),
        ]
    )
    backend.decoder = decoders.Fuse()
    return backend


def untrained(
    kind: str, pattern: str | None, space_after: bool, split_punctuation: bool
) -> Tokenizer:
    """Return the tokenizer of a kind, before training."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; choose one of {', '.join(KINDS)}.")
    if pattern is not None and kind != "regex":
        raise ValueError(f"pattern ({pattern!r}) is for kind='regex' only, not for {kind!r}.")
    if space_after and kind not in SUBWORD_KINDS:
        raise ValueError(
            f"space_after ({space_after}) is for {', '.join(SUBWORD_KINDS)} only, not for {kind!r}."
        )
    match kind:
        case "bpe":
            pairs = models.BPE(unk_token=UNK, byte_fallback=True)
            return subword_backend(pairs, space_after, split_punctuation)
        case "wordpiece":
            # By default, words of more than 100 characters become <unk>.
            pieces = models.WordPiece(unk_token=UNK, max_input_chars_per_word=2**31)
            return subword_backend(pieces, space_after, split_punctuation)
        case "unigram":
            return subword_backend(models.Unigram(), space_after, split_punctuation)
        case "word":
            return _word_backend()
        case "char":
            return _regex_backend(r"[\s\S]")
    return _regex_backend(SMILES_PATTERN if pattern is None else pattern)


def trainer_of(
    kind: str, vocab_size: int, min_frequency: int, show_progress: bool
) -> trainers.Trainer:
    """Return the trainer of a kind. Special tokens come first, so their ids are 0, 1, 2."""
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": list(_SPECIAL_TOKENS),
        "show_progress": show_progress,
    }
    if kind == "unigram":
        if min_frequency != 1:
            raise ValueError(f"min_frequency ({min_frequency}) must be 1 for kind='unigram'.")
        return trainers.UnigramTrainer(unk_token=UNK, **options)
    options["min_frequency"] = min_frequency
    if kind == "bpe":
        return trainers.BpeTrainer(**options)
    if kind == "wordpiece":
        # The space "▁" marks the start of a word, so other pieces need no mark ("##").
        return trainers.WordPieceTrainer(continuing_subword_prefix="", **options)
    return trainers.WordLevelTrainer(**options)


def lines_that_fit(
    lines: Iterable[str | Sequence[str]],
    vocab_size: int,
    model: models.Model,
    normalizer: normalizers.Normalizer | None,
) -> Iterator[str]:
    """Yield the lines, then check that their characters fit the vocabulary.

    The tokenizers library trains on the lines before it raises an error of this iterator.

    Raises:
        TypeError: a line is not a string.
        ValueError: a line has half a surrogate pair, all lines are blank, or vocab_size is too
            small.
    """
    characters: set[str] = set()
    number = 0
    for batch in lines:
        # Bytes and dictionaries are iterable too, but their items are numbers and keys.
        is_line = isinstance(batch, str | bytes | Mapping) or not isinstance(batch, Iterable)
        for line in [batch] if is_line else batch:
            number += 1
            if not isinstance(line, str):
                raise TypeError(f"Line {number} is {type(line).__name__}, not a string.")
            if flaw := lone_surrogate(line):
                raise ValueError(f"Line {number} {flaw}.")
            characters.update(line)
            yield line
    text = "".join(characters)
    if not text.strip():
        raise ValueError("There is no text to train on: pass at least one line that is not blank.")
    needed = len(_SPECIAL_TOKENS) + _reserved_bytes(model)
    if isinstance(model, models.WordLevel):
        needed += 1
    else:
        # The normalizer adds characters: the space, and "1" and "2" of the escapes.
        needed += len(set(normalizer.normalize_str(text) if normalizer else text))
    if isinstance(model, models.Unigram):
        # The trainer needs room for one piece beyond the characters, or it exceeds vocab_size.
        needed = max(needed + 1, _SMALLEST_UNIGRAM)
    if vocab_size < needed:
        raise ValueError(
            f"vocab_size ({vocab_size}) is too small: the special tokens, the bytes (bpe) and the "
            f"characters of this text need {needed}. Pass a larger one, or simpler text."
        )


def lone_surrogate(text: str) -> str | None:
    r"""Say where a text holds half of a surrogate pair; None if it holds none.

    Escapes of JSON can write such a half ("\ud800"), but no encoding of text can.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        return f"holds {half!r} as character {error.start + 1}, half of a surrogate pair: remove it"
    return None


def _reserved_bytes(model: models.Model) -> int:
    """Return how many entries of the vocabulary are bytes."""
    return len(_BYTE_TOKENS) if isinstance(model, models.BPE) and model.byte_fallback else 0


def vocab_size_of_trainer(vocab_size: int, model: models.Model) -> int:
    """Return the vocab_size for the trainer of a model."""
    if isinstance(model, models.Unigram):
        # The trainer may never end below this size, and `lines_that_fit` checks too late.
        return max(vocab_size, _SMALLEST_UNIGRAM)
    return max(vocab_size - _reserved_bytes(model), 0)


def completed(backend: Tokenizer) -> Tokenizer:
    """Complete a trained tokenizer: add bytes for bpe, and sort the pieces of unigram."""
    state = json.loads(backend.to_str())
    if _reserved_bytes(backend.model):
        # The trainer accepts bytes as special tokens only, which decoding leaves out.
        first = backend.get_vocab_size()
        state["model"]["vocab"] |= {token: first + byte for byte, token in enumerate(_BYTE_TOKENS)}
    elif isinstance(backend.model, models.Unigram):
        first = len(state["added_tokens"])
        state["model"]["vocab"][first:] = _sorted_pieces(state["model"]["vocab"][first:])
    return Tokenizer.from_str(json.dumps(state))


def _sorted_pieces(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort unigram pieces by rounded score, then by name, so that training is reproducible.

    The trainer iterates over hash maps, so the order of ties is random, and scores vary by about
    1e-11. Characters that were pruned and added back get the scores lowest, lowest + 0.0001, ... in
    random order. Here, these characters all get the lowest score.
    """
    lowest = min(score for _, score in pieces)

    def reproducible_score(piece: str, score: float) -> float:
        steps = (score - lowest) / 0.0001
        added_back = len(piece) == 1 and abs(steps - round(steps)) < 1e-6
        return round(lowest if added_back else score, 5)

    scored = [(piece, reproducible_score(piece, score)) for piece, score in pieces]
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))


__all__ = [
    "EOS",
    "KINDS",
    "PAD",
    "SMILES_PATTERN",
    "SUBWORD_KINDS",
    "UNK",
    "completed",
    "lines_that_fit",
    "lone_surrogate",
    "subword_backend",
    "trainer_of",
    "untrained",
    "vocab_size_of_trainer",
]
