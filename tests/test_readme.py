"""What the README prints is what happens: blocks are run, outputs compared, numbers looked up."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from documents import (
    ROOT,
    Page,
    converter_call,
    environment,
    printed_by,
    training_call,
    written_tests,
)
from loopback_hub import LoopbackHub
from num2words import num2words
from vaswani.conversion import SUMMARIES

PAGE = Page(ROOT / "README.md")
README, PYTHON = PAGE.text, PAGE.python()
COMMANDS = [line for line in PAGE.commands("") if line.startswith("python ")]


def python_block(containing):
    (block,) = [block for block in PYTHON if containing in block[0]]
    return block


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
    assert printed_by(code, "README.md") == expected


def test_presets_are_as_printed():
    code, expected = python_block("presets()")
    assert printed_by(code, "README.md") == expected


def test_scores_alignments_and_bulk_translations_are_as_printed(quickstart):
    code, expected = python_block("return_scores=True")
    assert printed_by(code, "README.md") == expected


def test_the_adapter_block_adapts_every_linear_layer(quickstart):
    pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")
    code, _ = python_block("untie_embeddings")
    names = {}
    assert "trainable params" in printed_by(code, "README.md", names)
    plain = {
        name
        for name, module in names["model"].named_modules()
        if type(module) is torch.nn.Linear and ".lora_" not in name and "base_layer" not in name
    }
    assert plain == set()


def test_shell_commands_are_understood_by_accelerate_and_by_the_script(monkeypatch):
    """The flags are accelerate's, what follows the script train_translation.py's."""
    lines = [line for line in PAGE.commands("sh") if not re.search(r"conversion|score\.py", line)]
    calls = [training_call(line, monkeypatch) for line in lines]
    launched = [(args, launch) for args, launch in calls if launch]
    assert len(launched) == 4
    for args, launch in launched:
        assert abs(args.max_source_tokens * launch.num_processes - 25_000) < 10
    assert all(args.train for args, _ in calls)


def test_conversions_are_understood_by_their_converters(monkeypatch):
    lines = PAGE.commands("sh", containing="vaswani.conversion")
    called = [converter_call(line, monkeypatch)[0] for line in lines]
    assert sorted(called) == sorted(SUMMARIES)


def test_conversion_table_names_tests_that_exist():
    table = README[README.index("## Bring a checkpoint") : README.index("## Share a checkpoint")]
    named = re.findall(r"\| `(test_\w+)` \|$", table, re.M)
    assert len(named) == 10
    assert set(named) <= written_tests("test_conversion_*.py")


def test_heat_maps_are_drawn_as_printed(quickstart):
    block, _ = python_block("plot_attention")
    printed_by(block, "README.md")
    assert (quickstart / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert (quickstart / "heads.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


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
        "return_scores=True",
        "untie_embeddings",
        "plot_attention",
        "push_to_hub",
        "trust_remote_code=True",
    )
    assert sum(any(mark in code for mark in run) for code, _ in PYTHON) == len(PYTHON) == len(run)


def test_fidelity_table_names_tests_that_exist():
    rows = re.findall(r"^\| ([\d.]+|Table 3) \| .* \| `(test_\w+)` \|$", README, re.M)
    assert len(rows) >= 20
    assert {name for _, name in rows} <= written_tests("test_paper.py")
    for section, name in rows:
        assert name.startswith("test_" + section.lower().replace(".", "_").replace(" ", "_"))


def test_results_come_from_results_files():
    section = README[README.index("## Results") : README.index("## Train on your own pairs")]
    lines = section.splitlines()
    files = re.findall(r"^\|.*\((benchmarks/results/[\w-]+\.json)\) \|$", section, re.M)
    assert files
    for path in files:
        results = json.loads((ROOT / path).read_text(encoding="utf-8"))
        assert {"commit", "hardware", "versions", "date", "log"} <= set(results)
        assert results["command"] in lines
        (row,) = [line for line in lines if f"({path})" in line]
        test, runs = results["test"], results["runs"]
        errors = results["score"] == "exact_match"
        figures = [
            f"**{100 - test['mean'] if errors else test['mean']:.2f}**",
            f"mean of {len(runs)} seeds" if len(runs) > 1 else "one seed",
            f"{runs[0]['parameters'] / 1e6:.2f}M parameters",
        ]
        figures.append(f"{runs[0]['steps']:,} updates")
        # The minutes of a run that was resumed are not all of them.
        if whole := [run for run in runs if not run["resumed"]]:
            assert {run["hardware"]["threads"] for run in whole} == {1}
            longest = max(run["training_minutes"] for run in whole)
            at_once = re.search(r"--at-once (\d+)", results["command"])
            cores = runs[0]["hardware"]["cores"]
            figures.append(
                f"{longest:.0f} min for all, {at_once[1]} at once on {cores} CPU cores"
                if at_once
                else f"{longest:.0f} min on one CPU core"
            )
        for figure in figures:
            assert figure in row
        assert runs[0]["test"]["signature"] in section
        for ingredient in results.get("ingredients", ()):
            scores = [f"{ingredient[side]['test']:.2f}" for side in ("with", "without")]
            row = [ingredient["ingredient"], str(ingredient["updates"]), *scores]
            assert f"| {' | '.join(row)} |" in lines
        if errors:
            *_, among_the_best = runs[0]["test"]["nbest_accuracy"]
            assert f"{among_the_best:.2f}% of the words" in section


def test_local_links_lead_to_files():
    for path, anchor in PAGE.local_links():
        assert path.exists(), path
        assert not anchor or anchor in PAGE.anchors(), anchor


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
    for part in results["profile"]:
        if part["batch"] == 1 or part["precision"] == "float32":
            assert part["shares"]["mkldnn::_linear_pointwise"] > 0.75, "three quarters and more"
    missed = {aim["aim"] for aim in results["aims"] if not aim["met"]}
    assert all("batch 1" in aim or "float32, beam 4, batch 32" in aim for aim in missed)


def test_training_table_comes_from_its_results_file():
    results = json.loads((ROOT / "benchmarks/results/training.json").read_text(encoding="utf-8"))
    assert {"command", "commit", "hardware", "versions", "date", "aims"} <= set(results)
    section = README[README.index("## Train fast") : README.index("## Repeat a published")]
    rows = {
        (row["name"], row["precision"], row["tokens_per_batch"]): row for row in results["trainer"]
    }
    for engine, precision in {key[:2] for key in rows}:
        measured = [rows.get((engine, precision, size), {}) for size in (1024, 2048, 4096, 8192)]
        figures = [
            f"{row['tokens_per_second']:.0f}" if "peak_mb" in row else "out of memory"
            for row in measured
        ]
        figures.append(f"{measured[2]['peak_mb'] / 1024:.1f} GB")
        assert f"| {engine} | {precision} | {' | '.join(figures)} |" in section
    for part, name in (("trainer", "speed"), ("trainer", "memory"), ("network", "speed")):
        ratios = [
            f"{ratio[name]:.2f}"
            for ratio in results["ratios"][part]
            if ratio["tokens_per_batch"] == 4096
        ]
        assert " and ".join(ratios) in section
    ours, theirs = (
        row["flops_per_second"] / 1e9
        for row in results["network"]
        if row["precision"] == "float32" and row["tokens_per_batch"] == 4096
    )
    rates = ours, theirs, 1.4 * theirs, results["matrix_flops_per_second"]["float32"] / 1e9
    found = re.search(
        r"(\d+) GFLOP/s, MarianMT at (\d+).*?is (\d+) of the (\d+)", section, re.DOTALL
    )
    assert found is not None
    assert [int(rate) for rate in found.groups()] == [round(rate) for rate in rates]
