"""Fast encoding of texts into token ids, with one dictionary lookup per word."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..tokenization.tokenization_vaswani import separates_words

# Longer words are not cached, because they are rare and would fill the cache.
_LONGEST_CACHED = 64
_CACHED_WORDS = 200_000


def id_type(vocabulary_size: int) -> np.dtype:
    """Return the smallest unsigned integer type that holds every id of a vocabulary."""
    return np.min_scalar_type(max(vocabulary_size - 1, 0))


class TextEncoder:
    """Encode texts into the ids that the tokenizer returns, several times faster.

    A subword tokenizer of this package never joins two words, so the ids of a text are the ids of
    its words. Each word is encoded once and cached. Other tokenizers encode whole texts.

    Args:
        tokenizer: any tokenizer of transformers.
        target: add the special tokens of targets instead of those of sources.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, target: bool = False) -> None:
        self.dtype = id_type(len(tokenizer))
        self._tokenizer, self._target = tokenizer, target
        self._by_word = separates_words(tokenizer)
        if self._by_word:
            before, after = special_ids(tokenizer, target)
            self._before, self._after = self._bytes(before), self._bytes(after)
            self._words = _WordIds(tokenizer, self.dtype)
            self._added = [
                str(token) for token in tokenizer.added_tokens_decoder.values() if not token.special
            ]

    def __call__(self, texts: list[str]) -> list[bytes]:
        """Return the ids of every text with special tokens, as the bytes of a `dtype` array."""
        if not self._by_word:
            return [self._bytes(ids) for ids in self._ids(texts)] if texts else []
        words = self._words
        words.limit()
        return [
            b"".join([self._before, *map(words.__getitem__, text.split(" ")), self._after])
            if text and not self._has_added_token(text)
            else self._bytes(self._ids([text])[0])
            for text in texts
        ]

    def _has_added_token(self, text: str) -> bool:
        return any(token in text for token in self._added)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if self._target:
            return self._tokenizer(text_target=texts)["input_ids"]
        return self._tokenizer(texts)["input_ids"]

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return np.array(ids, dtype=self.dtype).tobytes()


class _WordIds(dict[str, bytes]):
    """Cache of the ids of words. A word is encoded at its first use."""

    def __init__(self, tokenizer: Any, dtype: np.dtype) -> None:
        super().__init__()
        self._backend = tokenizer.backend_tokenizer
        self._dtype = dtype
        self._known_ids = tokenizer.known_ids

    def __missing__(self, word: str) -> bytes:
        # Splitting at spaces gives empty words. The text " " is two of them, so an empty word has
        # half of the ids of " ".
        ids = self._backend.encode(word or " ", add_special_tokens=False).ids
        if not word:
            ids = ids[: len(ids) // 2]
        encoded = np.array(self._known_ids(ids), dtype=self._dtype).tobytes()
        if len(word) <= _LONGEST_CACHED:
            self[word] = encoded
        return encoded

    def limit(self) -> None:
        """Clear the cache when it has too many words, so that memory stays bounded."""
        if len(self) > _CACHED_WORDS:
            self.clear()


def special_ids(tokenizer: Any, target: bool) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a tokenizer puts before and after a text."""
    text = {"text_target": "a"} if target else {"text": "a"}
    encoded = tokenizer(**text, return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    return ids[: special.index(0)], ids[len(ids) - special[::-1].index(0) :]


def fingerprint_of(tokenizer: Any) -> str:
    """Return a text of all settings that determine the ids of a tokenizer."""
    settings = {name: tokenizer.init_kwargs.get(name) for name in ("source_eos", "unknown_from")}
    # The ids of an empty text are the special tokens.
    settings["special_ids"] = [tokenizer("")["input_ids"], tokenizer(text_target="")["input_ids"]]
    settings["split_special_tokens"] = getattr(tokenizer, "split_special_tokens", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        settings["vocabulary"] = sorted(tokenizer.get_vocab().items())
    state = backend.to_str() if backend is not None else type(tokenizer).__name__
    return json.dumps(settings, sort_keys=True) + state


__all__ = ["TextEncoder", "fingerprint_of", "id_type", "special_ids"]
