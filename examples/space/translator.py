"""What the demo page asks of a model: translate, score, align, draw, within limits.

Bad input is a ValueError whose text is for the reader of the page.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase, pipeline
from vaswani.pictures import plot_attention
from vaswani.pictures.labels import token_labels

from vaswani import VaswaniConfig, VaswaniTranslationPipeline

QUICKSTART = "runs/quickstart"
MAX_BEAMS = 10
MAX_LENGTH_PENALTY = 2.0
MAX_SENTENCES = 32
MAX_TOKENS = 500  # of one request
MAX_CHARACTERS = 200_000  # read to count its tokens
MAX_DRAWN = 100  # tokens on either side of a heat map: beyond, nobody can read the labels

Side = Literal["text", "text_target"]  # as the tokenizers call them
Kind = Literal["cross", "encoder", "decoder"]  # as plot_attention calls them


@dataclass(frozen=True)
class Translation:
    """A translation, and its log-probability over the length penalty (section 6.1)."""

    text: str
    score: float


@dataclass(frozen=True)
class ScoredPair:
    """A translation that somebody gave, token by token, beside the model's own."""

    source: str
    target: str
    tokens: list[str]
    log_probs: torch.Tensor
    score: float
    best: Translation

    @property
    def total(self) -> float:
        """The log-probability of the whole translation, its end included."""
        return float(self.log_probs.sum())

    @property
    def perplexity(self) -> float:
        """How many tokens the model hesitates between, on average."""
        return float((-self.log_probs.mean()).exp())


