"""The demo page: what it asks of a model, how it shows it, and itself, in a browser."""

import ast
import contextlib
import importlib
import importlib.util
import math
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from documents import ROOT, Page, environment
from huggingface_hub import SpaceCard
from huggingface_hub.cli.hf import app as hf
from transformers import MarianConfig

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

SPACE = ROOT / "examples" / "space"
FROZEN = ROOT / "tests" / "frozen" / "0.1"


@pytest.fixture(scope="module")
def space():
    """The modules behind the page, and a Translator of a model that was trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SPACE))
        names = ("translator", "views")
        modules = {name: importlib.import_module(name) for name in names}
        yield SimpleNamespace(**modules, model=modules["translator"].Translator(str(FROZEN)))
        for name in names:
            del sys.modules[name]


class Seen(HTMLParser):
    """The tags of a page and the text that a reader sees."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


# What the page asks of a model


def test_the_page_needs_gradio_in_one_file_only():
    for path in SPACE.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            name.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for name in node.names
        }
        assert ("gradio" in imported) == (path.name == "app.py"), path


@pytest.mark.parametrize(("beams", "alpha", "count"), [(4, 0.6, 3), (1, 0.6, 1), (3, 1.7, 3)])
def test_translations_and_scores_are_those_of_generate(space, beams, alpha, count):
    lines = ["three hundred and forty-two", "nine", "ninety thousand"]
    found = space.model.translate(lines, beams, alpha, count)
    for line, translations in zip(lines, found, strict=True):
        inputs = space.model.tokenizer(line, return_tensors="pt")
        output = space.model.model.generate(
            **inputs,
            num_beams=beams,
            num_return_sequences=count,
            length_penalty=alpha,
            return_dict_in_generate=True,
            output_scores=True,
        )
        texts = space.model.tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        assert [translation.text for translation in translations] == texts
        if beams > 1:
            scores = torch.tensor([translation.score for translation in translations])
            torch.testing.assert_close(scores, output.sequences_scores, atol=1e-5, rtol=1e-5)


def test_there_are_no_more_translations_than_the_beam_is_wide(space):
    ((one,),) = space.model.translate(["nine"], 1, 0.6, 5)
    (two,) = space.model.translate(["nine"], 2, 0.6, 5)
    assert (one.text, len(two)) == ("neun", 2)


def test_scores_are_those_of_the_plain_network(space):
    pairs = [("nine", "neun"), ("three hundred and forty-two", "zweihundertneun")]
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    for pair in space.model.score(sources, targets, 4, 0.6):
        source = space.model.tokenizer(pair.source, return_tensors="pt")["input_ids"]
        labels = space.model.tokenizer(text_target=pair.target, return_tensors="pt")["input_ids"]
        prefix = torch.cat((torch.tensor([[2]]), labels[:, :-1]), dim=1)
        with torch.no_grad():
            logits = space.model.model(input_ids=source, decoder_input_ids=prefix).logits[0]
        expected = logits.log_softmax(dim=-1).gather(1, labels[0][:, None])[:, 0]
        torch.testing.assert_close(pair.log_probs, expected, atol=1e-5, rtol=1e-5)
        total, length = float(expected.sum()), labels.shape[1]
        assert len(pair.tokens) == length
        assert pair.total == pytest.approx(total, abs=1e-4)
        assert pair.perplexity == pytest.approx(math.exp(-total / length), rel=1e-4)
        assert pair.score == pytest.approx(total / ((5 + length) / 6) ** 0.6, abs=1e-4)
        ((best,),) = space.model.translate([pair.source], 4, 0.6)
        assert pair.best.text == best.text
        assert pair.best.score == pytest.approx(best.score, abs=1e-5)


def test_alignment_links_are_those_of_the_model(space):
    pair = ("nine", "neun"), ("three hundred and nine", "drei hundert neun")
    for source, target in pair:
        (expected,) = space.model.model.align([source], [target], space.model.tokenizer)
        found = space.model.align(source, target)
        assert " ".join(f"{s}-{t}" for s, t in found) == expected != ""


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
@pytest.mark.parametrize(("layer", "head"), [("mean", "mean"), ("0", "all"), ("all", "3")])
def test_a_heat_map_is_a_whole_svg_file(space, kind, layer, head):
    svg = ElementTree.fromstring(space.model.draw("nine", "neun", kind, layer, head))
    assert svg.tag.endswith("svg")
    assert float(svg.get("width").removesuffix("pt")) > 100


