"""The hoverable view shows the attention of the network in a page and in a notebook."""

import base64
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vaswani.pictures import hoverable, hoverable_attention
from vaswani.pictures.hoverable import attention_script

FROZEN = Path(__file__).resolve().parent / "frozen" / "0.1"
SOURCE, TARGET = "three hundred and sixty-two", "dreihundertzweiundsechzig"
KINDS = ["cross", "encoder", "decoder"]
STYLES = {
    "light": "background: rgb(255, 255, 255); color: rgb(31, 41, 55)",
    "dark": "background: rgb(11, 15, 25); color: rgb(243, 244, 246)",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FROZEN)


@pytest.fixture
def model(tiny_model):
    """A model with two decoder layers, three encoder layers, and four heads per layer."""
    return tiny_model(vocab_size=340, encoder_layers=3)


class Element(HTMLParser):
    """Parser of a single HTML element: its attributes and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)
        ((self.tag, self.attributes),) = self.tags

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.text += text


def maps_of(view):
    return json.loads(Element(view.html).attributes["data"])["maps"]


def weights_of(shown):
    size = shown["layers"], shown["heads"], len(shown["rows"]), len(shown["columns"])
    numbers = np.frombuffer(base64.b64decode(shown["weights"]), dtype="<u2")
    return numbers.reshape(size) / 65535


def eager_attention(model, tokenizer, source, target):
    """Return the eager network's attention of each kind: (layers, heads, rows, columns)."""
    ids, labels = tokenizer(source)["input_ids"], tokenizer(text_target=target)["input_ids"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(
            torch.tensor([ids]),
            decoder_input_ids=torch.tensor([[2, *labels[:-1]]]),
            output_attentions=True,
        )
    return [torch.stack(output[f"{kind}_attentions"])[:, 0].numpy() for kind in KINDS]


def test_the_weights_of_all_layers_and_heads_are_those_of_the_eager_network(model, tokenizer):
    view = hoverable_attention(model, tokenizer, SOURCE, TARGET)
    expected = eager_attention(model, tokenizer, SOURCE, TARGET)
    for shown, weights in zip(maps_of(view), expected, strict=True):
        np.testing.assert_allclose(weights_of(shown), weights, rtol=0, atol=1e-5)


def test_rows_are_predicted_tokens_and_columns_those_read(model, tokenizer):
    cross, encoder, decoder = maps_of(hoverable_attention(model, tokenizer, SOURCE, TARGET))
    assert "".join(encoder["rows"]) == "·three·hundred·and·sixty-two</s>"
    assert "".join(cross["rows"]) == "␣dreihundertzweiundsechzig</s>"
    assert cross["columns"] == encoder["columns"] == encoder["rows"]
    assert decoder["columns"] == ["</s>", *decoder["rows"][:-1]]
    assert decoder["rows"] == cross["rows"]


def test_without_a_target_the_translation_of_the_model_is_shown(model, tokenizer):
    model.generation_config.update(num_beams=2, max_new_tokens=5)
    batch = tokenizer(SOURCE, return_tensors="pt")
    translation = model.generate(**batch)[0, 1:]
    given = hoverable_attention(model, tokenizer, SOURCE, translation)
    assert hoverable_attention(model, tokenizer, SOURCE) == given


def test_a_pair_with_more_weights_than_a_page_can_hold_is_refused(model, tokenizer, monkeypatch):
    source, target = (len(tokenizer(text)["input_ids"]) for text in (SOURCE, TARGET))
    weights = 4 * (2 * source * target + 3 * source**2 + 2 * target**2)
    monkeypatch.setattr(hoverable, "MAX_WEIGHTS", weights)
    hoverable_attention(model, tokenizer, SOURCE, TARGET)
    monkeypatch.setattr(hoverable, "MAX_WEIGHTS", weights - 1)
    told = rf"{source} source and {target} target tokens.*{weights:,} weights.*plot_attention"
    with pytest.raises(ValueError, match=told):
        hoverable_attention(model, tokenizer, SOURCE, TARGET)


def test_tokens_that_look_like_markup_stay_text(model, tokenizer):
    view = hoverable_attention(model, tokenizer, "\"'><script>x</script>&amp;", TARGET)
    element = Element(view.html)
    assert element.tag == "vaswani-attention"
    assert "".join(maps_of(view)[1]["rows"]) == "␣\"'><script>x</script>&amp;</s>"
    assert "need JavaScript" in element.text  # shown where no script runs


def test_a_notebook_shows_the_view_with_its_script_and_asks_no_server(model, tokenizer):
    view = hoverable_attention(model, tokenizer, SOURCE, TARGET)
    shown = view._repr_html_()
    assert shown == f"{view.html}<script>{attention_script()}</script>"
    assert not re.search(r"https?:|//\w|@import|fetch\(|url\(|src=", attention_script())
    assert "</script" not in attention_script()
    assert len(repr(view)) < 100


# In a browser


@pytest.fixture
def visit(browser, model, tokenizer):
    """Open a page with a view. At the end, check that no errors occurred."""
    wrong = []

    def open_page(source=SOURCE, target=TARGET, theme="light", **options):
        view = hoverable_attention(model, tokenizer, source, target)
        page = browser.new_context(**options).new_page()
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url))
        page.set_content(
            f"<!doctype html><body style='{STYLES[theme]}'>"
            f"<meta name=viewport content='width=device-width'>{view._repr_html_()}"
        )
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert wrong == []


