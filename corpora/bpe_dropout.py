"""BPE-dropout: texts cut into tokens at random (Provilkov et al., 2020)."""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerFast

from .encoding import special_ids

Draw = Callable[[], float]

# Number of cached splits per word, because a lookup is faster than splitting the word again.
_SPLITS_PER_WORD = 64
_CACHED_SPLITS = 500_000
_LONGEST_CACHED = 64  # characters
SEAL = "\ue001"  # ends the last symbol of a word in tokenizers from subword-nmt's oldest codes
_SPACES = r"[^\S\x1c-\x1f]*"  # the tokenizers library does not strip these control characters


class BpeDropout:
    """Encode texts with byte pair merges skipped at random (Provilkov et al., 2020, section 3.1).

    A word that is always one token teaches the model nothing about its parts. Use BPE-dropout for
    training only, and translate with the tokenizer itself. The tokenizers library has BPE-dropout
    too, but its random numbers cannot be seeded.

    Args:
        tokenizer: a tokenizer whose model is BPE, such as VaswaniTokenizer's kind "bpe".
        dropout: the probability of skipping a possible merge. The authors use 0.1. With 0, the
            tokens are those of the tokenizer.
        seed: seed of the random numbers.
        target: add the special tokens of targets instead of those of sources.

    Raises:
        ValueError: the tokenizer's model is not BPE or has a setting that this class does not
            support, or dropout is not between 0 and 1.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        dropout: float,
        seed: int = 0,
        target: bool = False,
    ) -> None:
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}.")
        self._backend = tokenizer.backend_tokenizer
        model = json.loads(self._backend.to_str())["model"]
        if model["type"] != "BPE":
            raise ValueError(f"BPE-dropout needs a BPE tokenizer, but this one is {model['type']}.")
        marks = ("continuing_subword_prefix", "end_of_word_suffix")
        for name in (*marks, "ignore_merges", "fuse_unk"):
            if model.get(name):
                raise ValueError(
                    f"BPE-dropout does not support a tokenizer with {name}={model[name]!r}."
                )
        if any(right.endswith(SEAL) for _, right in model["merges"]):
            raise ValueError(
                "BPE-dropout does not support the oldest codes of subword-nmt, because it would "
                "skip the merges that end words: leave it out, or train with a new tokenizer."
            )
        self._dropout = dropout
        self._seed = seed
        self._draw = random.Random(seed).random
        self._ids: dict[str, int] = model["vocab"]
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}
        self._known_ids = getattr(tokenizer, "known_ids", list)  # other tokenizers know all ids
        self._unknown = tokenizer.unk_token_id
        self._byte_fallback = model["byte_fallback"]
        self._splits: dict[tuple[str, int], list[int]] = {}
        self._before, self._after = special_ids(tokenizer, target)
        self._added = _AddedTokens(tokenizer)

    def __call__(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode texts with special tokens. Each call draws further random numbers."""
        return [self._with_special_tokens(text, self._draw) for text in texts]

    def at(self, text: str, *position: int) -> list[int]:
        """Encode a text with random numbers that depend only on the seed and `position`.

        Args:
            text: the text.
            position: any integers, for example epoch and line.
        """
        draw = random.Random(repr((self._seed, *position))).random
        return self._with_special_tokens(text, draw)

    def _with_special_tokens(self, text: str, draw: Draw) -> list[int]:
        ids = list(self._before)
        for part in self._added.split(text):
            ids += [part] if isinstance(part, int) else self._encode(part, draw)
        return ids + self._after

    def _encode(self, text: str, draw: Draw) -> list[int]:
        if self._backend.normalizer:
            text = self._backend.normalizer.normalize_str(text)
        words = [text]
        if self._backend.pre_tokenizer:
            words = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        return [
            token
            for word in words
            for token in self._ids_of_split(word, int(draw() * _SPLITS_PER_WORD))
        ]

    def _ids_of_split(self, word: str, number: int) -> list[int]:
        """Return split `number` of a word.

        The split depends only on the seed, the word and the number. Texts encoded before do not
        change it, so that all processes get the same split.
        """
        if len(self._splits) > _CACHED_SPLITS:
            self._splits.clear()
        if (known := self._splits.get((word, number))) is not None:
            return known
        draw = random.Random(repr((self._seed, number, word))).random
        ids = (self._ids.get(piece, self._unknown) for piece in self._merged_pieces(word, draw))
        split = self._known_ids(ids)
        if len(word) <= _LONGEST_CACHED:  # text without spaces is one word, and hardly repeated
            self._splits[word, number] = split
        return split

    def _merged_pieces(self, word: str, draw: Draw) -> list[str]:
        """Merge the characters of a word pair by pair, in the order of the learned merges."""
        pieces = [piece for character in word for piece in self._pieces(character)]
        ranks, never = self._ranks, len(self._ranks)
        possible = [ranks.get(pair, never) for pair in pairwise(pieces)]
        while (place := self._next_merge_place(possible, draw)) is not None:
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
            del possible[place]
            if place:
                possible[place - 1] = ranks.get((pieces[place - 1], pieces[place]), never)
            if place < len(possible):
                possible[place] = ranks.get((pieces[place], pieces[place + 1]), never)
        return pieces

    def _pieces(self, character: str) -> list[str]:
        """Return the initial pieces: the character, or the byte tokens of an unknown character."""
        if character not in self._ids and self._byte_fallback:
            return [f"<0x{byte:02X}>" for byte in character.encode()]
        return [character]

    def _next_merge_place(self, possible: list[int], draw: Draw) -> int | None:
        """Return where to merge next, or None if no merge is left.

        `possible` has the rank of the merge at each place, and a larger number where there is none.

        Each place is skipped with probability `dropout`. The best-ranked of the other places wins.
        """
        dropout, never = self._dropout, len(self._ranks)
        if possible and draw() >= dropout:
            places = [possible.index(min(possible))]
        else:
            places = sorted(range(len(possible)), key=possible.__getitem__)[1:]
            places = [place for place in places if draw() >= dropout][:1]
        return next((place for place in places if possible[place] != never), None)


class _AddedTokens:
    """Added tokens that are not special, such as language tags. They are never split.

    Raises:
        ValueError: a token has a matching rule that this class does not support.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokens = tokenizer.added_tokens_decoder.items()
        self._ids = {token.content: number for number, token in tokens if not token.special}
        known = [token for _, token in tokens if not token.special]
        if unknown := [token.content for token in known if token.normalized or token.single_word]:
            raise ValueError(
                f"BPE-dropout would cut the added tokens {', '.join(unknown)}: add them with "
                "AddedToken(..., normalized=False, single_word=False)."
            )
        patterns = (
            (_SPACES if token.lstrip else "")
            + f"({re.escape(token.content)})"
            + (_SPACES if token.rstrip else "")
            for token in sorted(known, key=lambda token: -len(token.content))
        )
        self._pattern = re.compile("|".join(patterns)) if known else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of added tokens, and the texts between them."""
        if self._pattern is None:
            yield text
            return
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self._ids[match[match.lastindex or 0]]
            end = match.end()
        if end < len(text) or not text:
            yield text[end:]