def test_the_four_maps_of_all_heads_are_wider_than_one(space):
    def width(head):
        svg = ElementTree.fromstring(space.model.draw("nine", "neun", "cross", "mean", head))
        return float(svg.get("width").removesuffix("pt"))

    assert width("all") > width("0")


@pytest.fixture
def folder(tmp_path):
    """Write a small model with a vocabulary of its own making."""

    def write(lines, kind="word", **config):
        tokenizer = VaswaniTokenizer.train_from_iterator(
            lines, kind=kind, vocab_size=300, show_progress=False
        )
        sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, **config}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=len(tokenizer), **sizes))
        for saved in (model, tokenizer):
            saved.save_pretrained(tmp_path)
        return tmp_path

    return write


def test_encoder_and_decoder_may_have_other_numbers_of_layers(space, folder):
    path = folder(["a b"], encoder_layers=3, decoder_layers=1)
    model = space.translator.Translator(str(path))
    assert [model.layers_and_heads(kind)[0] for kind in ("encoder", "cross", "decoder")] == [
        3,
        1,
        1,
    ]
    assert model.draw("a", "b", "encoder", "2", "mean")


def test_a_target_with_a_vocabulary_of_its_own_is_read_by_its_own_tokenizer(space, folder):
    path = folder(["a b c"], encoder_layers=1, decoder_layers=1)
    target = VaswaniTokenizer.train_from_iterator(
        ["x y z w"], kind="word", vocab_size=300, show_progress=False
    )
    target.save_pretrained(path / "target_tokenizer")
    config = VaswaniConfig.from_pretrained(path)
    sizes = config.to_diff_dict() | {
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": False,
    }
    VaswaniForConditionalGeneration(VaswaniConfig(**sizes)).save_pretrained(path)
    model = space.translator.Translator(str(path))
    assert model.sentences("w x", "text_target") == ["w x"]
    (pair,) = model.score(["a b"], ["w x"], 2, 0.6)
    assert pair.tokens == ["w", "x", "</s>"]
    assert {target for _, target in model.align("a b", "w x")} == {0, 1}
    assert model.draw("a b", "w x", "cross")


# Bad input


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "write a sentence"),
        (" \n\t\n", "write a sentence"),
        ("word " * 10_000, r"has 5\d,\d{3} tokens; this page takes at most 500 tokens"),
        ("x" * 5_000_000, "has 5,000,000 characters; this page takes at most 500 tokens"),
        ("nine\n" * 33, "33 sentences, one a line; this page takes at most 32"),
    ],
)
def test_a_text_that_cannot_be_translated_is_refused_by_a_message_that_names_the_limit(
    space, text, told
):
    with pytest.raises(ValueError, match=told):
        space.model.sentences(text)


def test_blank_lines_are_no_sentences(space):
    assert space.model.sentences("\n nine \r\n\n ten\n") == ["nine", "ten"]


def test_half_of_a_surrogate_pair_does_not_stop_the_page(space):
    (line,) = space.model.sentences("nine \ud83d")
    assert len(space.model.translate([line], 2, 0.6)[0]) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"beams": 0}, "beam size must be a whole number from 1 to 10, got 0"),
        ({"beams": 11}, "got 11"),
        ({"beams": 2.5}, "got 2.5"),
        ({"beams": None}, "got nothing"),
        ({"beams": math.nan}, "got nan"),
        ({"beams": math.inf}, "got inf"),
        ({"count": 0}, "number of translations must be a whole number from 1 to 10, got 0"),
        ({"length_penalty": -0.1}, "length penalty must lie between 0 and 2, got -0.1"),
        ({"length_penalty": 2.1}, "got 2.1"),
        ({"length_penalty": math.nan}, "got nan"),
        ({"length_penalty": None}, "got nothing"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_range(space, settings, told):
    with pytest.raises(ValueError, match=told):
        space.model.translate(["nine"], **{"beams": 4, "length_penalty": 0.6, **settings})


def test_every_sentence_needs_one_translation_to_score(space):
    with pytest.raises(ValueError, match="2 sentences and your translation 1: write one line"):
        space.model.score(["nine", "ten"], ["neun"], 4, 0.6)
    with pytest.raises(ValueError, match="write your translation"):
        space.model.sentences(" ", "text_target")


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("nine", " ", "nothing to draw"),
        ("nine " * 120, "neun", "room for 100 tokens on either side; this pair has"),
        ("nine", "neun " * 120, "room for 100 tokens on either side; this pair has"),
    ],
)
def test_a_heat_map_that_nobody_could_read_is_refused(space, source, target, told):
    with pytest.raises(ValueError, match=told):
        space.model.draw(source, target, "cross")


