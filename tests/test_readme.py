"""What the README prints is what happens: blocks are run, outputs compared, numbers looked up."""

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from loopback_hub import LoopbackHub
from num2words import num2words
from vaswani.conversion import __main__ as conversion

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    (language, body) for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
]
PYTHON = [
    (body, BLOCKS[i + 1][1] if i + 1 < len(BLOCKS) and not BLOCKS[i + 1][0] else None)
    for i, (language, body) in enumerate(BLOCKS)
    if language == "python"
]
COMMANDS = [
    command
    for language, body in BLOCKS
    if not language
    for command in body.replace("\\\n", "").splitlines()
    if command.startswith("python ")
]


def python_block(containing):
    (block,) = [block for block in PYTHON if containing in block[0]]
    return block


def printed_by(code):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    return output.getvalue()


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """A folder where runs/quickstart is the model of the README's first command."""
    if not (ROOT / "runs" / "quickstart" / "results.json").exists():
        pytest.skip(
            "run `python examples/quickstart.py` first: the README continues from its model"
        )
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(ROOT / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(**extra):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def test_setup_commands_stand_on_the_first_screen():
    first_screen = README[: README.index("```python")]
    assert (
        'pip install -c constraints.txt -e ".[train]" && python examples/quickstart.py'
        in first_screen
    )
    assert 'pip install -c constraints.txt -e ".[dev]" && python -m pytest' in first_screen


def test_first_code_block_translates_as_printed_in_six_lines(quickstart):
    code, expected = python_block("three hundred and forty-two")
    assert len(code.splitlines()) == 6
    assert printed_by(code) == expected


def test_presets_are_as_printed():
    code, expected = python_block("presets()")
    assert printed_by(code) == expected


def test_scores_alignments_and_bulk_translations_are_as_printed(quickstart):
    code, expected = python_block("VaswaniTranslationPipeline")
    assert printed_by(code) == expected


def test_the_adapter_block_adapts_every_linear_layer(quickstart):
    pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")
    code, _ = python_block("untie_embeddings")
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "README.md", "exec"), names)
    assert "trainable params" in output.getvalue()
    plain = {
        name
        for name, module in names["model"].named_modules()
        if type(module) is torch.nn.Linear and ".lora_" not in name and "base_layer" not in name
    }
    assert plain == set()


def test_shell_commands_are_understood_by_accelerate_and_by_the_script(monkeypatch):
    """The flags are accelerate's, what follows the script train_translation.py's."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(ROOT)
    import train_translation

    lines = [
        line
        for language, body in BLOCKS
        if language == "sh"
        for line in body.replace("\\\n", "").splitlines()
        if not line.startswith("#") and "vaswani.conversion" not in line
    ]
    launched = [line for line in lines if line.startswith("accelerate launch ")]
    assert len(launched) == 4
    for command in launched:
        words = launch_command_parser().parse_args(shlex.split(command)[2:])
        assert words.training_script == "examples/train_translation.py"
        args = train_translation.parse_args(words.training_script_args)
        assert abs(args.max_source_tokens * words.num_processes - 25_000) < 10
    for command in {*lines} - {*launched}:
        before, script, arguments = command.partition(" examples/train_translation.py ")
        assert script, command
        assert before.startswith("python")
        assert train_translation.parse_args(shlex.split(arguments)).train


def test_conversions_are_understood_by_their_converters(monkeypatch):
    lines = re.findall(r"^python -m vaswani\.conversion (\S+ .*)$", README, re.M)
    called = []
    for toolkit, name in conversion.CONVERTERS.items():
        module = importlib.import_module(f"vaswani.conversion.{name}")
        function = "save" if toolkit.startswith("to-") else "convert"
        keywords = {
            keyword
            for named in {function, "load"} & set(dir(module))
            for keyword in inspect.signature(getattr(module, named)).parameters
        }

        def record(_toolkit=toolkit, _keywords=keywords, **kwargs):
            called.append(_toolkit)
            assert set(kwargs) <= _keywords

        with monkeypatch.context() as patch:
            patch.setattr(module, function, record)
            for line in lines:
                if line.split()[0] == toolkit:
                    conversion.main(shlex.split(line))
    assert sorted(called) == sorted(conversion.CONVERTERS)


def test_conversion_table_names_tests_that_exist():
    table = README[README.index("## Bring a checkpoint") : README.index("## Share a checkpoint")]
    named = re.findall(r"\| `(test_\w+)` \|$", table, re.M)
    written = {
        name
        for path in (ROOT / "tests").glob("test_conversion_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    assert len(named) == 10
    assert set(named) <= written


def test_sharing_pushes_a_repository_that_loads_without_the_package(quickstart):
    push, _ = python_block("push_to_hub")
    pull, _ = python_block("trust_remote_code=True")
    block_package = "import sys; sys.modules['vaswani'] = None\n"
    with LoopbackHub() as hub:
        for code in (push, block_package + pull):
            subprocess.run(
                [sys.executable, "-c", code], env=environment(**hub.environment), check=True
            )


def test_commands_for_own_pairs_run_as_printed(tmp_path):
    """Each command runs as printed, with small sizes and few steps appended to it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    numbers = range(100, 140)
    for name in ("train", "valid", "test"):
        for language in ("en", "de"):
            lines = [num2words(n, lang=language) + "\n" for n in numbers]
            (tmp_path / f"{name}.{language}").write_text("".join(lines), encoding="utf-8")
    rows = [f"{num2words(n)}\t{num2words(n, lang='de')}\n" for n in numbers]
    (tmp_path / "more.tsv").write_text("".join(rows), encoding="utf-8")
    small = "--steps 4 --vocab-size 340 --set d_model=32 encoder_layers=1 decoder_layers=1"
    for command in COMMANDS:
        shorter = ""
        if "train_translation" in command:
            shorter = "--steps 4" if "--model" in command else small
        words = shlex.split(f"{command} {shorter}")
        subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, env=environment(), check=True)
    assert len((tmp_path / "test.out").read_text(encoding="utf-8").splitlines()) == len(numbers)
    assert (tmp_path / "runs" / "en-de-more" / "model.safetensors").exists()
    assert len(COMMANDS) == 4


