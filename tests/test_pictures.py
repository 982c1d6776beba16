"""Attention pictures show the attention of the network, with readable names of tokens."""

import gc
import io
import itertools
import warnings
import weakref
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer
from vaswani.pictures import plot_attention
from vaswani.pictures.fonts import _further_families, drawable
from vaswani.pictures.heat_maps import COLOURS, draw_heat_maps
from vaswani.pictures.labels import token_labels

from vaswani import VaswaniEncoderModel, VaswaniTokenizer

FROZEN = Path(__file__).resolve().parent / "frozen" / "0.1"
SOURCE, TARGET = "three hundred and sixty-two", "dreihundertzweiundsechzig"
VOCABULARY = 340  # of the frozen tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FROZEN)


@pytest.fixture
def model(tiny_model):
    """A model with two layers of four heads, in float64, with SDPA."""
    return tiny_model(vocab_size=VOCABULARY)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def eager_attention(model, source, target, kind):
    """Return the eager network's attention: (layers, heads, rows, columns)."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(
            torch.tensor([source]),
            decoder_input_ids=torch.tensor([[2, *target[:-1]]]),
            output_attentions=True,
        )
    model.set_attn_implementation("sdpa")
    return torch.stack(output[f"{kind}_attentions"])[:, 0]


def panels_of(figure):
    """Return the maps of a figure, whose last axes are the colour bar."""
    return figure.axes[:-1]


def drawn_in(panel):
    return panel.images[0].get_array().filled(np.nan)


def names_of(panel):
    """Return the labels of rows and columns."""
    sides = panel.get_yticklabels(), panel.get_xticklabels()
    return tuple([text.get_text() for text in side] for side in sides)


def random_map(rows, columns):
    generator = np.random.default_rng(0)
    words = ["·house", "</s>", "ry", "·extraordinarily", "·a", "·."]
    names = {
        "rows": list(itertools.islice(itertools.cycle(words), rows)),
        "columns": list(itertools.islice(itertools.cycle(words), columns)),
    }
    return generator.dirichlet(np.ones(columns), rows), names


def drawn(maps, names, **options):
    titles = {"title": "Attention", "subtitle": "", "row_name": "target", "column_name": "source"}
    return draw_heat_maps(maps, **names, **titles, **options)


# Maps


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
@pytest.mark.parametrize(
    ("layers", "heads"), [(None, None), (1, 2), (-1, None), (None, [3]), ([1, 0], range(4))]
)
def test_maps_are_the_attention_of_the_eager_network(model, tokenizer, kind, layers, heads):
    ids = tokenizer(SOURCE)["input_ids"], tokenizer(text_target=TARGET)["input_ids"]
    expected = eager_attention(model, *ids, kind)
    figure = plot_attention(model, tokenizer, SOURCE, TARGET, layers=layers, heads=heads, kind=kind)
    of_layers = [expected.mean(0)] if layers is None else expected[np.atleast_1d(layers)]
    maps = [
        shown
        for of_layer in of_layers
        for shown in ([of_layer.mean(0)] if heads is None else of_layer[np.atleast_1d(heads)])
    ]
    assert len(panels_of(figure)) == len(maps)
    for panel, by_definition in zip(panels_of(figure), maps, strict=True):
        np.testing.assert_allclose(drawn_in(panel), by_definition, rtol=0, atol=1e-6)
        np.testing.assert_allclose(drawn_in(panel).sum(1), 1, rtol=0, atol=1e-6)


def test_the_average_of_all_is_what_words_are_aligned_by(model, tokenizer):
    (expected,) = model.soft_align([SOURCE], [TARGET], tokenizer)
    (panel,) = panels_of(plot_attention(model, tokenizer, SOURCE, TARGET))
    np.testing.assert_allclose(drawn_in(panel), expected, rtol=0, atol=1e-6)


def test_a_grid_has_a_row_for_each_layer_a_column_for_each_head_and_one_scale(model, tokenizer):
    figure = plot_attention(model, tokenizer, SOURCE, TARGET, layers=[1, 0], heads=[0, 2, -1])
    panels = panels_of(figure)
    assert [panel.get_title() for panel in panels] == [
        f"layer {layer}, head {head}" for layer in (1, 0) for head in (0, 2, 3)
    ]
    corners = np.array([panel.get_position().min for panel in panels]).reshape(2, 3, 2)
    assert (np.diff(corners[..., 0], axis=1) > 0).all()  # heads go to the right
    assert (np.diff(corners[..., 1], axis=0) < 0).all()  # layers go down
    limits = {panel.images[0].get_clim() for panel in panels}
    assert limits == {(0, max(drawn_in(panel).max() for panel in panels))}
    assert figure.axes[-1].get_ylim() == next(iter(limits))
    assert [bool(names_of(panel)[0]) for panel in panels] == [True, False, False] * 2
    assert [bool(names_of(panel)[1]) for panel in panels] == [False] * 3 + [True] * 3


def test_the_grid_of_one_layer_is_wrapped(model, tokenizer):
    figure = plot_attention(model, tokenizer, SOURCE, TARGET, layers=0, heads=[0, 1, 2, 3, 0, 1])
    corners = [tuple(panel.get_position().min) for panel in panels_of(figure)]
    assert len({x for x, _ in corners}) == 3
    assert len({y for _, y in corners}) == 2


@pytest.mark.parametrize(
    ("layers", "heads", "subtitle"),
    [
        (None, None, "mean of 2 layers and 4 heads"),
        (-1, None, "layer 1, mean of 4 heads"),
        (None, 2, "head 2, mean of 2 layers"),
        (0, 3, "layer 0, head 3"),
    ],
)
def test_a_picture_says_what_it_shows(model, tokenizer, layers, heads, subtitle):
    figure = plot_attention(model, tokenizer, SOURCE, TARGET, layers=layers, heads=heads)
    assert [text.get_text() for text in figure.texts] == [
        "Encoder-decoder attention",
        subtitle,
        "target",
        "source",
    ]


def test_rows_are_predicted_tokens_and_columns_those_read(model, tokenizer):
    source = ["·th", "ree", "·hundred", "·and", "·six", "ty-", "t", "w", "o", "</s>"]
    target = ["␣", "drei", "hundert", "zw", "ei", "und", "se", "ch", "zig", "</s>"]

    def names(kind):
        (panel,) = panels_of(plot_attention(model, tokenizer, SOURCE, TARGET, kind=kind))
        return names_of(panel)

    assert names("cross") == (target, source)
    assert names("encoder") == (source, source)
    assert names("decoder") == (target, ["</s>", *target[:-1]])


def test_without_a_target_the_translation_of_the_model_is_drawn(model, tokenizer):
    model.generation_config.update(num_beams=3, max_new_tokens=7)
    batch = tokenizer(SOURCE, return_tensors="pt")
    translation = model.generate(**batch)[0, 1:].tolist()
    own = panels_of(plot_attention(model, tokenizer, SOURCE))[0]
    given = panels_of(plot_attention(model, tokenizer, batch["input_ids"][0], translation))[0]
    assert names_of(own)[0] == token_labels(translation, tokenizer)
    assert names_of(own) == names_of(given)
    np.testing.assert_array_equal(drawn_in(own), drawn_in(given))


def test_a_target_vocabulary_of_its_own_is_read_from_the_folder(tiny_model, tokenizer, tmp_path):
    other = VaswaniTokenizer.train_from_iterator(["eins zwei drei"], kind="word", vocab_size=9)
    tokenizer.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path / "target_tokenizer")
    model = tiny_model(
        vocab_size=VOCABULARY, decoder_vocab_size=9, share_encoder_decoder_embeddings=False
    )
    reader = AutoTokenizer.from_pretrained(tmp_path)
    (panel,) = panels_of(plot_attention(model, reader, "two", "zwei drei"))
    assert names_of(panel)[0] == ["zwei", "drei", "</s>"]
    given = plot_attention(model, tokenizer, "two", "zwei drei", target_tokenizer=other)
    assert names_of(panels_of(given)[0]) == names_of(panel)
    plot_attention(model, tokenizer, "two", kind="encoder")  # needs no target tokenizer
    with pytest.raises(ValueError, match="no subfolder target_tokenizer"):
        plot_attention(model, tokenizer, "two", "zwei drei")


def test_the_model_is_left_as_it_was(tiny_model, tokenizer):
    model = tiny_model(vocab_size=VOCABULARY, dropout=0.5).train()
    model.model.encoder.eval()  # a part that is frozen
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    tensors = {name: id(tensor) for name, tensor in model.named_parameters()}
    one, two = (plot_attention(model, tokenizer, SOURCE, TARGET) for _ in range(2))
    np.testing.assert_array_equal(drawn_in(panels_of(one)[0]), drawn_in(panels_of(two)[0]))
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == tensors
    assert all(tensor.grad is None for tensor in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_weights_divided_among_processes_are_refused(tiny_model, tokenizer):
    model = tiny_model(vocab_size=VOCABULARY)
    next(model.parameters()).device_mesh = None  # as the weights of FSDP2 have
    with pytest.raises(ValueError, match="divided among processes"):
        plot_attention(model, tokenizer, SOURCE, TARGET)
    assert model.config._attn_implementation == "sdpa"


def test_no_weight_is_copied(model, tokenizer, monkeypatch):
    def fail(self, memo):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", fail)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", fail)
    assert plot_attention(model, tokenizer, SOURCE, TARGET).axes


def test_rows_of_a_half_precision_model_sum_to_one(tiny_model, tokenizer):
    model = tiny_model(vocab_size=VOCABULARY, dtype=torch.bfloat16)
    (panel,) = panels_of(plot_attention(model, tokenizer, SOURCE, TARGET))
    np.testing.assert_allclose(drawn_in(panel).sum(1), 1, rtol=0, atol=0.01)


# Labels


def word_tokenizer(tokens):
    """Return a tokenizer with exactly these tokens, in their order."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<unk>", "</s>", *tokens])}
    return VaswaniTokenizer.from_backend(Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")))


def labels_of(*tokens):
    tokenizer = word_tokenizer(dict.fromkeys(tokens))
    return token_labels(tokenizer.convert_tokens_to_ids(list(tokens)), tokenizer)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["▁the", "▁hou", "se", "▁", "▁▁"], ["·the", "·hou", "se", "␣", "␣␣"]),
        (["▁a", "##b", "c@@", "▂1", "▂2x"], ["·a", "##b", "c@@", "▁", "▂x"]),
        (["the", "hou@@", "se", "@@", "@-@"], ["the", "hou‿", "se", "@@", "@-@"]),
        (["the", "hou", "##se", "##"], ["the", "hou", "‿se", "##"]),
        (["well", "￭-￭", "known"], ["well", "‿-‿", "known"]),
        (["a b", " ", "$x_1^2$", "x\ty", "\n"], ["a·b", "␣", "$x_1^2$", "x\\ty", "\\n"]),
        (
            ["\u0301", "\u200c", "می\u200cخ", "\u202e"],
            ["◌\u0301", "\\u200c", "می\u200cخ", "\\u202e"],
        ),
        (["x" * 10 + "y" * 20 + "z" * 10], ["x" * 10 + "y" + "…" + "y" * 2 + "z" * 10]),
        (["<pad>", "<unk>", "</s>"], ["<pad>", "<unk>", "</s>"]),
    ],
)
def test_labels_are_tokens_with_marks_that_can_be_read(tokens, expected):
    assert labels_of(*tokens) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("é".encode(), ["é₁", "é₂"]),
        ("a你".encode(), ["a", "你₁", "你₂", "你₃"]),
        ("😀\n".encode(), ["😀₁", "😀₂", "😀₃", "😀₄", "\\n"]),
        ("你".encode()[:2] + b"a", ["0xE4", "0xBD", "a"]),
        (b"\xff", ["0xFF"]),
    ],
)
def test_bytes_are_shown_as_the_character_they_make_up(data, expected):
    tokens = [f"<0x{byte:02X}>" for byte in data]
    assert labels_of("a", *tokens, "b") == ["a", *expected, "b"]
    assert labels_of(*tokens) == expected