def test_characters_outside_the_vocabulary_are_named_in_order(space, folder):
    assert space.model.unfamiliar(["🙂 nine 漢字", "字 nine"]) == ["🙂", "漢", "字"]
    assert space.model.unfamiliar(["nine hundred"]) == []
    words = space.translator.Translator(str(folder(["a b c"])))
    assert words.unfamiliar(["a dog b 🙂", "dog"]) == ["dog", "🙂"]
    assert len(words.translate(["🙂"], 2, 0.6)[0]) == 1


def test_a_model_that_is_not_there_or_is_another_is_named(space, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SystemExit, match=r"no model in runs/quickstart: .*quickstart\.py` makes it"
    ):
        space.translator.Translator("runs/quickstart")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="empty cannot be loaded: "):
        space.translator.Translator("./empty")
    MarianConfig().save_pretrained(tmp_path / "marian")
    with pytest.raises(SystemExit, match=r"conversion marian \./marian OUTPUT"):
        space.translator.Translator("./marian")


# How it is shown


MINUS = "\N{MINUS SIGN}"
MARKUP = "<script>alert(1)</script>\"'&amp; ${1}"


def test_markup_in_texts_is_text(space):
    views, translator = space.views, space.translator
    found = [translator.Translation(MARKUP, -1.0)]
    pair = translator.ScoredPair(
        MARKUP, MARKUP, [MARKUP], torch.tensor([-1.0]), -1.0, translator.Translation(MARKUP, -1.0)
    )
    for html in (
        views.heading(MARKUP, [MARKUP]),
        views.message(MARKUP),
        views.hint(MARKUP),
        views.translations([MARKUP], [found], [MARKUP]),
        views.alignment(MARKUP, MARKUP, [(0, 0)]),
        views.scores([pair]),
    ):
        seen = Seen(html)
        assert "script" not in {tag for tag, _ in seen.tags}
        assert "<script>alert(1)</script>\"'&amp;" in seen.text
    (alt,) = [
        attributes["alt"]
        for tag, attributes in Seen(views.picture(b"<svg/>", MARKUP)).tags
        if tag == "img"
    ]
    assert alt == MARKUP


def test_bars_are_probabilities_beside_the_best(space):
    Translation = space.translator.Translation  # noqa: N806
    found = [Translation("a", -0.5), Translation("b", -0.5 + math.log(0.25)), Translation("", -99)]
    html = space.views.translations(["x"], [found], [])
    assert re.findall(r"--share: (\d+)%", html) == ["100", "25", "0"]
    assert Seen(html).text.replace(MINUS, "-") == "x a -0.500 b -1.886 (empty) -99.000"


def test_target_words_have_the_colours_and_numbers_of_their_source_words(space):
    html = space.views.alignment("a b c", "x y z", [(0, 0), (1, 0), (2, 2)])
    words = re.findall(r'class="word" style="([^"]*)">(\w)<sub>([^<]*)</sub>', html)
    assert [(word, numbers) for _, word, numbers in words] == [
        ("a", "0"),
        ("b", "1"),
        ("c", "2"),
        ("x", "0,1"),
        ("y", "none"),
        ("z", "2"),
    ]
    hues = [re.findall(r"hsl\((\d+) ", style) for style, _, _ in words]
    assert len({hue for (hue,) in hues[:3]}) == 3
    assert hues[3:] == [hues[0] + hues[1], [], hues[2]]
    assert "0-0 1-0 2-2" in Seen(html).text


