"""The demo page without a browser: translations, scores, links, views, events and errors."""

import ast
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser

import pytest
import torch
import yaml
from demo_models import FROZEN, RESULTS, SAMPLES, trained
from documents import ROOT, Page, environment
from huggingface_hub import SpaceCard
from huggingface_hub.cli.hf import app as hf
from loopback_hub import LoopbackHub
from transformers import MarianConfig
from vaswani.demo import translator as limits
from vaswani.demo import views
from vaswani.demo.description import Description, describe, language_name
from vaswani.demo.translator import LinkedText, ScoredPair, Translation, Translator, WordLinks
from vaswani.hub_cards.card import write_model_card

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

SPACE = ROOT / "examples" / "space"


@pytest.fixture(scope="module")
def model():
    """The Translator of a small trained model."""
    return Translator(str(FROZEN))


class Seen(HTMLParser):
    """Parser of the tags and the visible text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


# Translations, scores and links


def test_the_page_needs_gradio_in_one_file_only():
    for path in (ROOT / "demo").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            name.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for name in node.names
        }
        assert ("gradio" in imported) == (path.name == "page.py"), path


@pytest.mark.parametrize(("beams", "alpha", "count"), [(4, 0.6, 3), (1, 0.6, 1), (3, 1.7, 3)])
def test_translations_and_scores_are_those_of_generate(model, beams, alpha, count):
    lines = ["three hundred and forty-two", "nine", "ninety thousand"]
    found = model.translate(lines, beams, alpha, count)
    for line, translations in zip(lines, found, strict=True):
        inputs = model.tokenizer(line, return_tensors="pt").to(model.model.device)
        output = model.model.generate(
            **inputs,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=alpha,
            return_dict_in_generate=True,
            output_scores=True,
        )
        texts = model.tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        first = {text: texts.index(text) for text in texts}  # the best hypothesis of each text
        kept = sorted(first.values())[:count]
        assert [translation.text for translation in translations] == [texts[i] for i in kept]
        if beams > 1:
            scores = torch.tensor([translation.score for translation in translations])
            expected = output.sequences_scores[kept]
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_hypotheses_of_one_text_are_shown_once(model, monkeypatch):
    hypotheses = [("a b", -1.0), ("a b ", -1.5), ("c", -2.0), ("a b", -2.5), ("d", -3.0)]
    results = [{"translation_text": text, "score": score} for text, score in hypotheses]
    monkeypatch.setattr(model, "pipeline", lambda lines, **settings: iter([results]))
    (found,) = model.translate(["nine"], 5, 0.6, 3)
    assert [(one.text, one.score) for one in found] == [("a b", -1.0), ("c", -2.0), ("d", -3.0)]


def test_there_are_no_more_translations_than_the_beam_is_wide(model):
    ((one,),) = model.translate(["nine"], 1, 0.6, 5)
    (two,) = model.translate(["nine"], 2, 0.6, 5)
    assert (one.text, len(two)) == ("neun", 2)


def test_scores_are_those_of_the_plain_network(model):
    pairs = [("nine", "neun"), ("three hundred and forty-two", "zweihundertneun")]
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    for pair in model.score(sources, targets, 4, 0.6):
        source = model.tokenizer(pair.source, return_tensors="pt")["input_ids"]
        labels = model.tokenizer(text_target=pair.target, return_tensors="pt")["input_ids"]
        prefix = torch.cat((torch.tensor([[2]]), labels[:, :-1]), dim=1)
        device = model.model.device
        with torch.no_grad():
            logits = model.model(source.to(device), decoder_input_ids=prefix.to(device)).logits[0]
        logits = logits.cpu()
        expected = logits.log_softmax(dim=-1).gather(1, labels[0][:, None])[:, 0]
        torch.testing.assert_close(pair.log_probs, expected, atol=1e-5, rtol=1e-5)
        total, length = float(expected.sum()), labels.shape[1]
        assert len(pair.tokens) == length
        assert pair.total == pytest.approx(total, abs=1e-4)
        assert pair.perplexity == pytest.approx(math.exp(-total / length), rel=1e-4)
        assert pair.score == pytest.approx(total / ((5 + length) / 6) ** 0.6, abs=1e-4)
        ((best,),) = model.translate([pair.source], 4, 0.6)
        assert pair.best.text == best.text
        assert pair.best.score == pytest.approx(best.score, abs=1e-5)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("nine", "neun"),
        ("three hundred and nine", "drei hundert neun"),
        ("one hundred and forty-two thousand", "einhundertzweiundvierzigtausend"),
    ],
)
def test_word_links_are_those_of_the_model(model, source, target):
    (expected,) = model.model.align([source], [target], model.tokenizer)
    links = model.link(source, target)
    assert links.pharaoh == expected != ""
    assert links.words == source.split()


def test_a_target_token_has_the_source_word_that_it_attends_to_most(model):
    source, target = "one hundred and forty-two", "einhundertzweiundvierzig"
    links = model.link(source, target)
    (weights,) = model.model.soft_align([source], [target], model.tokenizer)
    encoded = model.tokenizer([source, target], return_offsets_mapping=True)
    source_spans, target_spans = encoded["offset_mapping"]
    tokens = model.tokenizer.convert_ids_to_tokens(encoded["input_ids"][1])
    starts = [match.start() for match in re.finditer(r"\S+", source)]
    expected = []
    for row, token, (start, end) in zip(weights, tokens, target_spans, strict=True):
        if token not in ("▁", "</s>"):  # these tokens have no characters
            attended = int(row[: len(source_spans) - 1].argmax())  # not to "</s>"
            characters = source_spans[attended]
            word = max(n for n, at in enumerate(starts) if at < characters[1])
            expected.append(LinkedText(target[start:end], word))
    assert links.pieces == expected
    assert len({piece.word for piece in links.pieces}) > 2
    assert "".join(piece.text for piece in links.pieces) == target


def test_pieces_make_up_the_target_and_spaces_and_bytes_stay_whole(model):
    target = " drei  Häuser.🙂 é"
    pieces = model.link("three houses", target).pieces
    assert "".join(piece.text for piece in pieces) == target
    assert all((piece.word is None) == piece.text.isspace() for piece in pieces)
    assert [piece.text for piece in pieces if piece.text in "ä🙂é"] == ["ä", "🙂", "é"]


def test_a_source_of_white_space_only_has_no_links(model):
    assert model.link(" ", "neun") == WordLinks([], [LinkedText("neun", None)], "")


@pytest.fixture
def folder(tmp_path):
    """Write a small model with a vocabulary learned from given lines."""

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


def shown_maps(html):
    """Return the heat maps of an attention view: encoder-decoder, encoder and decoder."""
    ((tag, attributes),) = Seen(html).tags
    assert tag == "vaswani-attention"
    return json.loads(attributes["data"])["maps"]


def test_encoder_and_decoder_may_have_other_numbers_of_layers(folder):
    model = Translator(str(folder(["a b"], encoder_layers=3, decoder_layers=1)))
    assert [shown["layers"] for shown in shown_maps(model.attention("a", "b"))] == [1, 3, 1]


def test_a_target_with_a_vocabulary_of_its_own_is_read_by_its_own_tokenizer(model, folder):
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
    model = Translator(str(path))
    assert model.sentences("w x", "text_target") == ["w x"]
    (pair,) = model.score(["a b"], ["w x"], 2, 0.6)
    assert pair.tokens == ["w", "x", "</s>"]
    assert [piece.text for piece in model.link("a b", "w x").pieces] == ["w", " ", "x"]
    assert shown_maps(model.attention("a b", "w x"))[0]["rows"] == ["w", "x", "</s>"]


# Bad input


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Write a sentence"),
        (" \n\t\n", "Write a sentence"),
        ("word " * 10_000, r"has 5\d,\d{3} tokens. This page takes at most 500 tokens"),
        ("x" * 5_000_000, "has 5,000,000 characters. This page takes at most 500 tokens"),
        ("nine\n" * 33, "has 33 lines. This page takes at most 32 sentences"),
    ],
)
def test_a_text_that_cannot_be_translated_is_refused_by_a_message_that_names_the_limit(
    model, text, told
):
    with pytest.raises(ValueError, match=told):
        model.sentences(text)


def test_blank_lines_are_no_sentences(model):
    assert model.sentences("\n nine \r\n\n ten\n") == ["nine", "ten"]


def test_half_of_a_surrogate_pair_does_not_stop_the_page(model):
    (line,) = model.sentences("nine \ud83d")
    assert len(model.translate([line], 2, 0.6)[0]) == 1


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
        ({"length_penalty": -0.1}, "length penalty must be between 0 and 2, got -0.1"),
        ({"length_penalty": 2.1}, "got 2.1"),
        ({"length_penalty": math.nan}, "got nan"),
        ({"length_penalty": None}, "got nothing"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_range(model, settings, told):
    with pytest.raises(ValueError, match=told):
        model.translate(["nine"], **{"beams": 4, "length_penalty": 0.6, **settings})


def test_every_sentence_needs_one_translation_to_score(model):
    with pytest.raises(ValueError, match=r"2 sentences and your translation 1\. Write one line"):
        model.score(["nine", "ten"], ["neun"], 4, 0.6)
    with pytest.raises(ValueError, match="Write your translation"):
        model.sentences(" ", "text_target")


def test_an_empty_translation_has_no_attention(model):
    with pytest.raises(ValueError, match="translation is empty"):
        model.attention("nine", " ")


def test_characters_outside_the_vocabulary_are_named_in_order(model, folder):
    assert model.unfamiliar(["🙂 nine 漢字", "字 nine"]) == ["🙂", "漢", "字"]
    assert model.unfamiliar(["nine hundred"]) == []
    words = Translator(str(folder(["a b c"])))
    assert words.unfamiliar(["a dog b 🙂", "dog"]) == ["dog", "🙂"]
    assert len(words.translate(["🙂"], 2, 0.6)[0]) == 1


def test_a_model_that_is_not_there_or_is_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"no file or folder \./nothing"):
        Translator("./nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"\./empty"):
        Translator("./empty")
    MarianConfig().save_pretrained(tmp_path / "marian")
    with pytest.raises(OSError, match=r"marian \./marian OUTPUT"):
        Translator("./marian")


# Descriptions of models


def test_results_say_languages_data_pairs_and_examples(tmp_path):
    found = describe(trained(tmp_path / "model", **RESULTS))
    assert found == Description(["en", "de"], "number words", 20_000, SAMPLES)
    assert found.direction == "English → German"


def test_results_of_other_weights_say_nothing(tmp_path):
    place = trained(tmp_path / "model", **RESULTS | {"weights_sha256": "0" * 64})
    assert describe(place) == Description()


def test_the_languages_of_the_card_come_before_those_of_the_results(tmp_path):
    place = trained(tmp_path / "model", **RESULTS)
    write_model_card(place, language=["fr", "nl"], license="mit")
    assert describe(place).direction == "French → Dutch"
    assert describe(place).training_data == "number words"


@pytest.mark.parametrize(
    ("metadata", "languages", "data"),
    [
        ({"language": ["de", "en"], "tags": ["en-de"]}, ["en", "de"], None),
        ({"language": ["en", "de"], "tags": ["translation"]}, [], None),  # no order is stated
        ({"language": "en", "datasets": ["wmt14"]}, [], "wmt14"),
        ({"language": ["en", False], "tags": ["en-no"]}, ["en", "no"], None),  # YAML's unquoted no
        ({"language": ["en", "de", "fr"], "tags": ["en-de"]}, [], None),
        ({}, [], None),
    ],
)
def test_a_card_says_languages_only_with_their_order(tmp_path, metadata, languages, data):
    shutil.copy(FROZEN / "config.json", tmp_path)
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(metadata)}---\n# Model\n")
    assert describe(str(tmp_path)) == Description(languages, data)


@pytest.mark.slow
def test_a_model_of_the_hub_says_the_same_as_its_folder(tmp_path):
    place = trained(tmp_path / "model", **RESULTS)
    program = """
