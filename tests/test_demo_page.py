"""The demo page in a browser."""

import contextlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from demo_models import RESULTS, SAMPLES, trained
from documents import ROOT, Page, environment

SPACE = ROOT / "examples" / "space"
pytestmark = pytest.mark.slow
MINUS = "\N{MINUS SIGN}"


@contextlib.contextmanager
def serving(folder, program, **variables):
    """Run a program that serves the page in a folder, and return the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *program],
            cwd=folder,
            env={
                **environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
                "GRADIO_SERVER_PORT": str(port),
                **variables,
            },
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
    """The address of the page of a model with results."""
    pytest.importorskip("gradio", reason='needs pip install -e ".[demo]"')
    folder = tmp_path_factory.mktemp("demo")
    place = trained(folder / "model", **RESULTS)
    with serving(folder, ["-c", f"from vaswani.demo.page import serve; serve({place!r})"]) as page:
        yield page


@pytest.fixture
def visit(browser, address):
    """Open the page. At the end, check for errors and for requests to other hosts."""
    wrong = []

    def open_page(address=address, context=None, **options):
        page = (context or browser.new_context(**options)).new_page()
        server = address.partition("?")[0]
        page.set_default_timeout(60_000)
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("response", lambda reply: reply.status >= 400 and wrong.append(reply.url))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((server, "data:", "blob:")) or wrong.append(request.url)
            ),
        )
        page.goto(address)
        page.wait_for_selector("#links .token")  # the links of the first example are drawn last
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert wrong == []


def ask(page, text):
    page.fill("#text textarea", text)
    page.click("#translate")


def shows(page, selector, text):
    """Wait until a part of the page contains a text."""
    page.locator(selector).filter(has_text=text).wait_for()


def width(page):
    """Return the width of the content. A phone zooms out to show content wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth")


def attends(page, text):
    """Wait until the attention panel shows a target text."""
    page.locator("#attention .rows").filter(has_text=text).wait_for()


def test_the_page_says_what_the_model_translates_and_starts_with_an_example(visit):
    page = visit()
    assert page.inner_text("h1") == "English → German"
    assert "was trained on number words (20,000 sentence pairs)" in page.inner_text(".origin")
    assert page.input_value("#text textarea") == SAMPLES[0]
    shows(page, "#translations", "neunhundertneunzig")


@pytest.mark.parametrize("key", ["Control+Enter", "Shift+Enter", None])
def test_a_typed_sentence_is_translated_linked_and_attended(visit, key):
    page = visit()
    page.click("#text textarea")
    page.fill("#text textarea", "")
    page.keyboard.type("three hundred and nine")
    if key:
        page.keyboard.press(key)
    else:
        page.click("#translate")
    shows(page, "#translations", "dreihundertneun")
    assert page.locator("#translations th").all_inner_texts() == ["Translation", "Score"]
    scores = [
        float(text.replace(MINUS, "-"))
        for text in page.locator("#translations .score").all_inner_texts()
    ]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    texts = page.locator("#translations .text").all_inner_texts()
    assert len(set(texts)) == len(texts) == 3
    attends(page, "dreihundertneun</s>")
    shows(page, "#links", "three")
    words = page.locator("#links dd >> nth=0").locator(".token")
    assert words.all_inner_texts() == ["three0", "hundred1", "and2", "nine3"]


def test_a_word_under_the_pointer_dims_all_that_is_not_linked_to_it(visit):
    page = visit()
    tokens = page.locator("#links .token")
    tokens.first.hover()
    number = tokens.first.get_attribute("data-word")
    dimmed = {
        (token.get_attribute("data-word") == number, "dim" in token.get_attribute("class"))
        for token in tokens.all()
    }
    assert dimmed == {(True, False), (False, True)}
    page.hover("h1")
    assert page.locator("#links .dim").count() == 0


def test_several_sentences_each_have_their_translations_to_look_into(visit):
    page = visit()
    page.fill("#count input", "2")
    ask(page, "seven\n\nnine")
    page.locator("#translations section").nth(1).wait_for()
    assert page.locator("#translations .text").count() == 4
    page.click("#chosen input")
    page.get_by_role("option").nth(2).click()
    attends(page, "neun")
    shows(page, "#links", "nine")


def test_the_chosen_head_holds_for_the_next_translation(visit):
    page = visit()
    page.select_option("#attention [name=map]", label="Encoder self-attention")
    page.select_option("#attention [name=head]", "3")
    ask(page, "seventy")
    page.locator("#attention .columns").filter(has_text="ty</s>").wait_for()
    assert page.input_value("#attention [name=head]") == "3"
    assert page.inner_text("#attention .columns") == page.inner_text("#attention .rows")


def test_a_translation_of_ones_own_is_scored_and_can_be_looked_into(visit):
    page = visit()
    page.fill("#text textarea", "seven")
    page.fill("#own textarea", "neun")
    page.press("#own textarea", "Control+Enter")
    shows(page, "#scores", "Perplexity")
    assert page.locator("#scores .tokens li").last.inner_text().startswith("</s>")
    assert "sieben" in page.inner_text("#scores .own")
    attends(page, "neun</s>")
    assert "Yours: seven → neun" in page.input_value("#chosen input")


