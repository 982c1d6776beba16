"""A page that shows what a checkpoint does: translations, alignments, attention, scores.

    python examples/space/app.py                  # the model of examples/quickstart.py
    python examples/space/app.py user/model       # a folder or Hub id

The environment variable MODEL names the model where there is no command line, as on a Space.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vaswani.configuration.extras import needs

with needs("vaswani[demo]", SystemExit):
    import gradio as gr
    import views
    from translator import MAX_BEAMS, QUICKSTART, Kind, Translator

STYLE = Path(__file__).with_name("style.css")
EXAMPLES = ["three hundred and forty-two", "nine\nninety\nnine hundred and ninety thousand"]
# What attends to what, by the names of plot_attention.
KINDS: dict[Kind, str] = {
    "cross": "target to source",
    "encoder": "source to source",
    "decoder": "target to target",
}
# Shift+Enter is Gradio's own where a text has several lines; Ctrl+Enter is what other pages taught.
# A second tap shrinks an enlarged picture again. Screen readers are told of results.
SCRIPT = """() => {
    addEventListener("keydown", (event) => {
        const { key, ctrlKey, metaKey, target } = event;
        if (key !== "Enter" || !(ctrlKey || metaKey) || target.tagName !== "TEXTAREA") return;
        document.querySelector(target.closest("#own") ? "#score" : "#translate").click();
    });
    addEventListener("mousedown", (event) => {
        const figure = event.target.closest("figure.heat-map");
        if (event.target.tagName !== "IMG" || figure !== document.activeElement) return;
        event.preventDefault();
        figure.blur();
    });
    for (const id of ["translations", "scores"]) document.getElementById(id).ariaLive = "polite";
}"""
# Fonts that Gradio brings along, so that nothing is fetched; these two weights have Latin letters.
SANS = gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700))
MONO = gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700))
THEME = gr.themes.Base(
    primary_hue="indigo",
    neutral_hue="slate",
    radius_size="lg",
    font=[SANS, "sans-serif"],
    font_mono=[MONO, "monospace"],
).set(  # enough contrast to be read
    body_text_color_subdued="*neutral_500",
    block_info_text_color="*neutral_500",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
)
SWITCH_THEME = "() => { document.body.classList.toggle('dark'); }"


@dataclass(frozen=True)
class Pair:
    """A sentence and one of its translations, to be looked into."""

    name: str
    source: str
    target: str


class Handlers:
    """What happens on the page's events: values of components in, values of components out."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def translate(self, text: str, beams: float, length_penalty: float, count: float) -> tuple:
        """Translations, and the pairs that can be looked into."""
        try:
            lines = self.translator.sentences(text)
            results = self.translator.translate(lines, beams, length_penalty, count)
        except ValueError as error:
            return views.message(str(error)), *_choices([])
        pairs = [
            Pair(f"{line} → {translation.text}", line, translation.text)
            for line, found in zip(lines, results, strict=True)
            for translation in found
        ]
        shown = views.translations(lines, results, self.translator.unfamiliar(lines))
        return shown, *_choices(pairs)

    def score(self, text: str, own: str, beams: float, length_penalty: float) -> tuple:
        """Scores of the reader's translations, to be looked into beside the model's own."""
        try:
            sources = self.translator.sentences(text)
            targets = self.translator.sentences(own, "text_target")
            scored = self.translator.score(sources, targets, beams, length_penalty)
        except ValueError as error:
            return views.message(str(error)), *_choices([])
        pairs = [
            Pair(f"{whose}: {pair.source} → {target}", pair.source, target)
            for pair in scored
            for whose, target in (("Yours", pair.target), ("The model's", pair.best.text))
        ]
        return views.scores(scored), *_choices(pairs)

    def align(self, pairs: list[Pair], chosen: int | None) -> str:
        """The word alignment of the chosen pair."""
        if chosen is None:
            return views.hint("Which source words each target word comes from.")
        pair = pairs[chosen]
        links = self.translator.align(pair.source, pair.target)
        return views.alignment(pair.source, pair.target, links)

    def draw(self, pairs: list[Pair], chosen: int | None, kind: Kind, layer: str, head: str) -> str:
        """The heat map of the chosen pair."""
        if chosen is None:
            return views.hint("Where the model looks, token by token.")
        pair = pairs[chosen]
        try:
            svg = self.translator.draw(pair.source, pair.target, kind, layer, head)
        except ValueError as error:
            return views.message(str(error))
        return views.picture(svg, f"Attention, {KINDS[kind]}: {pair.name}")

    def layers(self, kind: Kind) -> list[gr.Dropdown]:
        """The choices of layers and heads: encoder and decoder may have other numbers of them."""
        counts = self.translator.layers_and_heads(kind)
        return [gr.Dropdown(_parts(count), value="mean") for count in counts]


def _parts(count: int) -> list[str]:
    """What to choose of layers or heads."""
    return ["mean", "all", *map(str, range(count))]


def _choices(pairs: list[Pair]) -> tuple[gr.Dropdown, list[Pair]]:
    """The list to choose a pair from, with its first one chosen, and the pairs themselves."""
    names = [(f"{number}. {pair.name}", number - 1) for number, pair in enumerate(pairs, 1)]
    return gr.Dropdown(names, value=0 if pairs else None, visible=bool(pairs)), pairs