def test_scores_show_each_token_the_sum_and_the_perplexity(space):
    (pair,) = space.model.score(["nine"], ["neun"], 4, 0.6)
    seen = Seen(space.views.scores([pair])).text.replace(MINUS, "-")
    for token, value in zip(pair.tokens, pair.log_probs.tolist(), strict=True):
        assert f"{token} {value:.3f}" in seen
    assert f"Log-probability {pair.total:.3f}" in seen
    assert f"Perplexity {pair.perplexity:.2f}" in seen


# The Space


def test_the_readme_is_a_card_that_the_hub_accepts():
    card = SpaceCard.load(SPACE / "README.md")
    assert card.data.sdk == "gradio"
    assert (SPACE / card.data.app_file).is_file()
    assert len(card.data.short_description) <= 60
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"gradio=={card.data.sdk_version}" in pinned


def test_the_readme_names_the_limits_of_the_page(space):
    text = (SPACE / "README.md").read_text(encoding="utf-8")
    limits = space.translator
    assert f"{limits.MAX_SENTENCES} sentences, one a line, and {limits.MAX_TOKENS} tokens" in text


def test_the_requirements_are_those_of_the_package_and_matplotlib():
    lines = (SPACE / "requirements.txt").read_text().splitlines()
    required = {line for line in lines if not line.startswith(("#", "-"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    demo = project["project"]["optional-dependencies"]["demo"]
    (matplotlib,) = [entry for entry in demo if entry.startswith("matplotlib")]
    assert required == {*project["project"]["dependencies"], matplotlib}


def test_the_commands_of_the_readme_that_reach_the_hub_are_its_clients(capsys):
    commands = Page(SPACE / "README.md").commands("sh", "hf ")
    assert len(commands) == 3
    for line in commands:
        words = shlex.split(line)[1:]
        hf.main([*words, "--help"], standalone_mode=False)  # unknown words and options raise
        command = " ".join(words[: words.index("user/demo")])
        assert f" {command} [OPTIONS]" in capsys.readouterr().out


# The page itself, in a browser


def _chromium():
    """A Chromium of the system, or playwright's own."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


@contextlib.contextmanager
def serving(folder, app=SPACE / "app.py", **variables):
    """Run the page in a folder; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(app), "--port", str(port)],
            cwd=folder,
            env={**environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(address):
                break
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page of the model that is in runs/quickstart by default."""
    pytest.importorskip("gradio", reason='needs pip install -e ".[demo]"')
    folder = tmp_path_factory.mktemp("space")
    shutil.copytree(FROZEN, folder / "runs" / "quickstart")
    with serving(folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    path = _chromium()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open the page; at the end nothing may have gone wrong, or have been asked of other hosts."""
    wrong = []

    def open_page(address=address, **options):
        page = browser.new_page(**options)
        page.set_default_timeout(60_000)
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("response", lambda reply: reply.status >= 400 and wrong.append(reply.url))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((address, "data:", "blob:")) or wrong.append(request.url)
            ),
        )
        page.goto(address)
        page.wait_for_selector("#heat-map img")  # of the first example
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert wrong == []


def ask(page, text):
    page.fill("#text textarea", text)
    page.click("#translate")


def shows(page, selector, text):
    """Wait until a part of the page holds a text."""
    page.locator(selector).filter(has_text=text).wait_for()


def width(page):
    """Of all that is on the page: a phone zooms out to show it."""
    return page.evaluate("document.documentElement.scrollWidth")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["Control+Enter", "Shift+Enter", None])
def test_a_typed_sentence_is_translated_aligned_and_drawn(visit, key):
    page = visit()
    page.click("#text textarea")
    page.fill("#text textarea", "")
    page.keyboard.type("nine hundred and ninety")
    if key:
        page.keyboard.press(key)
    else:
        page.click("#translate")
    shows(page, "#translations", "neunhundertneunzig")
    assert page.locator("#translations li").count() == 3
    scores = [
        float(text.replace(MINUS, "-"))
        for text in page.locator("#translations .score").all_inner_texts()
    ]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    shows(page, "#alignment", "ninety")
    assert page.locator("#alignment .word").all_inner_texts()[:2] == ["nine0", "hundred1"]
    image = page.locator("#heat-map img[alt*='neunhundertneunzig']")
    image.wait_for()
    assert image.evaluate("image => image.complete && image.naturalWidth > 200")


