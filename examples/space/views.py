"""What the demo page shows, as HTML: translations, alignments, scores, heat maps and messages.

Whatever users and models write is escaped. Colours and sizes are those of style.css.
"""

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape

from translator import ScoredPair, Translation

# Neighbours in the circle of hues are this far apart, so that neighbours in a text look different.
_GOLDEN_ANGLE = 137.5


def heading(name: str, sizes: Sequence[str]) -> str:
    """The page's title: which model this is."""
    return (
        f'<h1>{escape(name)}</h1><p class="hint">'
        '<a href="https://arxiv.org/abs/1706.03762">Transformer</a> of '
        f"{escape(' · '.join(sizes))}</p>"
    )


def title(text: str) -> str:
    """The title of a part of the page."""
    return f"<h2>{escape(text)}</h2>"


def message(text: str) -> str:
    """What is wrong with the input, where its result would be."""
    return f'<p class="message" role="alert">{escape(text)}</p>'


def hint(text: str) -> str:
    """What will stand here."""
    return f'<p class="hint">{escape(text)}</p>'


def translations(lines: list[str], results: list[list[Translation]], unfamiliar: list[str]) -> str:
    """The n-best list of every line; a bar for the probability of each beside the best's."""
    parts = []
    for line, found in zip(lines, results, strict=True):
        items = []
        for translation in found:
            share = 100 * _exp(translation.score - found[0].score)
            items.append(
                f'<li><span class="text" dir="auto">{_text(translation.text)}</span>'
                f'<span class="score" style="--share: {share:.0f}%" title="log-probability over '
                f'the length penalty">{_number(translation.score)}</span></li>'
            )
        parts.append(
            f'<section><p class="source" dir="auto">{escape(line)}</p>'
            f'<ol class="translations">{"".join(items)}</ol></section>'
        )
    if unfamiliar:
        parts.append(
            '<p class="hint">Not in the vocabulary of this model, so do not expect it to be '
            f"translated: {', '.join(map(_quoted, unfamiliar))}.</p>"
        )
    return "".join(parts)


def alignment(source: str, target: str, links: Sequence[tuple[int, int]]) -> str:
    """Both sentences word by word, every target word in the colours of its source words."""
    sources, targets = source.split(), target.split()
    hues = [_GOLDEN_ANGLE * index % 360 for index in range(len(sources))]
    linked = [[s for s, t in links if t == index] for index in range(len(targets))]
    rows = (
        ("Source", [_word(word, [place], hues) for place, word in enumerate(sources)]),
        (
            "Target",
            [_word(word, places, hues) for word, places in zip(targets, linked, strict=True)],
        ),
    )
    shown = "".join(f'<dt>{name}</dt><dd dir="auto">{" ".join(words)}</dd>' for name, words in rows)
    pharaoh = " ".join(f"<code>{s}-{t}</code>" for s, t in links) or "none"
    return (
        f'<dl class="alignment">{shown}<dt>Links</dt><dd>{pharaoh}</dd></dl>'
        '<p class="hint">A target word has the colours and numbers of the source words that the '
        "decoder attends to most when it writes it, over all layers and heads. Links are pairs of "
        "source and target word, counted from 0 (Pharaoh format).</p>"
    )


def scores(pairs: Iterable[ScoredPair]) -> str:
    """Each translation token by token, from red to green by probability, and its sums."""
    parts = []
    for pair in pairs:
        tokens = "".join(
            f'<li style="--p: {_exp(value):.3f}"><span>{escape(token)}</span>'
            f"<small>{_number(value)}</small></li>"
            for token, value in zip(pair.tokens, pair.log_probs.tolist(), strict=True)
        )
        figures = (
            ("Log-probability", _number(pair.total)),
            ("Tokens", str(len(pair.tokens))),
            ("Perplexity", f"{pair.perplexity:,.2f}"),
            ("Score", _number(pair.score)),
        )
        cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
        parts.append(
            f'<section><p class="source" dir="auto">{escape(pair.source)}</p>'
            f'<ol class="tokens" aria-label="Tokens and their log-probabilities">{tokens}</ol>'
            f'<dl class="figures">{cells}</dl>'
            f'<p class="own">The model writes <q dir="auto">{_text(pair.best.text)}</q>, score '
            f"{_number(pair.best.score)}.</p></section>"
        )
    parts.append(
        '<p class="hint">The score is the log-probability over the length penalty, by which beam '
        "search ranks.</p>"
    )
    return "".join(parts)


def picture(svg: bytes, description: str) -> str:
    """A heat map as wide as its place at most, and in its own size while it has the focus."""
    data = base64.b64encode(svg).decode()
    return (
        f'<figure class="heat-map" tabindex="0"><img alt="{escape(description)}" '
        f'src="data:image/svg+xml;base64,{data}"></figure>'
        '<p class="hint enlarge">Tap the picture to enlarge it.</p>'
    )


def _word(word: str, places: Sequence[int], hues: Sequence[float]) -> str:
    """A word on the colours of the source words at these places, with their numbers."""
    colours = [f"hsl({hues[place]:.0f} var(--word-colour))" for place in places] or ["transparent"]
    share = 100 / len(colours)
    stripes = ", ".join(
        f"{colour} {index * share:.0f}% {(index + 1) * share:.0f}%"
        for index, colour in enumerate(colours)
    )
    numbers = ",".join(map(str, places)) or "none"
    return (
        f'<span class="word" style="background: linear-gradient(90deg, {stripes})">'
        f"{escape(word)}<sub>{numbers}</sub></span>"
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