def build(translator: Translator) -> gr.Blocks:
    """The page of one model."""
    handlers = Handlers(translator)
    search = translator.model.generation_config
    alpha = 1.0 if search.length_penalty is None else search.length_penalty
    examples = EXAMPLES if translator.name == QUICKSTART else []
    with gr.Blocks(title=f"{translator.name} · Transformer", analytics_enabled=False) as page:
        with gr.Row(elem_id="top"):
            gr.HTML(views.heading(translator.name, translator.sizes()))
            theme = gr.Button("Light or dark", size="sm", scale=0, elem_id="theme")
        with gr.Row():
            with gr.Column(elem_classes="half"):
                text = gr.Textbox(
                    examples[0] if examples else "",
                    label="Text",
                    info="One sentence a line. Ctrl+Enter or Shift+Enter translates.",
                    lines=3,
                    max_lines=12,
                    elem_id="text",
                )
                if examples:
                    gr.Examples(examples, text, label="For example", cache_examples=False)
                go = gr.Button("Translate", variant="primary", elem_id="translate")
                with gr.Row():
                    beams, length_penalty, count = (
                        gr.Number(value, label=label, step=step, min_width=80, elem_id=name)
                        for value, label, step, name in (
                            (min(search.num_beams or 4, MAX_BEAMS), "Beam size", 1, "beams"),
                            (alpha, "Length penalty", 0.1, "length-penalty"),
                            (3, "Translations", 1, "count"),
                        )
                    )
                gr.HTML(
                    views.hint(
                        "A beam of 1 is greedy search. The larger the penalty, the longer the "
                        "translations. There are at most as many as the beam is wide."
                    )
                )
            with gr.Column(elem_classes=["half", "card"]):
                gr.HTML(views.title("Translations"))
                translations = gr.HTML(
                    views.hint("They appear here, the best first."), elem_id="translations"
                )
        pairs = gr.State([])
        chosen = gr.Dropdown(
            [], label="Look into", filterable=False, visible=False, elem_id="chosen"
        )
        with gr.Row():
            with gr.Column(elem_classes=["half", "card"]):
                gr.HTML(views.title("Attention"))
                with gr.Row():
                    kinds = [(name, kind) for kind, name in KINDS.items()]
                    kind = gr.Dropdown(
                        kinds,
                        label="From",
                        filterable=False,
                        scale=2,
                        min_width=200,
                        elem_id="kind",
                    )
                    layer, head = (
                        gr.Dropdown(
                            _parts(number),
                            label=label,
                            filterable=False,
                            min_width=80,
                            elem_id=label.lower(),
                        )
                        for number, label in zip(
                            translator.layers_and_heads("cross"), ("Layer", "Head"), strict=True
                        )
                    )
                heat_map = gr.HTML(
                    handlers.draw([], None, "cross", "mean", "mean"), elem_id="heat-map"
                )
            with gr.Column(elem_classes="half"):
                with gr.Column(elem_classes="card"):
                    gr.HTML(views.title("Word alignment"))
                    alignment = gr.HTML(handlers.align([], None), elem_id="alignment")
                own = gr.Textbox(
                    label="Your own translation",
                    info="Of the text above, line by line. Ctrl+Enter or Shift+Enter scores it.",
                    lines=2,
                    max_lines=12,
                    elem_id="own",
                )
                judge = gr.Button("Score", elem_id="score")
                with gr.Column(elem_classes="card"):
                    gr.HTML(views.title("Scores"))
                    scores = gr.HTML(
                        views.hint("How probable the model finds it, token by token."),
                        elem_id="scores",
                    )

        # One at a time: `align` watches the one model that all requests share.
        queued: dict[str, Any] = {
            "concurrency_limit": 1,
            "concurrency_id": "model",
            "api_visibility": "private",
        }
        asked = [go.click, *(box.submit for box in (text, beams, length_penalty, count))]
        if examples:
            asked.append(page.load)
        searched = [beams, length_penalty]
        drawn = {"fn": handlers.draw, "inputs": [pairs, chosen, kind, layer, head]}
        for events, function, inputs, output in (
            (asked, handlers.translate, [text, *searched, count], translations),
            ([judge.click, own.submit], handlers.score, [text, own, *searched], scores),
        ):
            done = gr.on(events, function, inputs, [output, chosen, pairs], **queued)
            done.then(handlers.align, [pairs, chosen], alignment, **queued)
            done.then(**drawn, outputs=heat_map, **queued)
        chosen.input(handlers.align, [pairs, chosen], alignment, **queued)
        kind.input(handlers.layers, kind, [layer, head], **queued).then(
            **drawn, outputs=heat_map, **queued
        )
        gr.on([chosen.input, layer.input, head.input], **drawn, outputs=heat_map, **queued)
        theme.click(None, js=SWITCH_THEME)
    return page


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=os.environ.get("MODEL") or QUICKSTART,
        help="folder or Hub id (default: the variable MODEL, else %(default)s)",
    )
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    args = parser.parse_args()
    build(Translator(args.model)).launch(
        server_port=args.port,
        theme=THEME,
        css_paths=STYLE,
        js=SCRIPT,
        footer_links=[],
        run_history=False,  # what visitors write is kept nowhere
        ssr_mode=False,
    )


if __name__ == "__main__":
    main()
