"""The demo page: its layout, its events, and the server behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..configuration.extras import needs
from ..pictures.hoverable import attention_script
from . import views
from .translator import MAX_BEAMS, Translation, Translator

with needs("vaswani[demo]"):
    import gradio as gr

logger = logging.get_logger(__name__)

_FOLDER = Path(__file__).resolve().parent
_MAX_EXAMPLES = 4
_LONGEST_EXAMPLE = 200  # characters
# These fonts are part of Gradio, so the browser asks no other server. Other weights of them have
# no Latin letters.
_SANS = gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700))
_MONO = gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700))
_THEME = gr.themes.Base(
    primary_hue="indigo",
    neutral_hue="slate",
    radius_size="lg",
    font=[_SANS, "system-ui", "sans-serif"],
    font_mono=[_MONO, "ui-monospace", "monospace"],
).set(  # enough contrast to be read
    body_text_color_subdued="*neutral_500",
    body_text_color_subdued_dark="*neutral_400",
    block_info_text_color="*neutral_500",
    block_info_text_color_dark="*neutral_400",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
)
_HINTS = {
    "translations": "The best translations appear here.",
    "attention": "The attention of the model appears here, token by token.",
    "links": "The source word of each target token appears here.",
    "scores": "The probability of your translation appears here, token by token.",
}


@dataclass(frozen=True)
class Pair:
    """A sentence and one of its translations, whose attention can be shown."""

    name: str
    source: str
    target: str


class Handlers:
    """Functions behind the events of the page: values of components in, values of components out.

    A handler that fails shows its message in its own panel, and leaves the other panels as they
    are.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def translate(self, text: str, beams: float, length_penalty: float, count: float) -> tuple:
        """Translations, an empty score panel, and the pairs whose attention can be shown."""
        try:
            lines = self.translator.sentences(text)
            results = self.translator.translate(lines, beams, length_penalty, count)
            shown = views.translations(lines, results, self.translator.unfamiliar(lines))
        except Exception as error:
            return _failure(error), gr.skip(), gr.skip(), gr.skip()
        pairs = [
            Pair(f"{line} → {translation.text}", line, translation.text)
            for line, found in zip(lines, results, strict=True)
            for translation in found
        ]
        return shown, views.hint(_HINTS["scores"]), *_choices(pairs)

    def score(self, text: str, own: str, beams: float, length_penalty: float) -> tuple:
        """Scores of the reader's translations, and the pairs whose attention can be shown."""
        try:
            sources = self.translator.sentences(text)
            targets = self.translator.sentences(own, "text_target")
            scored = self.translator.score(sources, targets, beams, length_penalty)
            shown = views.scores(scored)
        except Exception as error:
            return _failure(error), gr.skip(), gr.skip()
        pairs = [
            Pair(f"{whose}: {pair.source} → {target}", pair.source, target)
            for pair in scored
            for whose, target in _translations_by_writer(pair.target, pair.best)
        ]
        return shown, *_choices(pairs)

    def clear(self) -> tuple:
        """Empty panels: nothing of an earlier text stays beside a new one."""
        panels = ("translations", "scores", "attention", "links")
        return *(views.hint(_HINTS[name]) for name in panels), "", *_choices([])

    def link(self, pairs: list[Pair], chosen: int | None) -> str:
        """The word links of the chosen pair."""
        if chosen is None:
            return views.hint(_HINTS["links"])
        try:
            return views.word_links(
                self.translator.link(pairs[chosen].source, pairs[chosen].target)
            )
        except Exception as error:
            return _failure(error)

    def attend(self, pairs: list[Pair], chosen: int | None) -> str:
        """The attention of the chosen pair."""
        if chosen is None:
            return views.hint(_HINTS["attention"])
        try:
            return self.translator.attention(pairs[chosen].source, pairs[chosen].target)
        except Exception as error:
            return _failure(error)


def build_page(model: str) -> gr.Blocks:
    """Build the page of one model.

    Args:
        model: a folder or Hub id.

    Raises:
        OSError: there is no such model, or it is of another architecture.
        ValueError: a file of the model is damaged.
    """
    return _page(Translator(str(model)))


def serve(model: str, *, port: int | None = None) -> None:
    """Show the page of one model until the process is stopped.

    Args:
        model: a folder or Hub id.
        port: the port of the server. None takes the first free one from 7860.

    Raises:
        OSError: as `build_page`; or the port is in use.
        ValueError: as `build_page`.
    """
    build_page(model).launch(
        server_port=port,
        theme=_THEME,
        css_paths=_FOLDER / "style.css",
        js=(_FOLDER / "page.js").read_text(encoding="utf-8"),
        head=f"<script>{attention_script()}</script>",
        footer_links=[],
        run_history=False,  # texts of visitors are not stored
        ssr_mode=False,
    )


@dataclass(frozen=True)
class _Components:
    """The components of the page that events read and write."""

    text: gr.Textbox
    example: Any  # the event that an example is chosen, if there are examples
    go: gr.Button
    beams: gr.Number
    length_penalty: gr.Number
    count: gr.Number
    translations: gr.HTML
    pairs: gr.State
    chosen: gr.Dropdown
    attention: gr.HTML
    links: gr.HTML
    own: gr.Textbox
    judge: gr.Button
    scores: gr.HTML


def _page(translator: Translator) -> gr.Blocks:
    title = f"{translator.description.direction or translator.name} · Transformer"
    with gr.Blocks(title=title, analytics_enabled=False) as page:
        with gr.Row(elem_id="top"):
            gr.HTML(views.heading(translator.name, translator.description, translator.sizes()))
            gr.Button("Light or dark", size="sm", scale=0, elem_id="theme")
        components = _Components(**_question(translator), **_exploration())
        _connect(page, components, Handlers(translator))
    return page