class Translator:
    """A checkpoint with its tokenizers, read from a folder or the Hub.

    No code of the checkpoint is run: the network is that of this package.

    Raises:
        SystemExit: there is no such checkpoint, or it is of another architecture.
    """

    def __init__(self, name: str) -> None:
        if name == QUICKSTART and not Path(name).is_dir():
            raise SystemExit(
                f"There is no model in {name}: `python examples/quickstart.py` makes it in four "
                "minutes. To show another, name its folder or Hub id: app.py MODEL, or the "
                "environment variable MODEL."
            )
        try:
            VaswaniConfig.from_pretrained(name)
            self.pipeline: Any = pipeline(
                "translation", model=name, pipeline_class=VaswaniTranslationPipeline
            )
        except (OSError, ValueError) as error:
            raise SystemExit(f"The model {name} cannot be loaded: {error}") from error
        self.name = name
        self.model: Any = self.pipeline.model
        self.tokenizer: PreTrainedTokenizerBase = self.pipeline.tokenizer
        self.target_tokenizer: PreTrainedTokenizerBase = self.pipeline.target_tokenizer

    def tokens(self, lines: list[str], side: Side) -> list[list[int]]:
        """Token ids of sentences on one side of the translation."""
        reader = self.tokenizer if side == "text" else self.target_tokenizer
        return reader(**{side: lines})["input_ids"]

    def sizes(self) -> list[str]:
        """The sizes of the network, as the page's head names them."""
        config = self.model.config
        return [
            f"{config.encoder_layers} + {config.decoder_layers} layers",
            f"{config.decoder_attention_heads} heads",
            f"d_model {config.d_model}",
            f"{len(self.target_tokenizer):,} tokens",
            f"{self.model.num_parameters() / 1e6:.2f} M parameters",
        ]

    def layers_and_heads(self, kind: Kind) -> tuple[int, int]:
        """How many of both a kind of attention has."""
        side = "encoder" if kind == "encoder" else "decoder"
        config = self.model.config
        return getattr(config, f"{side}_layers"), getattr(config, f"{side}_attention_heads")

    def sentences(self, text: str, side: Side = "text") -> list[str]:
        """The lines of a text that are not blank.

        Raises:
            ValueError: there are none, or too many lines or tokens; names the limit.
        """
        # Half of a surrogate pair, which a browser may send, is no character.
        text = text.encode("utf-8", "replace").decode("utf-8")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError(
                "There is nothing to translate yet: write a sentence."
                if side == "text"
                else "There is nothing to score yet: write your translation."
            )
        if len(lines) > MAX_SENTENCES:
            raise ValueError(
                f"These are {len(lines):,} sentences, one a line; this page takes at most "
                f"{MAX_SENTENCES} at a time."
            )
        size = f"{len(text):,} characters"
        if fits := len(text) <= MAX_CHARACTERS:
            tokens = sum(map(len, self.tokens(lines, side)))
            size, fits = f"{tokens:,} tokens", tokens <= MAX_TOKENS
        if not fits:
            raise ValueError(
                f"This text has {size}; this page takes at most {MAX_TOKENS} tokens at a time. "
                "Shorten it, or translate whole files with examples/translate.py."
            )
        return lines

    def unfamiliar(self, lines: list[str]) -> list[str]:
        """Characters without an entry in the source's vocabulary, in order of appearance."""
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
        """The `count` best translations of every line, best first; no more than the beam is wide.

        Raises:
            ValueError: a setting is out of its range.
        """
        beams = _whole("The beam size", beams, MAX_BEAMS)
        count = min(_whole("The number of translations", count, MAX_BEAMS), beams)
        if length_penalty is None or not 0 <= length_penalty <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"The length penalty must lie between 0 and {MAX_LENGTH_PENALTY:g}, got "
                f"{_shown(length_penalty)}."
            )
        results = self.pipeline(
            iter(lines),  # of a list with one translation a line, the pipeline gives no lists
            num_beams=beams,
            num_return_sequences=count,
            length_penalty=float(length_penalty),
            return_scores=True,
            progress=False,
        )
        return [
            [Translation(found["translation_text"], found["score"]) for found in translations]
            for translations in results
        ]

    def score(
        self,
        sources: list[str],
        targets: list[str],
        beams: float | None,
        length_penalty: float | None,
    ) -> list[ScoredPair]:
        """What the model makes of given translations, line by line.

        Raises:
            ValueError: there is not one translation for every source, or as `translate`.
        """
        if len(sources) != len(targets):
            raise ValueError(
                f"The text has {len(sources)} sentences and your translation {len(targets)}: write "
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
        ids = self.tokens(targets, "text_target")
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

    def align(self, source: str, target: str) -> list[tuple[int, int]]:
        """Links between the words of a pair: positions in source and target, from 0."""
        (links,) = self.model.align(
            [source], [target], self.tokenizer, target_tokenizer=self.target_tokenizer
        )
        return [tuple(map(int, link.split("-"))) for link in links.split()]

    def draw(
        self, source: str, target: str, kind: Kind, layer: str = "mean", head: str = "mean"
    ) -> bytes:
        """The heat map of `plot_attention`, as an SVG file; layer and head may also be "all".

        Raises:
            ValueError: a side is empty or has too many tokens to be read; names the limit.
        """
        if not target.strip():
            raise ValueError("The translation is empty: there is nothing to draw.")
        layers, heads = self.layers_and_heads(kind)
        longest = max(
            len(self.tokens([source], "text")[0]), len(self.tokens([target], "text_target")[0])
        )
        if longest > MAX_DRAWN:
            raise ValueError(
                f"A heat map has room for {MAX_DRAWN} tokens on either side; this pair has "
                f"{longest}."
            )
        figure = plot_attention(
            self.model,
            self.tokenizer,
            source,
            target,
            layers=_parts(layer, layers),
            heads=_parts(head, heads),
            kind=kind,
            target_tokenizer=self.target_tokenizer,
        )
        file = io.BytesIO()
        figure.savefig(file, format="svg")
        return file.getvalue()


def _whole(name: str, value: float | None, largest: int) -> int:
    if value is None or not 1 <= value <= largest or value != int(value):
        raise ValueError(f"{name} must be a whole number from 1 to {largest}, got {_shown(value)}.")
    return int(value)


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def _parts(name: str, count: int) -> int | range | None:
    """Layers or heads as plot_attention takes them."""
    return {"mean": None, "all": range(count)}[name] if name in ("mean", "all") else int(name)
