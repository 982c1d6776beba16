"""The model behind the demo page: translations, scores, word links and attention, with limits.

Invalid input raises a ValueError, whose text is shown on the page.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ..generation.links_vaswani import linked_units, links_of, words_of_tokens
from ..generation.translator import load_translator
from ..pictures.hoverable import hoverable_attention
from ..pictures.labels import token_labels
from .description import Description, describe

MAX_BEAMS = 10
MAX_LENGTH_PENALTY = 2.0
MAX_SENTENCES = 32
MAX_TOKENS = 500  # of one request
MAX_CHARACTERS = 200_000  # of a text whose tokens are counted

Side = Literal["text", "text_target"]  # the names of the tokenizers' arguments


@dataclass(frozen=True)
class Translation:
    """A translation, with its log-probability divided by the length penalty (section 6.1)."""

    text: str
    score: float


@dataclass(frozen=True)
class ScoredPair:
    """A given translation, token by token, and the model's own translation."""

    source: str
    target: str
    tokens: list[str]
    log_probs: torch.Tensor
    score: float
    best: Translation

    @property
    def total(self) -> float:
        """The log-probability of the whole translation, including its end."""
        return float(self.log_probs.sum())

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-probability of a token."""
        return float((-self.log_probs.mean()).exp())


@dataclass(frozen=True)
class LinkedText:
    """A piece of the target text, and the source word that it comes from.

    Args:
        text: the characters of one token, or the white space between two.
        word: the position of the source word, from 0. White space has none.
    """

    text: str
    word: int | None


@dataclass(frozen=True)
class WordLinks:
    """The source word of every target token, by the attention of the decoder.

    Args:
        words: the source words.
        pieces: the target text, cut at its tokens.
        pharaoh: links between words as "0-0 1-2", as `model.align` writes them.
    """

    words: list[str]
    pieces: list[LinkedText]
    pharaoh: str


class Translator:
    """A model with its tokenizers, from a folder or the Hub.

    The network is that of this package. Code in the folder is not run.

    Raises:
        OSError: the model does not exist, or has another architecture.
        ValueError: a file of the model is damaged.
    """

    def __init__(self, name: str) -> None:
        self.pipeline = load_translator(name)
        self.name = name
        self.model = self.pipeline.model
        self.tokenizer: PreTrainedTokenizerBase = self.pipeline.tokenizer
        self.target_tokenizer: PreTrainedTokenizerBase = self.pipeline.target_tokenizer
        self.description: Description = describe(name)

    def sizes(self) -> list[str]:
        """Return the sizes of the network, for the head of the page."""
        config = self.model.config
        return [
            f"{config.encoder_layers} + {config.decoder_layers} layers",
            f"{config.decoder_attention_heads} heads",
            f"d_model {config.d_model}",
            f"{config.decoder_vocab_size:,} tokens",
            f"{self.model.num_parameters() / 1e6:.2f} M parameters",
        ]

    def sentences(self, text: str, side: Side = "text") -> list[str]:
        """Return the lines of a text that are not blank.

        Raises:
            ValueError: all lines are blank, or there are too many lines or tokens.
        """
        # A browser may send half of a surrogate pair, which no tokenizer can read.
        text = text.encode("utf-8", "replace").decode("utf-8")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError(
                "Write a sentence to translate."
                if side == "text"
                else "Write your translation to see its score."
            )
        if len(lines) > MAX_SENTENCES:
            raise ValueError(
                f"The text has {len(lines):,} lines. This page takes at most {MAX_SENTENCES} "
                "sentences at a time, one per line."
            )
        size = f"{len(text):,} characters"
        if fits := len(text) <= MAX_CHARACTERS:
            tokens = sum(map(len, self._tokens(lines, side)))
            size, fits = f"{tokens:,} tokens", tokens <= MAX_TOKENS
        if not fits:
            raise ValueError(
                f"The text has {size}. This page takes at most {MAX_TOKENS} tokens at a time. "
                "Shorten the text, or translate a file with the command `vaswani translate`."
            )
        return lines

    def unfamiliar(self, lines: list[str]) -> list[str]:
        """Return the characters without an entry in the source vocabulary, in their order."""
        encoded = self.tokenizer(lines, return_offsets_mapping=True)
        found: dict[str, None] = {}
        for line, ids, spans in zip(
            lines, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            for token, (start, end) in zip(
                self.tokenizer.convert_ids_to_tokens(ids), spans, strict=True
            ):
                if token == self.tokenizer.unk_token or token.startswith("<0x"):
                    found[line[start:end].strip()] = None
        return [characters for characters in found if characters]

    def translate(
        self,
        lines: list[str],
        beams: float | None,
        length_penalty: float | None,
        count: float | None = 1,
    ) -> list[list[Translation]]:
        """Return the best translations of each line, at most `count`, best first.

        Hypotheses with different tokens can have the same text. Only the best of them is returned.

        Raises:
            ValueError: a setting is out of its range.
        """
        beams = _whole("The beam size", beams, MAX_BEAMS)
        count = _whole("The number of translations", count, MAX_BEAMS)
        own = self.model.generation_config.length_penalty or 0.0
        lowest, highest = min(0.0, own), max(MAX_LENGTH_PENALTY, own)
        if length_penalty is None or not lowest <= length_penalty <= highest:
            raise ValueError(
                f"The length penalty must be between {lowest:g} and {highest:g}, got "
                f"{_shown(length_penalty)}."
            )
        results = self.pipeline(
            iter(lines),  # a stream gives a list per line, also for one hypothesis
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=float(length_penalty),
            return_scores=True,
            progress=False,
        )
        return [_distinct(hypotheses)[:count] for hypotheses in results]

    def score(
        self,
        sources: list[str],
        targets: list[str],
        beams: float | None,
        length_penalty: float | None,
    ) -> list[ScoredPair]:
        """Return the probabilities of given translations, line by line.

        Raises:
            ValueError: the numbers of lines differ, or as `translate`.
        """
        if len(sources) != len(targets):
            raise ValueError(
                f"The text has {len(sources)} sentences and your translation {len(targets)}. Write "
                "one line for each sentence."
            )
        best = self.translate(sources, beams, length_penalty)
        scores = self.model.score(
            sources,
            targets,
            self.tokenizer,
            target_tokenizer=self.target_tokenizer,
            length_penalty=length_penalty,
        )
        ids = self._tokens(targets, "text_target")
        return [
            ScoredPair(
                source, target, token_labels(tokens, self.target_tokenizer), values, score, own[0]
            )
            for source, target, tokens, values, score, own in zip(
                sources,
                targets,
                ids,
                scores.log_probs,
                scores.sequences_scores.tolist(),
                best,
                strict=True,
            )
        ]

    def link(self, source: str, target: str) -> WordLinks:
        """Link every target token to the source word that the decoder attends to most.

        The attention is the mean of all layers and heads, as in `model.align`.
        """
        (weights,) = self.model.soft_align(
            [source], [target], self.tokenizer, target_tokenizer=self.target_tokenizer
        )  # (T, S)
        source_spans = self._spans(source, "text")
        target_spans = self._spans(target, "text_target")
        source_words = words_of_tokens(source, source_spans)
        target_words = words_of_tokens(target, target_spans)
        words = source.split()
        linked = linked_units(weights, source_words)
        if not any(linked):
            return WordLinks(words, [LinkedText(target, None)], "")
        pieces = _pieces(target, target_spans, [numbers[0] for numbers in linked])
        return WordLinks(words, pieces, links_of(linked, target_words))

    def attention(self, source: str, target: str) -> str:
        """Return the view of `hoverable_attention`, as HTML.

        Raises:
            ValueError: the translation is empty, or the pair is too long; names the limit.
        """
        if not target.strip():
            raise ValueError("The translation is empty, so there is no attention to show.")
        return hoverable_attention(
            self.model, self.tokenizer, source, target, target_tokenizer=self.target_tokenizer
        ).html

    def _encode(self, lines: list[str], side: Side, **settings: Any) -> Any:
        tokenizer = self.tokenizer if side == "text" else self.target_tokenizer
        return tokenizer(**{side: lines}, **settings)

    def _tokens(self, lines: list[str], side: Side) -> list[list[int]]:
        return self._encode(lines, side)["input_ids"]

    def _spans(self, line: str, side: Side) -> list[tuple[int, int]]:
        """Return the start and end of each token in a line."""
        return self._encode([line], side, return_offsets_mapping=True)["offset_mapping"][0]


def _distinct(hypotheses: list[dict[str, Any]]) -> list[Translation]:
    """Return the first hypothesis of every text."""
    found: dict[str, Translation] = {}
    for hypothesis in hypotheses:
        text = hypothesis["translation_text"]
        found.setdefault(text.strip(), Translation(text, hypothesis["score"]))
    return list(found.values())


def _pieces(text: str, spans: list[tuple[int, int]], words: list[int]) -> list[LinkedText]:
    """Cut a text at its tokens. White space belongs to no token.

    Several tokens can cover one character, such as its bytes. The last token gets the character.
    """
    owners: list[int | None] = [None] * len(text)
    for token, (start, end) in enumerate(spans):
        owners[start:end] = [token] * (end - start)
    owners = [None if text[place].isspace() else owner for place, owner in enumerate(owners)]
    pieces = []
    for owner, places in itertools.groupby(range(len(text)), key=owners.__getitem__):
        characters = "".join(text[place] for place in places)
        pieces.append(LinkedText(characters, None if owner is None else words[owner]))
    return pieces


def _whole(name: str, value: float | None, largest: int) -> int:
    if value is None or not 1 <= value <= largest or value != int(value):
        raise ValueError(f"{name} must be a whole number from 1 to {largest}, got {_shown(value)}.")
    return int(value)


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


__all__ = ["LinkedText", "ScoredPair", "Translation", "Translator", "WordLinks"]
