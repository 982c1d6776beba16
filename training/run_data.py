"""The data of a run: vocabulary, prepared training pairs, validation and test pairs."""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..corpora.bpe_dropout import BpeDropout
from ..corpora.corpus import Corpus, parse_corpora, tag_token, tagged
from ..corpora.encoding import TextEncoder
from ..corpora.filtering import Rules, TextFilter
from ..corpora.mapped import MappedPairs
from ..corpora.mixing import Mixture, shares_of
from ..corpora.names import data_set_name, without_weight
from ..corpora.on_the_fly import OnTheFlyPairs
from ..corpora.preparing import Prepared, default_cache, describe_dropped, prepare
from ..corpora.reading import DataError, Pair, read_pairs
from ..corpora.text_stream import TextStream
from ..corpora.vocabulary import train_vocabulary
from ..tokenization.tokenization_vaswani import VaswaniTokenizer

# Arguments of the tokenizer's trainer, and the options of the command that set them.
_VOCABULARY = {
    "kind": "tokenizer_kind",
    "vocab_size": "vocab_size",
    "pattern": "pattern",
    "space_after": "space_after",
    "split_punctuation": "split_punctuation",
}


class RunData:
    """The data that the options of `vaswani train` and `vaswani prepare` name.

    Args:
        options: options of the command line.
        say: function that receives messages.

    Raises:
        DataError: an option names no data, or contradicts another option.
    """

    def __init__(self, options: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say
        self.cache = Path(options.data_cache) if options.data_cache else default_cache()
        self.rules = Rules(
            max_length=options.max_length,
            max_ratio=options.max_ratio,
            drop_empty=options.drop_empty,
            drop_identical=options.drop_identical,
            drop_duplicates=options.drop_duplicates,
            scripts=tuple(options.scripts) if options.scripts else None,
            function=options.filter,
            skip_unreadable=options.skip_unreadable,
        )
        TextFilter(self.rules)
        self.corpora = parse_corpora(options.train, options.columns, "train", options.tag)
        weights = [corpus.weight for corpus in self.corpora]
        try:
            shares_of([1] * len(weights), weights, options.temperature)
        except ValueError as error:
            raise DataError(str(error)) from error
        if self.is_mixed and options.segmentations > 1:
            raise DataError("Weights (=WEIGHT) and --temperature work with --segmentations 1 only.")

    @property
    def is_mixed(self) -> bool:
        """Whether the shares of the corpora in an epoch differ from their sizes."""
        return bool(self.options.temperature) or any(
            corpus.weight is not None for corpus in self.corpora
        )

    def learn_vocabulary(self) -> VaswaniTokenizer:
        """Learn the vocabulary, or load it from the cache.

        Raises:
            DataError: the data cannot be read.
            ValueError: an option is invalid.
        """
        options = self.options
        return train_vocabulary(
            self.corpora,
            {argument: getattr(options, option) for argument, option in _VOCABULARY.items()},
            self.cache,
            options.vocabulary_lines,
            options.seed,
            self.rules.skip_unreadable,
            self.say,
        )

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase
    ) -> "TrainingPairs":
        """Tokenise all corpora, or load them from the cache.

        Raises:
            DataError: the data cannot be read, or the tokenizer does not know a language tag.
            OSError: the disk is full.
        """
        self._require_tags(tokenizer)
        dropouts = None
        if self.options.bpe_dropout:
            dropouts = self._bpe_dropouts(tokenizer, target_tokenizer)
        parts = [
            prepare(
                corpus,
                tokenizer,
                target_tokenizer,
                self.rules,
                self.cache,
                keep_texts=bool(self.options.bpe_dropout),
                processes=self.options.prepare_processes,
                say=self.say,
            )
            for corpus in self.corpora
        ]
        weights = [corpus.weight for corpus in self.corpora]
        shares = shares_of([part.kept for part in parts], weights, self.options.temperature)
        pairs = TrainingPairs(parts, shares, self.options.seed)
        if dropouts:
            encoders = TextEncoder(tokenizer), TextEncoder(target_tokenizer, target=True)
            pairs.cut_on_the_fly(encoders, dropouts, self.options.segmentations)
        return pairs

    def stream(
        self, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase
    ) -> TextStream:
        """Return all corpora as a stream.

        Raises:
            DataError: the tokenizer does not know a language tag.
        """
        self._require_tags(tokenizer)
        return TextStream(self.corpora, tokenizer, target_tokenizer, self.rules, self.options.seed)

    def _require_tags(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for tag in {corpus.tag for corpus in self.corpora if corpus.tag}:
            token = tokenizer.convert_tokens_to_ids(tag_token(tag))
            if token in (None, tokenizer.unk_token_id):
                raise DataError(
                    f"--tag {tag}: the vocabulary has no token {tag_token(tag)}. Train a model "
                    "with this tag from the start, or fine-tune one that knows it."
                )

    def _bpe_dropouts(self, tokenizer: Any, target_tokenizer: Any) -> tuple[BpeDropout, BpeDropout]:
        dropout, seed = self.options.bpe_dropout, self.options.seed
        try:
            return (
                BpeDropout(tokenizer, dropout, 2 * seed),
                BpeDropout(target_tokenizer, dropout, 2 * seed + 1, target=True),
            )
        except ValueError as error:
            raise DataError(f"--bpe-dropout: {error}") from error

    def corpora_of(self, option: str, split: str) -> list[Corpus]:
        """Return the corpora of --valid or --test."""
        options, words = self.options, getattr(self.options, option)
        return parse_corpora(words or [], options.columns, split, options.tag if words else [])

    def evaluation_pairs(self, option: str, split: str) -> list[list[Pair]]:
        """Return the pairs of --valid or --test: one list per corpus, with its language tag."""
        return [
            list(tagged(self._pairs_of(corpus), corpus.tag))
            for corpus in self.corpora_of(option, split)
        ]

    def _pairs_of(self, corpus: Corpus) -> list[Pair]:
        return [
            pair
            for shard in corpus.shards
            for pair in read_pairs(shard, corpus.columns, corpus.default_split)
        ]


class TrainingPairs:
    """Several prepared corpora as one data set."""

    def __init__(self, parts: list[Prepared], shares: list[float] | None, seed: int) -> None:
        self.parts = parts
        self.read = sum(part.read for part in parts)
        self.kept = sum(part.kept for part in parts)
        self.dropped: Counter[str] = Counter()
        for part in parts:
            self.dropped.update(part.dropped)
        sizes = [part.kept for part in parts]
        self.mixture = Mixture(sizes, shares, seed) if shares else None

        files = [path for part in parts for path in part.files]
        name = "-".join(part.folder.name for part in parts)
        pairs = MappedPairs.from_files(files, name)
        self.dataset: Any = pairs
        self.lengths = None if "source" in pairs.column_names else pairs.token_counts()

    def cut_on_the_fly(
        self,
        encoders: tuple[TextEncoder, TextEncoder],
        dropouts: tuple[BpeDropout, BpeDropout],
        repeats: int,
    ) -> None:
        """Tokenise pairs when batches are made. An epoch has each pair `repeats` times."""
        self.dataset = OnTheFlyPairs(self.dataset, encoders, dropouts, repeats)
        self.lengths = self.dataset.lengths

    def describe_dropped(self) -> str:
        """Return a sentence with the number of pairs that each rule left out."""
        return (
            f"Dropped {sum(self.dropped.values()):,} of {self.read:,} pairs: "
            f"{describe_dropped(self.dropped)}."
        )

    def report(self) -> dict[str, Any]:
        """Return the counts for a results file."""
        return {"read": self.read, "kept": self.kept, "dropped": dict(self.dropped)}


def local_places(options: argparse.Namespace) -> list[str]:
    """Return the model and the data that are files or folders here. Others are on the Hub."""
    named = [options.model, *(options.train or ()), *(options.valid or ()), *(options.test or ())]
    return [
        name
        for name in filter(None, named)
        if Path(name).exists() or Path(data_set_name(without_weight(name)).place or name).exists()
    ]


__all__ = ["RunData", "TrainingPairs", "local_places"]