def test_labels_of_byte_pairs_join_to_the_text():
    text = "Zoë  kostet $5_a 你好\u200b"
    tokenizer = VaswaniTokenizer.train_from_iterator(
        [text[:-1]], vocab_size=330, show_progress=False
    )
    shown = token_labels(tokenizer(text)["input_ids"], tokenizer)
    joined = "".join(shown).replace("·", " ").replace("␣", " ")
    assert joined == " Zoë  kostet $5_a 你好\\u200b₁\\u200b₂\\u200b₃</s>"


def make_font(path, family, characters):
    """Write a font that has squares for the given characters."""
    names = {ord(character): f"u{ord(character):x}" for character in characters}
    pen = TTGlyphPen(None)
    for place, corner in enumerate([(100, 0), (100, 700), (800, 700), (800, 0)]):
        (pen.lineTo if place else pen.moveTo)(corner)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    glyphs = [".notdef", *names.values()]
    builder.setupGlyphOrder(glyphs)
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys(glyphs, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (900, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    font_manager.fontManager.addfont(path)


@pytest.fixture
def fonts(tmp_path, monkeypatch):
    """Install fonts besides matplotlib's own, and ignore the fonts of the system."""
    manager = font_manager.fontManager
    monkeypatch.setattr(
        manager, "ttflist", [entry for entry in manager.ttflist if "mpl-data" in entry.fname]
    )
    _further_families.cache_clear()
    yield lambda family, characters: make_font(tmp_path / f"{family}.ttf", family, characters)
    _further_families.cache_clear()


def test_characters_get_the_fewest_installed_fonts_that_have_them(fonts):
    fonts("Some", "你")
    fonts("More", "你好世")
    fonts("Thai", "ส")
    drawn_labels, families = drawable(["house", "·你好", "世ส"])
    assert drawn_labels == ["house", "·你好", "世ส"]
    assert families == [*matplotlib.rcParams["font.family"], "More", "Thai"]
    weights, _ = random_map(2, 2)
    figure = drawn([("", weights)], {"rows": ["你", "好"], "columns": ["世", "ส"]})
    figure.canvas.draw()  # matplotlib would warn of a glyph that is missing
    assert figure.axes[0].get_xticklabels()[0].get_fontfamily() == families


@pytest.mark.parametrize(
    ("text", "family"), [("你好", "Noto CJK SC"), ("你の", "Noto CJK JP"), ("你세", "Noto CJK KR")]
)
def test_chinese_japanese_and_korean_get_their_own_shapes(fonts, text, family):
    for region in ("KR", "SC", "JP", "TC"):
        fonts(f"Noto CJK {region}", "你好の세")
    assert drawable([text])[1][-1] == family


def test_characters_without_a_font_are_shown_by_number_with_one_warning(fonts):
    fonts("Some", "你")
    weights, _ = random_map(2, 2)
    names = {"rows": ["·你", "·好"], "columns": ["世界", "ส" * 30]}
    with pytest.warns(UserWarning, match="No installed font has 'ส', '世', '好', '界': ") as seen:
        figure = drawn([("", weights)], names)
    assert len(seen) == 1
    figure.canvas.draw()  # matplotlib would warn of every one again
    assert names_of(figure.axes[0]) == (
        ["·你", "·\\u597d"],
        ["\\u4e16\\u754c", "\\u0e2a\\u0e2…\\u0e2a\\u0e2a"],
    )


def test_labels_are_never_read_as_formulas(model, tokenizer):
    weights, _ = random_map(2, 2)
    names = {"rows": ["$x^2$", r"$\frac{"], "columns": ["$", "a_b"]}
    figure = drawn([("", weights)], names)
    figure.canvas.draw()
    texts = [*figure.axes[0].get_yticklabels(), *figure.axes[0].get_xticklabels()]
    assert [text.get_text() for text in texts] == [*names["rows"], *names["columns"]]
    assert not any(text.get_parse_math() for text in texts)


# Layout


def test_cells_and_the_lines_between_them_meet_at_whole_pixels():
    weights, names = random_map(11, 13)
    for count in (1, 4):
        figure = drawn([(f"head {index}", weights) for index in range(count)], names)
        figure.canvas.draw()
        for panel in panels_of(figure):
            edges = panel.transData.transform([(place - 0.5, place - 0.5) for place in range(11)])
            np.testing.assert_allclose(edges, edges.round(), atol=1e-3)


def touching(figure):
    """Return the labels of a side that touch each other."""
    found = []
    for panel in panels_of(figure):
        rows, columns = panel.get_yticklabels(), panel.get_xticklabels()
        for one, other in itertools.pairwise(rows):
            if one.get_window_extent().y0 < other.get_window_extent().y1 - 1:
                found.append((one.get_text(), other.get_text()))
        for one, other in itertools.pairwise(columns):
            boxes = one.get_window_extent(), other.get_window_extent()
            if one.get_rotation() == 45:
                # Slanted labels are side by side.
                apart = (boxes[1].x1 - boxes[0].x1) * np.sin(np.pi / 4)
                clear = apart >= one.get_fontsize() * figure.dpi / 72
            else:
                clear = boxes[0].x1 <= boxes[1].x0 + 1
            if not clear:
                found.append((one.get_text(), other.get_text()))
    return found


def outside(figure):
    """Return the texts that are not completely inside the figure."""
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [*axes.get_yticklabels(), *axes.get_xticklabels(), axes.title, axes.yaxis.label]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    whole = figure.bbox
    return [
        name
        for name, box in boxes
        if box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1
    ]


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(1, 1, 1), (1, 30, 1), (60, 12, 1), (65, 65, 1), (400, 300, 1), (3, 2, 5), (12, 14, 24)],
)
def test_labels_never_touch_and_stay_inside_the_figure(rows, columns, count):
    weights, names = random_map(rows, columns)
    maps = [(f"layer {index}, head 0" if count > 1 else "", weights) for index in range(count)]
    figure = drawn(maps, names, across=8 if count == 24 else None)
    assert touching(figure) == []
    assert outside(figure) == []
    panels = panels_of(figure)
    for one, other in itertools.combinations(panels, 2):
        assert not one.get_position().overlaps(other.get_position())