def _question(translator: Translator) -> dict[str, Any]:
    """The text with its settings, and the panel of its translations."""
    samples = [line for line in translator.description.samples if len(line) <= _LONGEST_EXAMPLE]
    samples = samples[:_MAX_EXAMPLES]
    components: dict[str, Any] = {"example": None}
    with gr.Row():
        with gr.Column(elem_classes="half"):
            components["text"] = gr.Textbox(
                samples[0] if samples else "",
                label="Text",
                info="One sentence per line. Ctrl+Enter translates.",
                lines=3,
                max_lines=12,
                elem_id="text",
            )
            if samples:
                examples = gr.Examples(
                    samples,
                    components["text"],
                    label="Examples from the test set",
                    cache_examples=False,
                    api_visibility="private",
                )
                components["example"] = examples.load_input_event
            components["go"] = gr.Button("Translate", variant="primary", elem_id="translate")
            components |= _settings(translator.model.generation_config)
        with gr.Column(elem_classes=["half", "card"]):
            components["translations"] = _panel("Translations", "translations")
    return components


def _settings(search: Any) -> dict[str, Any]:
    """The settings of beam search, with the model's own as defaults."""
    alpha = 1.0 if search.length_penalty is None else search.length_penalty
    with gr.Row():
        components = {
            name: gr.Number(value, label=label, step=step, min_width=80, elem_id=name)
            for name, label, value, step in (
                ("beams", "Beam size", min(search.num_beams or 4, MAX_BEAMS), 1),
                ("length_penalty", "Length penalty", alpha, 0.1),
                ("count", "Translations", 3, 1),
            )
        }
    gr.HTML(
        views.hint(
            "A beam size of 1 is greedy search. A larger length penalty gives longer translations. "
            "A search finds at most as many translations as its beam size."
        )
    )
    return components


def _exploration() -> dict[str, Any]:
    """The choice of a pair, its attention and word links, and the reader's own translation."""
    components: dict[str, Any] = {"pairs": gr.State([])}
    components["chosen"] = gr.Dropdown(
        [],
        label="Sentence pair",
        info="The attention and the word links of this pair are shown below.",
        filterable=False,
        visible=False,
        elem_id="chosen",
    )
    with gr.Row():
        with gr.Column(elem_classes=["wide", "card"]):
            components["attention"] = _panel("Attention", "attention")
        with gr.Column(elem_classes="narrow"):
            with gr.Column(elem_classes="card"):
                components["links"] = _panel("Word links", "links")
            with gr.Column(elem_classes="card"):
                gr.HTML(views.title("Score your own translation"))
                components["own"] = gr.Textbox(
                    label="Your translation",
                    info="One line for each line of the text. Ctrl+Enter scores it.",
                    lines=2,
                    max_lines=12,
                    elem_id="own",
                )
                components["judge"] = gr.Button("Score", elem_id="score")
                components["scores"] = gr.HTML(views.hint(_HINTS["scores"]), elem_id="scores")
    return components


def _panel(title: str, name: str) -> gr.HTML:
    """The place of a result, with a title above it."""
    gr.HTML(views.title(title))
    return gr.HTML(views.hint(_HINTS[name]), elem_id=name)


def _connect(page: gr.Blocks, components: _Components, handlers: Handlers) -> None:
    """Let events call handlers, one at a time: all requests share one model and its cores."""
    c = components
    settings = [c.beams, c.length_penalty, c.count]
    queued: dict[str, Any] = {
        "concurrency_limit": 1,
        "concurrency_id": "model",
        "api_visibility": "private",
    }

    def explore(event: Callable) -> None:
        """Show the chosen pair after an event. A failure of one panel does not stop the other."""
        event(handlers.attend, [c.pairs, c.chosen], c.attention, **queued)
        event(handlers.link, [c.pairs, c.chosen], c.links, **queued)

    translate = {
        "fn": handlers.translate,
        "inputs": [c.text, *settings],
        "outputs": [c.translations, c.scores, c.chosen, c.pairs],
        **queued,
    }
    asked = [c.go.click, *(box.submit for box in (c.text, *settings))]
    if c.example is not None:
        asked.append(page.load)
        cleared = c.example.then(
            handlers.clear,
            None,
            [c.translations, c.scores, c.attention, c.links, c.own, c.chosen, c.pairs],
            queue=False,
            api_visibility="private",
        )
        explore(cleared.then(**translate).then)
    explore(gr.on(asked, **translate).then)
    scored = gr.on(
        [c.judge.click, c.own.submit],
        handlers.score,
        [c.text, c.own, c.beams, c.length_penalty],
        [c.scores, c.chosen, c.pairs],
        **queued,
    )
    explore(scored.then)
    explore(c.chosen.input)


def _translations_by_writer(own: str, best: Translation) -> list[tuple[str, str]]:
    """Pairs (writer, text) for both translations, or one pair if the texts are equal."""
    if own == best.text:
        return [("Yours and the model's", own)]
    return [("Yours", own), ("The model's", best.text)]


def _choices(pairs: list[Pair]) -> tuple[gr.Dropdown, list[Pair]]:
    """The list of pairs with its first one chosen, and the pairs themselves."""
    names = [(f"{number}. {pair.name}", number - 1) for number, pair in enumerate(pairs, 1)]
    return gr.Dropdown(names, value=0 if pairs else None, visible=bool(pairs)), pairs


def _failure(error: Exception) -> str:
    """The message of an error. Errors that are no fault of the input also enter the log."""
    if isinstance(error, ValueError):
        return views.message(str(error))
    logger.error("The demo page could not answer a request.", exc_info=error)
    return views.message(
        f"The model failed on this input ({type(error).__name__}: {error}). The server's log has "
        "the details."
    )


__all__ = ["build_page", "serve"]
