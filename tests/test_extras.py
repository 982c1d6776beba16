"""If a package of an extra is missing, the error is one sentence with the pip command."""

import importlib
import sys
from pathlib import Path

import pytest
from forks import in_child
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.commands.main import main
from vaswani.configuration.extras import needs
from vaswani.conversion import onnx, sentencepiece
from vaswani.conversion.errors import ConversionError

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
OURS = (
    "vaswani.training",
    "vaswani.corpora",
    "vaswani.pictures",
    "vaswani.demo",
    "vaswani.conversion.ctranslate2",
)
SCRIPT_NAMES = ("quickstart", "accelerate_loop", "app")


def said_without(package, function, capfd):
    """Return the error of a function in a process without a package."""

    def run():
        for name in list(sys.modules):
            if name.split(".")[0] in (package, *SCRIPT_NAMES) or name.startswith(OURS):
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:  # otherwise `from parent import child` would find it
                    vars(sys.modules[parent]).pop(child, None)
        sys.modules[package] = None  # makes Python's import fail
        sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "space")]
        try:
            function()
        except (ModuleNotFoundError, ConversionError, SystemExit) as error:
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()

    capfd.readouterr()
    assert in_child(run) == 0, capfd.readouterr().err
    return capfd.readouterr().out


MODULES = [
    ("gradio", "vaswani.demo.page", "vaswani[demo]"),
    ("matplotlib", "vaswani.training.curves", "vaswani[train]"),
    ("datasets", "vaswani.training.metrics", "vaswani[train]"),
    ("datasets", "vaswani.training.trainer", "vaswani[train]"),
    ("evaluate", "vaswani.training.metrics", "vaswani[train]"),
    ("sacrebleu", "vaswani.training.metrics", "vaswani[train]"),
    *(
        ("xxhash", f"vaswani.corpora.{module}", "vaswani[train]")
        for module in ("corpus", "duplicates", "preparing", "vocabulary")
    ),
]


@pytest.mark.parametrize(("package", "module", "requirement"), MODULES)
def test_importing_a_module_names_the_command(capfd, package, module, requirement):
    said = said_without(package, lambda: importlib.import_module(module), capfd)
    assert said == f"{package} is not installed: pip install '{requirement}'\n"


SCRIPTS = [
    ("num2words", "quickstart", "vaswani[train]"),
    ("datasets", "quickstart", "vaswani[train]"),
    ("accelerate", "accelerate_loop", "vaswani[train]"),
    ("gradio", "app", "vaswani[demo]"),
]


@pytest.mark.parametrize(("package", "script", "requirement"), SCRIPTS)
def test_a_script_ends_with_the_command(capfd, package, script, requirement):
    said = said_without(package, lambda: importlib.import_module(script), capfd)
    assert said == f"{package} is not installed: pip install '{requirement}'\n"


def test_pictures_name_the_command_when_they_are_drawn(capfd):
    def draw():
        importlib.import_module("vaswani.pictures").plot_attention(None, None, "text")

    said = said_without("matplotlib", draw, capfd)
    assert said == "matplotlib is not installed: pip install 'matplotlib'\n"


def test_the_hoverable_view_needs_no_matplotlib(capfd):
    def show():
        model, tokenizer = (
            kind.from_pretrained(FROZEN) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
        )
        pictures = importlib.import_module("vaswani.pictures")
        view = pictures.hoverable_attention(model, tokenizer, "nine", "neun")
        raise SystemExit(view.html[:18])

    assert said_without("matplotlib", show, capfd).endswith("<vaswani-attention\n")


CONVERTERS = [
    ("sentencepiece", lambda: sentencepiece.SentencePiece.read(Path("m.model"))),
    ("onnxruntime", lambda: onnx.OnnxTranslator("folder")),
    ("ctranslate2", lambda: main(["convert", "to-ctranslate2", str(FROZEN), "out"])),
    ("onnxscript", lambda: main(["convert", "to-onnx", str(FROZEN), "out"])),
]


@pytest.mark.parametrize(("package", "call"), CONVERTERS, ids=[name for name, _ in CONVERTERS])
def test_converters_end_with_the_command(tmp_path, monkeypatch, capfd, package, call):
    monkeypatch.chdir(tmp_path)
    said = said_without(package, call, capfd)
    assert "pip install 'vaswani[convert]'" in said
    assert package in said.lower()
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_wrong_in_an_installed_package_is_no_missing_extra():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"), needs("vaswani[train]"):
        from json import nothing  # noqa: F401
