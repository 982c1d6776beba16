"""Parsers of README.md and docs/ for tests: blocks, commands and links."""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
from pathlib import Path

from vaswani.commands import main as commands
from vaswani.conversion import find

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


class Page:
    """A Markdown file."""

    def __init__(self, path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.words = " ".join(self.text.split())  # a sentence without its line breaks
        self.blocks = _BLOCK.findall(self.text)  # (language, body)

    def python(self):
        """The Python blocks with their outputs. An output is a following block without language."""
        following = [*self.blocks, ("", None)][1:]
        return [
            (body, printed if not language_of_next else None)
            for (language, body), (language_of_next, printed) in zip(
                self.blocks, following, strict=True
            )
            if language == "python"
        ]

    def commands(self, language="sh", containing=""):
        """The commands in blocks of a language, with continued lines joined."""
        return [
            line
            for block_language, body in self.blocks
            if block_language == language
            for line in body.replace("\\\n", "").splitlines()
            if containing in line and line.strip() and not line.startswith("#")
        ]

    def rows(self, header):
        """The rows of cells of the table whose header starts with a text."""
        table = self.text[self.text.index(f"\n| {header}") :].split("\n\n")[0]
        rows = table.strip().splitlines()[2:]
        return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]

    def says(self, *facts):
        """Tell whether a paragraph, list item or table row has all facts, in this order."""
        prose = _BLOCK.sub("", self.text)
        passages = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=[-*|] |\d+\. )", prose)]
        # A number is no part of a longer number.
        sought = [rf"(?<![\d.]){re.escape(str(fact))}(?!\.?\d)" for fact in facts]
        return any(re.search(".*?".join(sought), passage) for passage in passages)

    def local_links(self):
        """The targets of links inside the repository, as pairs of a path and an anchor."""
        prose = _BLOCK.sub("", self.text)
        targets = re.findall(r"\]\((?!https?:)([^()\s]+)\)", prose)
        for target in targets:
            path, _, anchor = target.partition("#")
            yield (self.path.parent / path if path else self.path), anchor

    def code_links(self):
        """Links to code, as pairs of the path and the code in the link's text."""
        for fragment, target in re.findall(r"\[`([^`]+)`\]\(([^()\s]+\.(?:py|yaml))\)", self.text):
            yield self.path.parent / target, fragment

    def anchors(self):
        """The anchors that GitHub makes for the headings."""
        headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", self.text), re.M)
        return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}


def pages():
    """The pages of docs/ by name, and the README."""
    found = {path.stem: Page(path) for path in sorted((ROOT / "docs").glob("*.md"))}
    found["index"] = found.pop("README")
    return {"README": Page(ROOT / "README.md"), **found}


def printed_by(code, name, names=None):
    """Run a block and return its output. `names` has the variables of earlier blocks."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, name, "exec"), {} if names is None else names)
    return output.getvalue()


def environment(**extra):
    """Return environment variables with which a process imports the package from this checkout."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def written_tests(pattern="test_*.py"):
    """Return the names of all tests in the files of a pattern."""
    return {
        name
        for path in (ROOT / "tests").glob(pattern)
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }


def parsed(command, monkeypatch):
    """Parse a command `vaswani ...` with its own parser, and return the arguments.

    The command may follow the launcher of accelerate or torch. The second value has the launcher's
    arguments, or None.
    """
    words, launcher = shlex.split(command), None
    if words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        launcher = launch_command_parser().parse_args(words[2:])
    elif words[:3] == ["python", "-m", "torch.distributed.run"]:
        from torch.distributed.run import get_args_parser

        launcher = get_args_parser().parse_args(words[3:])
    if launcher is not None:
        assert launcher.module, "the launcher needs -m"
        words = [launcher.training_script, *launcher.training_script_args]
    assert words[0] == "vaswani", command
    if words[1] == "convert":
        return converter_call(command, monkeypatch), None
    monkeypatch.chdir(ROOT)  # paths of recipes are relative to the root
    return commands.COMMANDS[words[1]][0].make_parser().parse_args(words[2:]), launcher


def converter_call(command, monkeypatch):
    """Parse a command `vaswani convert ...`, and return the arguments of its converter."""
    words = shlex.split(command)
    assert words[:2] == ["vaswani", "convert"]
    converter = find(words[2])
    known = {
        keyword
        for name in {"convert", "load"} & set(dir(converter))
        for keyword in inspect.signature(getattr(converter, name)).parameters
    }
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(converter, "convert", lambda **arguments: calls.append(arguments))
        commands.main(words[1:])
    (arguments,) = calls
    assert arguments.keys() <= known
    return {"converter": words[2], **arguments}


DOCS = pages()
RESULTS = ROOT / "benchmarks" / "results"


def results_of(name):
    """Read a file of benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def results_of_hosts():
    """The results of the decoding benchmark; of one day, the usual settings come last."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((RESULTS / "generation").glob("*.json"))
    ]