def point_at(page, row, column):
    """Move the pointer to the middle of a cell."""
    cell = float(page.locator(".map").evaluate("map => parseFloat(map.style.cssText.slice(8))"))
    place = {"x": (column + 0.5) * cell, "y": (row + 0.5) * cell}
    page.locator(".cells canvas").hover(position=place)


def expected_weight(model, tokenizer, row, column, layers=(0, 1), heads=range(4)):
    """Return the network's mean weight over layers and heads, rounded as on the page."""
    cross, _, _ = eager_attention(model, tokenizer, SOURCE, TARGET)
    mean = cross[np.ix_(layers, heads)].mean(axis=(0, 1))
    return pytest.approx(mean[row, column], abs=6e-4)


def said_weight(page):
    return float(page.inner_text("output data"))


@pytest.mark.slow
def test_a_cell_under_the_pointer_says_its_tokens_and_its_weight(visit, model, tokenizer):
    page = visit()
    rows, columns = (page.locator(f".{side} .token") for side in ("rows", "columns"))
    for row, column in ((0, 0), (3, 5), (rows.count() - 1, columns.count() - 1)):
        point_at(page, row, column)
        names = rows.nth(row).inner_text(), columns.nth(column).inner_text()
        said = f"{names[0]} looks at {names[1]} with weight "
        assert page.inner_text("output").startswith(said)
        assert said_weight(page) == expected_weight(model, tokenizer, row, column)
        assert page.locator(".token.on").all_inner_texts() == [names[1], names[0]]
    page.mouse.move(0, 0)
    assert "Point at a token" in page.inner_text("output")
    assert page.locator(".token.on").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("side", "verb"), [("rows", "looks at"), ("columns", "is looked at by")])
def test_a_token_under_the_pointer_marks_its_line_and_says_its_largest_weights(
    visit, model, tokenizer, side, verb
):
    page = visit()
    cross, _, _ = eager_attention(model, tokenizer, SOURCE, TARGET)
    weights = cross.mean(axis=(0, 1)) if side == "rows" else cross.mean(axis=(0, 1)).T
    token = page.locator(f".{side} .token").nth(2)
    others = page.locator(f".{'columns' if side == 'rows' else 'rows'} .token")
    token.hover()
    found = [f"{others.nth(i).inner_text()} {weights[2, i]:.3f}" for i in weights[2].argsort()]
    told = " ".join(page.inner_text("output").split())
    assert told == f"{token.inner_text()} {verb} {', '.join(found[:-4:-1])}"
    shares = [
        float(share)
        for share in others.evaluate_all(
            "tokens => tokens.map(token => token.style.getPropertyValue('--share'))"
        )
    ]
    np.testing.assert_allclose(shares, weights[2] / weights.max(), atol=1e-3)
    frame = page.locator(f".{side.removesuffix('s')}.frame").bounding_box()
    box = token.bounding_box()
    start, length = ("y", "height") if side == "rows" else ("x", "width")
    assert (frame[start], frame[length]) == pytest.approx((box[start], box[length]), abs=1.5)


@pytest.mark.slow
def test_layers_heads_and_kinds_are_chosen_from_lists_and_small_maps(visit, model, tokenizer):
    page = visit()
    page.select_option("[name=layer]", "1")
    point_at(page, 1, 2)
    assert said_weight(page) == expected_weight(model, tokenizer, 1, 2, [1])
    page.select_option("[name=head]", "3")
    point_at(page, 1, 2)
    assert said_weight(page) == expected_weight(model, tokenizer, 1, 2, [1], [3])
    page.click("summary")
    maps = page.locator(".overview button")
    maps.first.wait_for()
    assert maps.count() == 2 * 4
    page.get_by_title("layer 0, head 2").click()
    assert [page.input_value(f"[name={part}]") for part in ("layer", "head")] == ["0", "2"]
    assert page.locator(".overview [aria-pressed=true]").get_attribute("title") == "layer 0, head 2"
    point_at(page, 1, 2)
    assert said_weight(page) == expected_weight(model, tokenizer, 1, 2, [0], [2])
    page.select_option("[name=map]", label="Encoder self-attention")
    assert page.locator(".rows").inner_text() == page.locator(".columns").inner_text()
    assert maps.count() == 3 * 4


