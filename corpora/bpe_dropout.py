"""BPE-dropout: texts cut into tokens at random (Provilkov et al., 2020)."""

import json
import random
from collections.abc import Iterable
from itertools import pairwise

from transformers import PreTrainedTokenizerFast

# To cut a word takes longer than to look it up; of a frequent one so many cuts are enough.
_MOST = 64


class BpeDropout:
    """Encode texts by merges of which some are left out at random (Provilkov et al., 2020, 3.1).

    A word that is always one token teaches nothing of its parts; cut at random, it does. Only for
    training: what is translated is encoded by the tokenizer itself. The tokenizers library can do
    it, too, but not twice the same way: its random numbers take no seed.

    Args:
        tokenizer: one whose model is BPE, such as VaswaniTokenizer's kind "bpe".
        dropout: the probability by which a merge that is possible is passed over; the authors take
            0.1. With 0 the tokens are the tokenizer's.
        seed: another seed is other tokens; successive calls go on with its random numbers.
        target: add the special tokens of targets, not those of sources.

    Raises:
        ValueError: the tokenizer has another model, one with a setting that this class does not
            know, or added tokens that are not special; dropout is not between 0 and 1.
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
            raise ValueError(f"BPE-dropout needs a tokenizer of BPE, not of {model['type']}.")
        marks = ("continuing_subword_prefix", "end_of_word_suffix")
        for name in (*marks, "ignore_merges", "fuse_unk"):
            if model.get(name):
                raise ValueError(
                    f"BPE-dropout cannot cut words of a tokenizer with {name} {model[name]!r}."
                )
        added = [
            str(token) for token in tokenizer.added_tokens_decoder.values() if not token.special
        ]
        if added:
            raise ValueError(
                f"BPE-dropout would cut the added tokens {', '.join(added)}: it needs a tokenizer "
                "without any."
            )
        self._dropout = dropout
        self._random = random.Random(seed).random
        self._ids: dict[str, int] = model["vocab"]
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}
        known = tokenizer.init_kwargs.get("unknown_from")
        self._limit = len(self._ids) if known is None else known
        self._unknown = tokenizer.unk_token_id
        self._byte_fallback = model["byte_fallback"]
        self._cuts: dict[str, list[list[int]]] = {}
        text = {"text_target": "a"} if target else {"text": "a"}
        encoded = tokenizer(**text, return_special_tokens_mask=True)
        ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        self._before = ids[: special.index(0)]
        self._after = ids[len(ids) - special[::-1].index(0) :]

    def __call__(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode texts, special tokens added."""
        return [[*self._before, *self._encode(text), *self._after] for text in texts]

    def _encode(self, text: str) -> list[int]:
        if self._backend.normalizer:
            text = self._backend.normalizer.normalize_str(text)
        words = [text]
        if self._backend.pre_tokenizer:
            words = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token for word in words for token in self._tokens(word)]

    def _tokens(self, word: str) -> list[int]:
        """Cut a word anew, or, from a frequent one's `_MOST` cuts so far, take one at random."""
        known = self._cuts.setdefault(word, [])
        if len(known) == _MOST:
            return known[int(self._random() * _MOST)]
        ids = (self._ids.get(piece, self._unknown) for piece in self._cut(word))
        known.append([token if token < self._limit else self._unknown for token in ids])
        return known[-1]

    def _cut(self, word: str) -> list[str]:
        """Merge the characters of a word pair by pair, always the first learned not passed over."""
        pieces = [piece for character in word for piece in self._pieces(character)]
        ranks, never = self._ranks, len(self._ranks)
        possible = [ranks.get(pair, never) for pair in pairwise(pieces)]
        while (place := self._chosen(possible)) is not None:
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
            del possible[place]
            if place:
                possible[place - 1] = ranks.get((pieces[place - 1], pieces[place]), never)
            if place < len(possible):
                possible[place] = ranks.get((pieces[place], pieces[place + 1]), never)
        return pieces

    def _pieces(self, character: str) -> list[str]:
        """What merging starts from: of an unknown character its bytes, if there are such tokens."""
        if character not in self._ids and self._byte_fallback:
            return [f"<0x{byte:02X}>" for byte in character.encode()]
        return [character]

    def _chosen(self, possible: list[int]) -> int | None:
        """Where to merge next, of the merges' ranks at every place; None ends it."""
        dropout, draw, never = self._dropout, self._random, len(self._ranks)
        # Each is passed over by a draw of its own; those after the first that is not, need none.
        if possible and draw() >= dropout:
            places = [possible.index(min(possible))]
        else:
            places = sorted(range(len(possible)), key=possible.__getitem__)[1:]
            places = [place for place in places if draw() >= dropout][:1]
        return next((place for place in places if possible[place] != never), None)