@pytest.mark.slow
def test_several_sentences_each_have_their_translations_to_look_into(visit):
    page = visit()
    page.fill("#count input", "2")
    ask(page, "seven\n\nnine")
    shows(page, "#translations", "neun")
    assert page.locator("#translations section").count() == 2
    assert page.locator("#translations li").count() == 4
    page.click("#chosen input")
    page.get_by_role("option").nth(2).click()
    page.wait_for_selector("#heat-map img[alt*='nine → neun']")
    shows(page, "#alignment", "nine")


@pytest.mark.slow
def test_layers_heads_and_kinds_of_attention_change_the_heat_map(visit):
    page = visit()

    def choose(box, name):
        page.click(f"{box} input")
        page.get_by_role("option", name=name, exact=True).click()

    image = page.locator("#heat-map img")
    one = image.evaluate("image => image.naturalWidth")
    choose("#head", "all")
    page.wait_for_function(
        "one => document.querySelector('#heat-map img')?.naturalWidth > one", arg=one
    )
    choose("#layer", "0")
    choose("#kind", "source to source")
    page.wait_for_selector("#heat-map img[alt*='source to source']")
    assert page.input_value("#head input") == page.input_value("#layer input") == "mean"


@pytest.mark.slow
def test_a_translation_of_ones_own_is_scored_and_can_be_looked_into(visit):
    page = visit()
    page.fill("#text textarea", "seven")
    page.fill("#own textarea", "neun")
    page.press("#own textarea", "Control+Enter")
    shows(page, "#scores", "Perplexity")
    assert page.locator("#scores .tokens li").last.inner_text().startswith("</s>")
    assert "sieben" in page.inner_text("#scores .own")
    page.wait_for_selector("#heat-map img[alt*='Yours: seven → neun']")
    page.fill("#own textarea", "neun\nneun")
    page.click("#score")
    shows(page, "#scores [role=alert]", "write one line for each sentence")


@pytest.mark.slow
def test_bad_input_is_answered_by_a_message_and_the_page_goes_on(visit):
    page = visit()
    for text, told in (
        ("", "write a sentence"),
        ("word " * 10_000, "at most 500 tokens"),
        ("nine\n" * 33, "at most 32"),
    ):
        ask(page, text)
        shows(page, "#translations [role=alert]", told)
        page.locator("#heat-map img").wait_for(state="detached")
    page.fill("#beams input", "99")
    ask(page, "nine")
    shows(page, "#translations [role=alert]", "from 1 to 10, got 99")
    page.fill("#beams input", "")
    page.press("#beams input", "Enter")
    shows(page, "#translations [role=alert]", "got nothing")
    page.fill("#beams input", "2")
    page.press("#beams input", "Enter")
    shows(page, "#translations", "neun")
    ask(page, "nine 🙂 漢")
    shows(page, "#translations", "Not in the vocabulary of this model")
    page.wait_for_selector("#heat-map img[alt*='🙂']")


@pytest.mark.slow
def test_what_looks_like_a_program_is_shown_and_not_run(visit):
    page = visit()
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    text = "${alert(1)} {{value}} <img src=x onerror=alert(2)> `"
    ask(page, text)
    shows(page, "#translations .source", text)
    page.fill("#own textarea", text)
    page.click("#score")
    shows(page, "#scores .source", text)
    page.wait_for_selector("#heat-map img[alt*='onerror']")
    assert dialogs == []


@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(visit):
    page = visit(viewport={"width": 375, "height": 740}, is_mobile=True, has_touch=True)
    assert width(page) == 375
    ask(page, f"nine hundred and ninety-nine thousand\n{'x' * 90}")
    shows(page, "#translations", "x" * 90)
    page.fill("#own textarea", "neunhundertneunundneunzigtausend\n" + "y" * 90)
    page.click("#score")
    shows(page, "#scores", "Perplexity")
    image = page.wait_for_selector("#heat-map img[alt*='Yours']")
    assert width(page) == 375
    assert 250 < image.bounding_box()["width"] <= 375
    page.focus("#heat-map figure")  # it may be enlarged, but in its place
    assert width(page) == 375