def test_an_example_replaces_all_that_belongs_to_the_old_text(visit):
    page = visit()
    ask(page, "nine")
    shows(page, "#translations .source", "nine")
    page.fill("#own textarea", "neun")
    page.click("#score")
    shows(page, "#scores", "Perplexity")
    shows(page, "#chosen", "Sentence pair")
    attends(page, "neun</s>")
    held = []
    # Hold back the request to translate.
    page.route("**/queue/join*", lambda route: held.append(route))
    page.get_by_role("button", name=SAMPLES[1], exact=True).click()
    shows(page, "#translations", "appear here")
    for panel in ("attention", "links", "scores"):
        shows(page, f"#{panel}", "appears here")
    page.locator("#chosen").wait_for(state="hidden")
    assert page.input_value("#own textarea") == ""
    assert page.input_value("#text textarea") == SAMPLES[1]
    (translate,) = held
    translate.continue_()
    page.unroute("**/queue/join*")
    shows(page, "#translations", "sieben")
    attends(page, "sieben</s>")


def test_bad_input_is_answered_in_its_panel_and_leaves_the_others(visit):
    page = visit()

    def others():
        attention = page.get_attribute("vaswani-attention", "data")
        return attention, page.inner_text("#links dl"), page.inner_text("#scores")

    before = others()
    for text, told in (
        ("", "Write a sentence"),
        ("word " * 10_000, "at most 500 tokens"),
        ("nine\n" * 33, "at most 32"),
    ):
        ask(page, text)
        shows(page, "#translations [role=alert]", told)
    page.fill("#beams input", "99")
    ask(page, "nine")
    shows(page, "#translations [role=alert]", "from 1 to 10, got 99")
    assert others() == before
    page.fill("#beams input", "")
    page.press("#beams input", "Enter")
    shows(page, "#translations [role=alert]", "got nothing")
    page.fill("#beams input", "2")
    page.press("#beams input", "Enter")
    shows(page, "#translations", "neun")
    translations = page.inner_text("#translations")
    page.fill("#own textarea", "neun\nneun")
    page.click("#score")
    shows(page, "#scores [role=alert]", "Write one line for each sentence")
    assert page.inner_text("#translations") == translations
    ask(page, "nine 🙂 漢")
    shows(page, "#translations", "The vocabulary of this model does not contain “🙂”, “漢”.")


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
    attends(page, "onerror")
    shows(page, "#links dd", "onerror")
    assert dialogs == []


@pytest.mark.parametrize("pixels", [390, 1280])
def test_nothing_is_wider_than_the_window(visit, pixels):
    page = visit(viewport={"width": pixels, "height": 800}, is_mobile=pixels < 700)
    assert width(page) == pixels
    ask(page, f"nine hundred and ninety-nine thousand\n{'x' * 90}")
    shows(page, "#translations", "x" * 90)
    page.fill("#own textarea", "neunhundertneunundneunzigtausend\n" + "y" * 90)
    page.click("#score")
    shows(page, "#scores", "Perplexity")
    attends(page, "neunhundertneunundneunzigtausend")
    assert width(page) == pixels
    page.click("#attention .size")
    assert width(page) == pixels


def test_no_text_is_in_a_font_with_serifs(visit):
    page = visit()
    families = page.evaluate(
        "[...document.body.querySelectorAll('*')].filter(e => e.checkVisibility())"
        ".map(e => getComputedStyle(e).fontFamily)"
    )
    fallbacks = {family.split(",")[-1].strip() for family in families}
    assert fallbacks <= {"sans-serif", "monospace"}
    assert page.evaluate("getComputedStyle(document.querySelector('h2')).fontFamily").startswith(
        '"IBM Plex Sans"'
    )


def test_the_chosen_theme_is_kept(visit):
    def is_dark(page):
        return page.evaluate("document.body.classList.contains('dark')")

    context = visit(color_scheme="light").context
    (page,) = context.pages
    assert not is_dark(page)
    page.click("#theme")
    assert is_dark(page)
    assert is_dark(visit(page.url, context=context))  # the same page again
    later = visit(context=context)
    assert is_dark(later)
    later.click("#theme")
    assert not is_dark(visit(context=context))


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


def test_the_keyboard_reaches_everything_in_the_order_of_reading(visit):
    page = visit()
    page.focus("#text textarea")
    boxes = ["beams", "length_penalty", "count", "chosen", "attention", "own", "score"]
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


def test_visitors_do_not_see_each_others_texts(visit):
    first, second = visit(), visit()
    ask(first, "seven")
    ask(second, "nine")
    attends(first, "sieben</s>")
    attends(second, "neun</s>")
    assert "nine" not in first.inner_text("#translations")


def test_the_folder_that_the_readme_makes_works_alone(visit, tmp_path):
    repository = tmp_path / "repository"
    unwanted = shutil.ignore_patterns(".*", "runs", "data", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, repository, ignore=unwanted)
    trained(repository / "runs" / "quickstart", **RESULTS)
    commands = Page(SPACE / "README.md").commands("sh")
    start = next(index for index, line in enumerate(commands) if "--target" in line)
    for command in commands[start : start + 3]:
        name, _, rest = command.partition(" ")
        if name == "pip":  # without a network, use the installed build tools
            command = f"{shlex.quote(sys.executable)} -m pip {rest} --no-build-isolation"
        subprocess.run(command, shell=True, cwd=repository, check=True, capture_output=True)
    folder = repository / "space"
    command = [sys.executable, "-c", "import vaswani.demo as demo; print(demo.__file__)"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(folder)
    with serving(folder, ["app.py"], PYTHONPATH="") as address:
        page = visit(address)
        assert "runs/quickstart was trained on" in page.inner_text(".origin")
        page.close()
