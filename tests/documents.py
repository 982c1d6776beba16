"""README.md and the pages of docs/ as tests read them: blocks, commands, links.

python tests/documents.py    put right the line numbers in docs/ after code has moved
"""

import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# [`what the line holds`](../folder/file.py#L12)
_LINE = re.compile(r"(\[`([^`]+)`\]\(([^()#\s]+)#L)(\d+)\)")


class Page:
    """A Markdown file."""

    def __init__(self, path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.blocks = _BLOCK.findall(self.text)  # (language, body)

    def python(self):
        """Its Python blocks, each with what it prints: the block without a language behind it."""
        following = [*self.blocks, ("", None)][1:]
        return [
            (body, printed if not language_of_next else None)
            for (language, body), (language_of_next, printed) in zip(
                self.blocks, following, strict=True
            )
            if language == "python"
        ]

    def commands(self, language, containing=""):
        """The commands in blocks of a language, each in one line."""
        return [
            line
            for block_language, body in self.blocks
            if block_language == language
            for line in body.replace("\\\n", "").splitlines()
            if containing in line and line.strip() and not line.startswith("#")
        ]

    def local_links(self):
        """Where its links lead inside the repository: (path, what stands behind "#")."""
        prose = _BLOCK.sub("", self.text)
        targets = re.findall(r"\]\((?!https?:)([^()\s]+)\)", prose)
        for target in targets:
            path, _, anchor = target.partition("#")
            yield (self.path.parent / path if path else self.path), anchor

    def anchors(self):
        """What GitHub calls its headings."""
        headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", self.text), re.M)
        return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}

    def with_right_lines(self):
        """The text, each link to a line leading to the only one that holds the link's text.

        Raises:
            ValueError: no line of the file holds it, or several do.
        """

        def right(match):
            start, code, path, _ = match.groups()
            lines = (self.path.parent / path).read_text(encoding="utf-8").splitlines()
            found = [number for number, line in enumerate(lines, start=1) if code in line]
            if len(found) != 1:
                places = f"lines {', '.join(map(str, found))}" if found else "no line"
                raise ValueError(
                    f"{self.path.name}: {path} holds `{code}` in {places}, not in one."
                )
            return f"{start}{found[0]})"

        return _LINE.sub(right, self.text)

    def line_links(self):
        """How many links to lines `with_right_lines` sees."""
        return len(_LINE.findall(self.text))


def pages():
    """The pages of docs/."""
    return [Page(path) for path in sorted((ROOT / "docs").glob("*.md"))]


def printed_by(code, name, names=None):
    """Run a block and return what it prints; `names` are what blocks before it have left."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, name, "exec"), {} if names is None else names)
    return output.getvalue()


def environment(**extra):
    """The environment of a process that imports the package from this checkout."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def written_tests(pattern="test_*.py"):
    """The names of all tests in files of that pattern."""
    return {
        name
        for path in (ROOT / "tests").glob(pattern)
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }


def training_call(command, monkeypatch):
    """Parse a command of train_translation.py: its arguments, and those of accelerate, if any."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(ROOT)  # where recipes are
    train = importlib.import_module("train_translation")
    if command.startswith("accelerate launch "):
        from accelerate.commands.launch import launch_command_parser

        launch = launch_command_parser().parse_args(shlex.split(command)[2:])
        assert launch.training_script == "examples/train_translation.py"
        return train.parse_args(launch.training_script_args), launch
    before, script, arguments = command.partition(" examples/train_translation.py ")
    assert script, command
    assert before.startswith("python")
    return train.parse_args(shlex.split(arguments)), None


def converter_call(command, monkeypatch):
    """Parse a command of vaswani.conversion: the toolkit, and what its converter would get."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "vaswani.conversion"]
    toolkit = words[3]
    command_line = importlib.import_module("vaswani.conversion.__main__")
    converter = command_line.find(toolkit)
    known = {
        keyword
        for name in {"convert", "load"} & set(dir(converter))
        for keyword in inspect.signature(getattr(converter, name)).parameters
    }
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(converter, "convert", lambda **arguments: calls.append(arguments))
        command_line.main(words[3:])
    (arguments,) = calls
    assert arguments.keys() <= known
    return toolkit, arguments


if __name__ == "__main__":
    for page in pages():
        page.path.write_text(page.with_right_lines(), encoding="utf-8")
