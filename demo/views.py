"""The results on the demo page, as HTML. Text of users and models is escaped.

Colours and sizes are those of style.css.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from .description import Description
from .translator import LinkedText, ScoredPair, Translation, WordLinks

# Neighbours in the circle of hues are this far apart, so that neighbours in a text look different.
_GOLDEN_ANGLE = 137.5


def heading(name: str, description: Description, sizes: Sequence[str]) -> str:
    """The title of the page: what the model translates, and what it was trained on."""
    direction = description.direction
    named = f"<code>{escape(name)}</code>"
    known = description.training_data
    pairs = f" ({description.pairs:,} sentence pairs)" if description.pairs else ""
    if known and direction:
        origin = f"{named} was trained on {escape(known)}{pairs}."
    elif known:
        origin = f"Trained on {escape(known)}{pairs}. The model's files do not name its languages."
    elif direction:
        origin = f"The files of {named} do not say what it was trained on."
    else:
        origin = "The model's files do not say what it translates, or what it was trained on."
    return (
        f'<h1>{escape(direction or name)}</h1><p class="origin">{origin}</p><p class="hint">'
        '<a href="https://arxiv.org/abs/1706.03762">Transformer</a>: '
        f"{escape(' · '.join(sizes))}</p>"
    )


def title(text: str) -> str:
    """The title of a panel."""
    return f"<h2>{escape(text)}</h2>"


def message(text: str) -> str:
    """An error, in the place of the result."""
    return f'<p class="message" role="alert">{escape(text)}</p>'


def hint(text: str) -> str:
    """An explanation in pale type."""
    return f'<p class="hint">{escape(text)}</p>'


def translations(lines: list[str], results: list[list[Translation]], unfamiliar: list[str]) -> str:
    """The best translations of every line with their scores. A bar compares each with the best."""
    parts = []
    for line, found in zip(lines, results, strict=True):
        rows = "".join(_translation(translation, found[0]) for translation in found)
        parts.append(
            f'<section><p class="source" dir="auto">{escape(line)}</p><table class="translations">'
            f"<thead><tr><th>Translation</th><th>Score</th></tr></thead><tbody>{rows}</tbody>"
            "</table></section>"
        )
    if unfamiliar:
        parts.append(
            '<p class="hint">The vocabulary of this model does not contain '
            f"{', '.join(map(_quoted, unfamiliar))}.</p>"
        )
    parts.append(
        hint(
            "Score: log-probability divided by the length penalty. The best possible score is 0. "
            "The bar compares each translation with the best one."
        )
    )
    return "".join(parts)


def word_links(links: WordLinks) -> str:
    """Source words in different colours, and target tokens in the colours of their words."""
    source = " ".join(_linked(word, place) for place, word in enumerate(links.words))
    target = "".join(_piece(piece) for piece in links.pieces)
    pharaoh = " ".join(f"<code>{link}</code>" for link in links.pharaoh.split()) or "none"
    return (
        '<dl class="links">'
        f'<dt>Source</dt><dd dir="auto">{source}</dd>'
        f'<dt>Target</dt><dd dir="auto">{target}</dd>'
        f"<dt>Links</dt><dd>{pharaoh}</dd></dl>"
        '<p class="hint">Each target token has the colour and number of the source word that the '
        "decoder attends to most, on average over all layers and heads. Links are pairs of source "
        "and target word, counted from 0 (Pharaoh format).</p>"
    )


def scores(pairs: Iterable[ScoredPair]) -> str:
    """Each translation token by token, from red to green by probability, and its totals."""
    parts = [_scored(pair) for pair in pairs]
    parts.append(
        hint(
            "The number under a token is its log-probability. Perplexity is the average number of "
            "tokens that the model hesitates between. Beam search ranks by the score, which is the "
            "log-probability divided by the length penalty."
        )
    )
    return "".join(parts)


def _translation(translation: Translation, best: Translation) -> str:
    share = 100 * _exp(translation.score - best.score)
    return (
        f'<tr><td class="text" dir="auto">{_text(translation.text)}</td>'
        f'<td class="score" style="--share: {share:.0f}%">{_number(translation.score)}</td></tr>'
    )


def _scored(pair: ScoredPair) -> str:
    tokens = "".join(
        f'<li style="--p: {_exp(value):.3f}"><span>{escape(token)}</span>'
        f"<small>{_number(value)}</small></li>"
        for token, value in zip(pair.tokens, pair.log_probs.tolist(), strict=True)
    )
    figures = (
        ("Score", _number(pair.score)),
        ("Log-probability", _number(pair.total)),
        ("Perplexity", f"{pair.perplexity:,.2f}"),
        ("Tokens", str(len(pair.tokens))),
    )
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    own = (
        "The model writes the same."
        if pair.best.text == pair.target
        else f'The model writes <q dir="auto">{_text(pair.best.text)}</q> with the score '
        f"{_number(pair.best.score)}."
    )
    return (
        f'<section><p class="source" dir="auto">{escape(pair.source)}</p>'
        f'<ol class="tokens" aria-label="Tokens and their log-probabilities">{tokens}</ol>'
        f'<dl class="figures">{cells}</dl><p class="own">{own}</p></section>'
    )


def _piece(piece: LinkedText) -> str:
    return escape(piece.text) if piece.word is None else _linked(piece.text, piece.word)


def _linked(text: str, word: int) -> str:
    """A text in the colour of a source word, with its number."""
    hue = _GOLDEN_ANGLE * word % 360
    return (
        f'<span class="token" data-word="{word}" style="--hue: {hue:.0f}">'
        f"{escape(text)}<sub>{word}</sub></span>"
    )


def _text(text: str) -> str:
    return escape(text) if text.strip() else "<i>(empty)</i>"


def _quoted(text: str) -> str:
    return f"“{escape(text)}”"


def _number(value: float) -> str:
    """A log-probability with a true minus sign, and no minus before zero."""
    return f"{value:.3f}".replace("-0.000", "0.000").replace("-", "\N{MINUS SIGN}")


def _exp(value: float) -> float:
    return math.exp(min(value, 0))


__all__ = ["heading", "hint", "message", "scores", "title", "translations", "word_links"]