def test_every_python_block_is_run_by_a_test_above():
    run = (
        "three hundred and forty-two",
        "presets()",
        "VaswaniTranslationPipeline",
        "untie_embeddings",
        "push_to_hub",
        "trust_remote_code=True",
    )
    assert sum(any(mark in code for mark in run) for code, _ in PYTHON) == len(PYTHON) == len(run)


def test_fidelity_table_names_tests_that_exist():
    tests = set(
        re.findall(r"^def (test_\w+)", (ROOT / "tests" / "test_paper.py").read_text(), re.M)
    )
    rows = re.findall(r"^\| ([\d.]+|Table 3) \| .* \| `(test_\w+)` \|$", README, re.M)
    assert len(rows) >= 20
    assert {name for _, name in rows} <= tests
    for section, name in rows:
        assert name.startswith("test_" + section.lower().replace(".", "_").replace(" ", "_"))


def test_results_table_comes_from_results_files():
    table = README[README.index("## Results") : README.index("## Train on your own pairs")]
    (command,) = re.findall(r"^```sh\n(.*?)\n```$", table, re.M | re.S)
    rows = re.findall(r"\[(\w[\w./-]+)\]\((benchmarks/results/[\w./-]+\.json)\)", table)
    assert rows
    for _, path in rows:
        results = json.loads((ROOT / path).read_text(encoding="utf-8"))
        (row,) = [line for line in table.splitlines() if f"({path})" in line]
        for figure in (
            f"{results['test']['bleu']:.2f}",
            f"{results['training_minutes']:.0f} min",
            results["test"]["signature"].replace("|", r"\|"),
        ):
            assert figure in row
        assert {"command", "commit", "hardware", "versions", "date", "log"} <= set(results)
        assert results["command"] == re.sub(r" \\\n +", " ", command)


def test_local_links_lead_to_files():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_decoding_table_comes_from_its_results_file():
    results = json.loads((ROOT / "benchmarks/results/generation.json").read_text(encoding="utf-8"))
    assert {"command", "commit", "hardware", "versions", "date", "aims"} <= set(results)
    found = {
        (row["engine"], row["precision"], row["batch"]): row
        for row in results["speed"]
        if row["beams"] == 4
    }
    table = README[README.index("## Decode") : README.index("## Score, align")]
    for engine, precision, _ in {key[:2]: key for key in found}.values():
        speeds = [found[engine, precision, size] for size in (1, 8, 32, 128)]
        figures = [f"{row['sentences_per_second']:.1f}" for row in speeds]
        figures.append(f"{speeds[0]['bleu']:.2f}")
        assert f"| {engine} | {precision} | {' | '.join(figures)} |" in table
