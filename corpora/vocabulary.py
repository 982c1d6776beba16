"""Learn a vocabulary once, from a sample of the corpora, and cache it."""

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from ..configuration.extras import needs
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .atomic_folder import new_folder
from .corpus import Corpus, tag_token
from .locking import MachineLock
from .reading import DataError, Pair, strictly

with needs("vaswani[train]"):
    import xxhash

_VERSION = 1


def train_vocabulary(
    corpora: Sequence[Corpus],
    settings: dict[str, Any],
    cache: Path,
    lines: int,
    seed: int,
    skip_unreadable: bool = False,
    say: Callable[[str], None] = print,
) -> VaswaniTokenizer:
    """Learn a vocabulary that both sides of all corpora share, unless the cache has it.

    Several processes may call this function at the same time. One process learns the vocabulary,
    and the others wait for it.

    Args:
        corpora: corpora to learn from. Their language tags become tokens.
        settings: arguments of `VaswaniTokenizer.train_from_iterator`.
        cache: folder of cached vocabularies.
        lines: about the largest number of source and target lines to learn from, over all corpora.
            If there are more, pairs are sampled at random.
        seed: seed of the sample.
        skip_unreadable: skip pairs that cannot be read.
        say: function that receives messages.

    Raises:
        DataError: a corpus cannot be read.
        ValueError: a setting is invalid.
    """
    contents = [corpus.content() for corpus in corpora]
    key = xxhash.xxh3_128_hexdigest(
        repr((_VERSION, contents, sorted(settings.items()), lines, seed)).encode()
    )
    folder = cache / f"vocabulary-{key}"
    if folder.exists():
        with contextlib.suppress(OSError, ValueError):
            # Without the lock, so that a read-only cache works.
            return VaswaniTokenizer.from_pretrained(folder)
    cache.mkdir(parents=True, exist_ok=True)
    with MachineLock(cache / f"vocabulary-{key}.lock", say):
        if folder.exists():
            try:
                return VaswaniTokenizer.from_pretrained(folder)
            except (OSError, ValueError) as flaw:
                say(f"{folder} is damaged ({flaw}): learning the vocabulary again.")
                shutil.rmtree(folder)
        pairs = _chosen_pairs(corpora, -(-lines // 2), seed, skip_unreadable)
        tokenizer = VaswaniTokenizer.train_from_iterator(
            chain.from_iterable(pairs), show_progress=False, **settings
        )
        tags = dict.fromkeys(corpus.tag for corpus in corpora if corpus.tag)
        tokenizer.add_tokens(
            [AddedToken(tag_token(tag), rstrip=True, normalized=False) for tag in tags]
        )
        with new_folder(folder) as partial:
            tokenizer.save_pretrained(partial)
    return tokenizer


def _chosen_pairs(
    corpora: Sequence[Corpus], limit: int, seed: int, skip_unreadable: bool
) -> Iterator[Pair]:
    """Return all pairs, or a random sample of about `limit` pairs if there are more."""

    def pairs() -> Iterator[Pair]:
        for corpus in corpora:
            found = corpus.pairs()
            if skip_unreadable:
                yield from (pair for pair in found if not isinstance(pair, DataError))
            else:
                yield from strictly(found)

    number = sum(1 for _ in pairs())
    if not number:
        raise DataError(f"{', '.join(corpus.name for corpus in corpora)}: no sentence pairs.")
    if number <= limit:
        return pairs()
    draw = random.Random(seed).random
    return (pair for pair in pairs() if draw() * number < limit)


__all__ = ["train_vocabulary"]