import sys
from huggingface_hub import HfApi
from vaswani.demo.translator import Translator
HfApi().create_repo("user/model")
HfApi().upload_folder(repo_id="user/model", folder_path=sys.argv[1])
print(Translator("user/model").description)
"""
    with LoopbackHub() as hub:
        run = subprocess.run(
            [sys.executable, "-c", program, place],
            env=environment(**hub.environment),
            capture_output=True,
            text=True,
        )
    assert run.stdout.strip() == str(describe(place)), run.stderr


def test_a_recipe_says_its_files_and_their_languages(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: [data/news/train.en, data/news/train.de]\n")
    assert describe(str(tmp_path)) == Description(["en", "de"], "news/train")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "---\nlanguage: {a: b}\ntags: 5\n---\n"),
        ("recipe.yaml", "train: 5\nlanguages: 5\n"),
        ("recipe.yaml", "train: [[a]]\n"),
        ("recipe.yaml", "train: {a: b}\n"),
    ],
)
def test_facts_of_other_types_are_left_out(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert describe(str(tmp_path)) == Description()


def test_data_of_a_card_may_be_numbers(tmp_path):
    (tmp_path / "README.md").write_text("---\ndatasets: [2016]\n---\n")
    assert describe(str(tmp_path)).training_data == "2016"


def test_a_length_penalty_of_the_model_itself_is_in_the_range(model, monkeypatch):
    monkeypatch.setattr(model.model.generation_config, "length_penalty", 2.5)
    assert model.translate(["nine"], 4, 2.5)
    with pytest.raises(ValueError, match=r"between 0 and 2\.5, got 2\.6"):
        model.translate(["nine"], 4, 2.6)


@pytest.mark.parametrize("name", ["README.md", "results.json", "recipe.yaml"])
def test_a_damaged_file_says_nothing(tmp_path, name):
    place = tmp_path / "model"
    shutil.copytree(FROZEN, place)
    (place / name).write_text("---\n{[:\n---\n")
    assert describe(str(place)) == Description()


@pytest.mark.parametrize(
    ("code", "name"),
    [("de", "German"), ("pt-BR", "Portuguese"), ("ht", "Haitian Creole"), ("tlh", "tlh")],
)
def test_languages_have_their_english_names(code, name):
    assert language_name(code) == name


# Views


MINUS = "\N{MINUS SIGN}"
MARKUP = "<script>alert(1)</script>\"'&amp; ${1}"


def test_markup_in_texts_is_text():
    found = [Translation(MARKUP, -1.0)]
    pair = ScoredPair(MARKUP, "x", [MARKUP], torch.tensor([-1.0]), -1.0, Translation(MARKUP, -1.0))
    described = Description(["en", "de"], MARKUP, 1, [])
    for html in (
        views.heading(MARKUP, Description(), [MARKUP]),
        views.heading(MARKUP, described, []),
        views.message(MARKUP),
        views.hint(MARKUP),
        views.translations([MARKUP], [found], [MARKUP]),
        views.word_links(WordLinks([MARKUP], [LinkedText(MARKUP, 0)], "0-0")),
        views.scores([pair]),
    ):
        seen = Seen(html)
        assert "script" not in {tag for tag, _ in seen.tags}
        assert "<script>alert(1)</script>\"'&amp;" in seen.text


@pytest.mark.parametrize(
    ("description", "title", "told"),
    [
        (
            Description(["en", "de"], "number words", 20_000),
            "English → German",
            "runs/a was trained on number words (20,000 sentence pairs).",
        ),
        (Description(["en", "de"]), "English → German", "do not say what it was trained on"),
        (Description([], "number words"), "runs/a", "Trained on number words."),
        (Description(), "runs/a", "do not say what it translates, or what it was trained on"),
    ],
)
def test_the_heading_says_what_is_known_of_the_model_and_what_is_not(description, title, told):
    html = views.heading("runs/a", description, ["2 layers"])
    assert f"<h1>{title}</h1>" in html
    assert told in Seen(html).text


def test_scores_have_a_label_and_bars_compare_with_the_best():
    found = [Translation("a", -0.5), Translation("b", -0.5 + math.log(0.25)), Translation("", -99)]
    html = views.translations(["x"], [found], [])
    assert re.findall(r"--share: (\d+)%", html) == ["100", "25", "0"]
    seen = Seen(html).text.replace(MINUS, "-")
    assert seen.startswith("x Translation Score a -0.500 b -1.886 (empty) -99.000 Score: ")


def test_target_tokens_have_the_colours_and_numbers_of_their_source_words():
    pieces = [("x", 0), ("y", 2), (" ", None), ("z", 0)]
    links = WordLinks(["a", "b", "c"], [LinkedText(*piece) for piece in pieces], "0-0 2-0 0-1")
    html = views.word_links(links)
    tokens = re.findall(r'data-word="(\d)" style="--hue: (\d+)">(\w)<sub>(\d)</sub>', html)
    assert [(text, number) for _, _, text, number in tokens] == [
        *(("a", "0"), ("b", "1"), ("c", "2")),
        *(("x", "0"), ("y", "2"), ("z", "0")),
    ]
    hue = {number: hue for number, hue, _, _ in tokens[:3]}
    assert len(set(hue.values())) == 3
    assert all(hue[number] == shown for number, shown, _, _ in tokens)
    assert "gradient" not in html  # a token has one colour
    assert "0-0 2-0 0-1" in Seen(html).text


def test_scores_show_each_token_the_sum_and_the_perplexity(model):
    (pair,) = model.score(["nine"], ["neun"], 4, 0.6)
    seen = Seen(views.scores([pair])).text.replace(MINUS, "-")
    for token, value in zip(pair.tokens, pair.log_probs.tolist(), strict=True):
        assert f"{token} {value:.3f}" in seen
    assert f"Log-probability {pair.total:.3f}" in seen
    assert f"Perplexity {pair.perplexity:.2f}" in seen
    assert f"Score {pair.score:.3f}" in seen


def test_a_translation_that_is_the_models_own_is_not_repeated(model):
    best = model.translate(["nine"], 4, 0.6)[0][0].text
    (same, other) = model.score(["nine", "nine"], [best, "acht"], 4, 0.6)
    assert "The model writes the same." in Seen(views.scores([same])).text
    assert f"The model writes {best} with the score" in Seen(views.scores([other])).text


# Event handlers


@pytest.fixture(scope="module")
def page():
    pytest.importorskip("gradio", reason='needs pip install -e ".[demo]"')
    from vaswani.demo import page

    return page


def skipped(value):
    """Tell whether an output leaves its component unchanged."""
    return isinstance(value, dict) and value.keys() == {"__type__"}


@pytest.mark.slow
def test_an_error_in_one_panel_leaves_the_others(page, model):
    handlers = page.Handlers(model)
    for shown, *others in (
        handlers.translate("", 4, 0.6, 3),
        handlers.translate("nine", 99, 0.6, 3),
        handlers.score("nine\nten", "neun", 4, 0.6),
    ):
        assert 'role="alert"' in shown
        assert all(map(skipped, others))
    pairs = [page.Pair("1", "nine", " ")]
    assert 'role="alert"' in handlers.attend(pairs, 0)
    assert 'role="alert"' not in handlers.link(pairs, 0)


@pytest.mark.slow
def test_a_failure_of_the_model_is_named_in_its_panel_and_logged(page, model, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("out of memory")

    handlers = page.Handlers(model)
    monkeypatch.setattr(page.logger, "propagate", True)
    for name in ("translate", "score", "link", "attention"):
        monkeypatch.setattr(model, name, fail)
    pairs = [page.Pair("1", "nine", "neun")]
    shown = (
        handlers.translate("nine", 4, 0.6, 3)[0],
        handlers.score("nine", "neun", 4, 0.6)[0],
        handlers.attend(pairs, 0),
        handlers.link(pairs, 0),
    )
    for html in shown:
        assert "RuntimeError: out of memory" in Seen(html).text
    assert len([record for record in caplog.records if record.exc_info]) == 4


@pytest.mark.slow
def test_a_new_text_empties_every_panel(page, model):
    handlers = page.Handlers(model)
    *panels, own, chosen, pairs = handlers.clear()
    assert all("appear" in Seen(panel).text for panel in panels)
    assert (own, pairs, chosen.value, chosen.visible) == ("", [], None, False)
    _, scores, _, _ = handlers.translate("nine", 4, 0.6, 3)
    assert scores == panels[1]


@pytest.mark.slow
def test_equal_translations_are_one_choice(page, model):
    _, chosen, pairs = page.Handlers(model).score("nine\nnine", "neun\nacht", 4, 0.6)
    assert [pair.name for pair in pairs] == [
        "Yours and the model's: nine → neun",
        "Yours: nine → acht",
        "The model's: nine → neun",
    ]
    assert chosen.value == 0


# The Space


def test_the_readme_is_a_card_that_the_hub_accepts():
    card = SpaceCard.load(SPACE / "README.md")
    assert card.data.sdk == "gradio"
    assert (SPACE / card.data.app_file).is_file()
    assert len(card.data.short_description) <= 60
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"gradio=={card.data.sdk_version}" in pinned


def test_the_readme_names_the_limits_of_the_page():
    text = (SPACE / "README.md").read_text(encoding="utf-8")
    assert f"{limits.MAX_SENTENCES} sentences and {limits.MAX_TOKENS} tokens" in text


def test_the_requirements_are_those_of_the_package():
    lines = (SPACE / "requirements.txt").read_text().splitlines()
    required = {line for line in lines if not line.startswith(("#", "-"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert required == set(project["project"]["dependencies"])


def test_the_commands_of_the_readme_that_reach_the_hub_are_its_clients(capsys):
    commands = Page(SPACE / "README.md").commands("sh", "hf ")
    assert len(commands) == 3
    for line in commands:
        words = shlex.split(line)[1:]
        hf.main([*words, "--help"], standalone_mode=False)  # unknown words and options raise
        command = " ".join(words[: words.index("user/demo")])
        assert f" {command} [OPTIONS]" in capsys.readouterr().out
