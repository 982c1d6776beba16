"""The examples work on small data as documented, and name file and line of bad input."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from forks import forked
from num2words import num2words
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"


def test_quickstart_trains_saves_and_reloads_the_same_model(tmp_path):
    command = [ROOT / "examples" / "quickstart.py", "--output", tmp_path / "model"]
    sizes = ["--steps", "5", "--train-size", "300", "--test-size", "20"]
    assert "same after reloading   yes" in forked(1, *command, *sizes)
    assert json.loads((tmp_path / "model" / "results.json").read_text())["numbers_tested"] == 20


def test_quickstart_gets_99_percent_of_unseen_numbers_right_within_four_minutes():
    results = ROOT / "runs" / "quickstart" / "results.json"
    if not results.exists():
        pytest.skip("run `python examples/quickstart.py` first: its result is checked here")
    figures = json.loads(results.read_text())
    assert figures["numbers_tested"] >= 1000
    assert figures["exactly_right"] >= 0.99
    assert figures["same_after_reloading"]
    if figures["load_average"] < figures["hardware"]["cores"] + 0.5:  # nothing else ran
        assert figures["minutes"] <= 4


def test_help_shows_a_command_to_copy(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "python examples/quickstart.py" in printed
    assert "default" in printed


def run_notebook(steps, pairs, folder, monkeypatch):
    """Execute the cells of examples/paper.ipynb, and return their names."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((ROOT / "examples" / "paper.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            code = code.replace("STEPS, PAIRS = 300, 6000", f"STEPS, PAIRS = {steps}, {pairs}")
            exec(compile(code, cell["id"], "exec"), names)
    assert (names["STEPS"], names["PAIRS"]) == (steps, pairs)
    return names


def test_the_notebooks_formulas_are_those_of_the_package(tmp_path, monkeypatch):
    names = run_notebook(2, 300, tmp_path, monkeypatch)
    assert names["trainer"].state.global_step == 2
    assert names["figure"].axes
    assert len(names["translations"]) == 100


@pytest.mark.slow
def test_the_model_of_the_notebook_learns_to_reorder(tmp_path, monkeypatch):
    assert run_notebook(300, 6000, tmp_path, monkeypatch)["right"] >= 80


def test_a_saved_model_is_fine_tuned_with_seq2seq_trainer_alone(tmp_path):
    numbers = range(1000, 1100)  # the frozen model has seen none above 999
    # A third column is not read.
    rows = [f"{n:05}\t{num2words(n, lang='de')}\tCC-BY\n" for n in numbers]  # digits are text
    (tmp_path / "pairs.tsv").write_text("".join(rows), encoding="utf-8")
    output = tmp_path / "out"
    command = [ROOT / "examples" / "fine_tune.py", FROZEN, tmp_path / "pairs.tsv"]
    forked(1, *command, "--output", output, "--learning-rate", "1e-3")
    tokenizer = AutoTokenizer.from_pretrained(output)
    batch = tokenizer(["01042"], text_target=[num2words(1042, lang="de")])
    before, after = (
        AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (FROZEN, output)
    )
    tensors = {name: torch.tensor(batch[name]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        assert after(**tensors).loss < before(**tensors).loss