def colours(page):
    """Return red, green and blue of every cell: (rows, columns, 3)."""
    canvas = page.locator(".cells canvas")
    width, height, data = canvas.evaluate(
        """canvas => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return [width, height, [...data]];
        }"""
    )
    return np.array(data).reshape(height, width, 4)[..., :3]


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "sign"), [("light", -1), ("dark", 1)])
def test_larger_weights_stand_out_from_a_light_and_a_dark_page(
    visit, model, tokenizer, theme, sign
):
    page = visit(theme=theme)
    cross, _, _ = eager_attention(model, tokenizer, SOURCE, TARGET)
    weights = cross.mean(axis=(0, 1)).ravel()
    brightness = colours(page).mean(axis=-1).ravel()
    order = weights.argsort()
    assert (sign * np.diff(brightness[order]) > -2).all()  # rounding of colours
    assert sign * (brightness[order[-1]] - brightness[order[0]]) > 60


@pytest.mark.slow
def test_the_view_follows_a_page_that_changes_its_theme(visit):
    page = visit(theme="light")
    before = colours(page)
    page.evaluate("style => { document.body.style.cssText = style }", STYLES["dark"])
    page.wait_for_timeout(100)
    assert (colours(page) != before).any()
    backdrop = page.locator(".rows").evaluate("rows => getComputedStyle(rows).backgroundColor")
    assert backdrop in STYLES["dark"]


LONG = "nine hundred and ninety-nine thousand " * 3, "neun" * 30


@pytest.mark.slow
@pytest.mark.parametrize("pixels", [390, 1280])
def test_the_tokens_of_a_long_pair_stay_readable_and_scroll_with_the_map(visit, pixels):
    page = visit(*LONG, viewport={"width": pixels, "height": 800})
    rows, columns = (page.locator(f".{side} .token") for side in ("rows", "columns"))
    assert min(rows.count(), columns.count()) >= 26
    sizes = page.locator(".token").evaluate_all(
        "tokens => tokens.map(token => parseFloat(getComputedStyle(token).fontSize))"
    )
    assert min(sizes) >= 12
    boxes = [row.bounding_box() for row in rows.all()]
    assert all(one["y"] + one["height"] <= two["y"] + 0.5 for one, two in itertools.pairwise(boxes))
    assert page.evaluate("document.documentElement.scrollWidth") <= pixels
    place = page.locator(".scroll").bounding_box()
    page.locator(".scroll").evaluate("scroll => scroll.scrollTo(1e4, 1e4)")
    # The labels stay beside their cells.
    assert rows.last.bounding_box()["x"] >= place["x"] - 0.5
    assert columns.last.bounding_box()["y"] >= place["y"] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("pixels", [390, 1280])
def test_the_full_size_fills_the_window_with_larger_cells_until_it_is_closed(visit, pixels):
    page = visit(*LONG, viewport={"width": pixels, "height": 800})

    def cell():
        return page.locator(".rows .token >> nth=0").bounding_box()["height"]

    small = cell()
    page.click("text=Full size")
    box = page.locator("dialog").bounding_box()
    assert (box["width"], box["height"]) == (pixels, 800)
    assert cell() > small
    point_at(page, 2, 3)
    assert "looks at" in page.inner_text("dialog output")
    page.keyboard.press("Escape")
    page.locator("dialog .view").wait_for(state="detached")
    assert cell() == small
    page.click("text=Full size")
    page.click("text=Close")
    page.locator("dialog .view").wait_for(state="detached")
    assert cell() == small


@pytest.mark.slow
def test_arrow_keys_move_over_the_cells_and_scroll_to_them(visit):
    page = visit(*LONG, viewport={"width": 390, "height": 800})
    page.focus(".scroll")

    def marked():
        return page.locator(".token.on").evaluate_all(
            "tokens => tokens.map(token => +token.dataset.index)"
        )

    page.keyboard.press("ArrowDown")
    assert marked() == [0, 0]
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert marked() == [1, 1]
    for _ in range(60):
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
    last = [page.locator(f".{side} .token").count() - 1 for side in ("columns", "rows")]
    assert marked() == last
    scroll, frame = (page.locator(part).bounding_box() for part in (".scroll", ".column.frame"))
    assert frame["x"] + frame["width"] <= scroll["x"] + scroll["width"] + 1


@pytest.mark.slow
def test_a_tap_marks_a_cell_until_the_next_tap(visit):
    page = visit(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    canvas = page.locator(".cells canvas")
    canvas.tap(position={"x": 30, "y": 30})
    first = page.inner_text("output")
    assert "looks at" in first
    canvas.tap(position={"x": 120, "y": 90})
    assert "looks at" in page.inner_text("output") != first
    page.locator(".rows .token").first.tap()
    assert page.locator(".token.on").count() == 1


@pytest.mark.slow
def test_new_data_are_drawn_in_place(visit, model, tokenizer):
    page = visit()
    page.select_option("[name=head]", "2")
    other = Element(hoverable_attention(model, tokenizer, "nine", "neun").html)
    page.locator("vaswani-attention").evaluate(
        "(view, data) => view.setAttribute('data', data)", other.attributes["data"]
    )
    assert "".join(page.locator(".rows .token").all_inner_texts()) == "␣neun</s>"
    assert page.input_value("[name=head]") == "2"