def test_the_figure_grows_then_type_shrinks_then_names_are_left_out():
    sizes, types, named = [], [], []
    for tokens in (20, 60, 120, 500):
        weights, names = random_map(tokens, tokens)
        figure = drawn([("", weights)], names)
        texts = figure.axes[0].get_yticklabels()
        sizes.append(figure.axes[0].get_position().height * figure.get_size_inches()[1])
        types.append(texts[0].get_fontsize())
        named.append(len(texts) / tokens)
    assert sizes == pytest.approx([6, 12, 12, 12])  # inches
    assert types[0] == types[1] == 10 > types[2] > types[3] == 5
    assert named[:3] == [1, 1, 1]
    assert 0.1 < named[3] < 0.5


def oklab(rgb):
    """Convert to Ottosson's perceptual colour space: lightness and two opponent colours."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    mixed = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.cbrt(linear @ np.array(cones).T) @ np.array(mixed).T


def test_colours_darken_from_white_in_equal_steps():
    colours = oklab(COLOURS(np.linspace(0, 1, 12))[:, :3])
    steps = np.linalg.norm(np.diff(colours, axis=0), axis=1)
    np.testing.assert_allclose(steps, steps.mean(), rtol=0.06)
    assert (np.diff(colours[:, 0]) < -0.02).all()
    np.testing.assert_allclose(COLOURS(0.0), 1)


def test_a_figure_is_released_with_its_last_reference(model, tokenizer):
    figure = plot_attention(model, tokenizer, SOURCE, TARGET)
    assert isinstance(figure, Figure)
    watched = weakref.ref(figure)
    del figure
    gc.collect()
    assert watched() is None


# Notebooks


def test_a_notebook_shows_a_figure_as_a_png_in_the_size_of_its_type(model, tokenizer):
    figure = plot_attention(model, tokenizer, SOURCE, TARGET)
    data, size = figure._repr_png_()
    height, width, _ = matplotlib.image.imread(io.BytesIO(data), format="png").shape
    inches = figure.get_size_inches()
    assert (width, height) == tuple((inches * figure.dpi).round())
    assert (size["width"], size["height"]) == tuple((inches * 96).round())


def test_ipython_displays_a_figure_without_a_matplotlib_magic(model, tokenizer):
    formatters = pytest.importorskip("IPython.core.formatters", reason="needs ipython")
    figure = plot_attention(model, tokenizer, SOURCE, TARGET)
    shown, _ = formatters.DisplayFormatter().format(figure)
    assert sorted(shown) == ["image/png", "text/plain"]
    assert shown["image/png"].startswith(b"\x89PNG")


# Files


def test_a_png_and_an_svg_are_written(model, tokenizer, tmp_path):
    figure = plot_attention(model, tokenizer, SOURCE, TARGET, path=tmp_path / "map.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "map.png").shape
    assert (width, height) == tuple((figure.get_size_inches() * figure.dpi).round())
    plot_attention(model, tokenizer, SOURCE, TARGET, path=str(tmp_path / "map.SVG"))
    root = ElementTree.parse(tmp_path / "map.SVG").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    image = next(root.iter("{http://www.w3.org/2000/svg}image"))
    assert "pixelated" in image.get("style")  # cells stay sharp at any size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.SVG", "map.png"]


def test_a_write_that_fails_leaves_what_was_there(model, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "map.png").write_bytes(b"before")

    def fail(self, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        plot_attention(model, tokenizer, SOURCE, TARGET, path=tmp_path / "map.png")
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]
    assert (tmp_path / "map.png").read_bytes() == b"before"


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": 2}, ValueError, r"layers must name some of the 2 layers \(0 to 1.*\[2\]"),
        ({"layers": [0, -3]}, ValueError, r"2 layers .*\[-3\]"),
        ({"heads": 4}, ValueError, r"heads must name some of the 4 heads \(0 to 3.*\[4\]"),
        ({"heads": []}, ValueError, r"4 heads .*\[\]"),
        ({"layers": "all"}, TypeError, "layers must be an integer, several or None, got 'all'"),
        ({"heads": [0.5]}, TypeError, r"heads must be .*\[0.5\]"),
        ({"kind": "self"}, ValueError, "'cross', 'encoder', 'decoder', got 'self'"),
        ({"source": " \n"}, ValueError, r"source is empty \(' \\n'\)"),
        ({"target": ""}, ValueError, "target is empty .*None means"),
        ({"source": ["one", "two"]}, ValueError, "source must be one sentence.*holds 2"),
        ({"target": [[3, 2], [4, 2]]}, ValueError, "target must be one sentence.*holds 2"),
        ({"source": torch.ones(2, 3, dtype=int)}, ValueError, "source must be one sentence"),
        ({"source": 5}, TypeError, "string or a sequence of token ids, got 5"),
        ({"source": [3, VOCABULARY, 2]}, ValueError, f"token id {VOCABULARY}, outside the"),
        ({"source": "one " * 1200}, ValueError, "tokens, more than the 1000 that a picture"),
        ({"path": "map.pdf"}, ValueError, r"path must end in .png or .svg, got 'map.pdf'"),
        ({"path": "missing/map.png"}, FileNotFoundError, "there is no folder missing"),
        ({"tokenizer": None}, TypeError, "tokenizer must be .*, got NoneType"),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "VaswaniForConditional.*, got Linear"),
    ],
)
def test_bad_input_is_named_with_the_way_out(model, tokenizer, arguments, error, message):
    given = {"model": model, "tokenizer": tokenizer, "source": SOURCE, "target": TARGET}
    with pytest.raises(error, match=message):
        plot_attention(**{**given, **arguments})


def test_a_batch_of_one_is_a_sentence(model, tokenizer):
    def labels(source):
        figure = plot_attention(model, tokenizer, source, TARGET)
        return [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]

    ids = tokenizer([SOURCE])["input_ids"]
    assert len(set(labels(SOURCE))) > 1
    for source in ([SOURCE], ids, torch.tensor(ids)):
        assert labels(source) == labels(SOURCE)


def test_a_model_without_a_decoder_is_refused(tiny_model, tokenizer):
    model = tiny_model(VaswaniEncoderModel, vocab_size=VOCABULARY)
    with pytest.raises(TypeError, match="got VaswaniEncoderModel"):
        plot_attention(model, tokenizer, SOURCE)


def test_a_model_of_another_vocabulary_is_refused(tiny_model, tokenizer):
    smaller = tiny_model()
    with pytest.raises(ValueError, match=r"outside the 19 entries.*tokenizer and model belong"):
        plot_attention(smaller, tokenizer, SOURCE, TARGET)
    larger = tiny_model(vocab_size=VOCABULARY + 10)
    with pytest.raises(ValueError, match=r"\(340 entries\) has no token 345: check that"):
        plot_attention(larger, tokenizer, [3, 345, 2], TARGET)


def test_layers_are_counted_on_the_side_that_is_drawn(tiny_model, tokenizer):
    model = tiny_model(vocab_size=VOCABULARY, encoder_layers=3, decoder_layers=1)
    figure = plot_attention(model, tokenizer, SOURCE, kind="encoder", layers=2)
    assert figure.texts[1].get_text() == "layer 2, mean of 4 heads"
    only = plot_attention(model, tokenizer, SOURCE, TARGET)
    assert only.texts[1].get_text() == "layer 0, mean of 4 heads"
    with pytest.raises(ValueError, match=r"1 layers \(0 to 0"):
        plot_attention(model, tokenizer, SOURCE, TARGET, layers=2)