@pytest.mark.slow
def test_a_tap_enlarges_the_picture_and_the_next_one_shrinks_it(visit):
    page = visit(viewport={"width": 375, "height": 740}, is_mobile=True, has_touch=True)
    image = page.locator("#heat-map img")

    def shown():
        return image.evaluate("image => image.width == image.naturalWidth")

    assert not shown()
    for enlarged in (True, False, True):
        image.tap()
        assert shown() == enlarged
    page.keyboard.press("Tab")
    assert not shown()


@pytest.mark.slow
def test_dark_and_light_follow_the_system_and_the_button(visit):
    page = visit(color_scheme="dark")

    def lightness(selector, name):
        numbers = page.locator(selector).evaluate(
            "(element, name) => getComputedStyle(element)[name]", name
        )
        return sum(float(number) for number in re.findall(r"[\d.]+", numbers)[:3]) / 765

    def contrast():
        return lightness("h1", "color") - lightness(".card >> nth=0", "backgroundColor")

    assert contrast() > 0.6
    page.click("#theme")
    assert contrast() < -0.6
    page = visit(color_scheme="light")
    assert contrast() < -0.6


@pytest.mark.slow
def test_the_keyboard_reaches_everything_in_the_order_of_reading(visit):
    page = visit()
    page.focus("#text textarea")
    boxes = ["beams", "length-penalty", "count", "chosen", "kind", "layer", "head", "own", "score"]
    expected = ["text", "translate", *boxes]
    reached = []
    for _ in range(40):
        name = page.evaluate(
            "names => document.activeElement.closest(names.map(name => '#' + name).join())?.id",
            expected,
        )
        if name and name not in reached:
            reached.append(name)
        page.keyboard.press("Tab")
    assert reached == expected


@pytest.mark.slow
def test_the_keyboard_chooses_a_head_to_draw(visit):
    page = visit()
    one = page.evaluate("document.querySelector('#heat-map img').naturalWidth")
    page.focus("#head input")
    page.wait_for_selector("#head input[aria-expanded=true]")
    page.keyboard.press("ArrowDown", delay=100)  # to "all"
    page.keyboard.press("Enter", delay=100)
    page.wait_for_function(
        "one => document.querySelector('#heat-map img')?.naturalWidth > one", arg=one
    )
    assert page.input_value("#head input") == "all"


@pytest.mark.slow
def test_every_control_has_a_name_and_results_are_announced(visit):
    page = visit()
    for role in ("textbox", "spinbutton", "listbox", "combobox", "button"):
        for control in page.get_by_role(role).all():
            name = control.evaluate(
                "control => control.ariaLabel || control.innerText ||"
                " [...(control.labels || [])].map(label => label.innerText).join()"
            )
            assert name.strip(), control.evaluate("e => e.outerHTML")
    for part in ("translations", "scores"):
        assert page.get_attribute(f"#{part}", "aria-live") == "polite"


@pytest.mark.slow
def test_visitors_do_not_see_each_others_texts(visit):
    first, second = visit(), visit()
    ask(first, "seven")
    ask(second, "nine")
    first.wait_for_selector("#heat-map img[alt*='seven → sieben']")
    second.wait_for_selector("#heat-map img[alt*='nine → neun']")
    assert "nine" not in first.inner_text("#translations")


@pytest.mark.slow
def test_the_folder_that_the_readme_makes_works_alone(visit, tmp_path):
    repository = tmp_path / "repository"
    unwanted = shutil.ignore_patterns(".*", "runs", "data", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, repository, ignore=unwanted)
    shutil.copytree(FROZEN, repository / "runs" / "quickstart")
    commands = Page(SPACE / "README.md").commands("sh")
    start = next(index for index, line in enumerate(commands) if "--target" in line)
    for command in commands[start : start + 3]:
        name, _, rest = command.partition(" ")
        if name == "pip":  # without a network, the tools that build are those already here
            command = f"{shlex.quote(sys.executable)} -m pip {rest} --no-build-isolation"
        subprocess.run(command, shell=True, cwd=repository, check=True, capture_output=True)
    folder = repository / "space"
    command = [sys.executable, "-c", "import vaswani.pictures as p; print(p.__file__)"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(folder)
    with serving(folder, app=folder / "app.py", PYTHONPATH="") as address:
        page = visit(address)
        assert page.inner_text("h1") == "runs/quickstart"
        page.close()
