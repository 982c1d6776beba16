"""The examples do what their manuals say, on small data, and refuse bad input by file and line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
TINY = ["--vocab-size", "340", "--set", "d_model=32", "encoder_layers=1", "decoder_layers=1"]
TINY += ["encoder_attention_heads=4", "decoder_attention_heads=4"]
TINY += ["encoder_ffn_dim=64", "decoder_ffn_dim=64"]


def subprocess_environment(**extra):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def test_quickstart_trains_saves_and_reloads_the_same_model(tmp_path):
    command = [sys.executable, ROOT / "examples" / "quickstart.py", "--output", tmp_path / "model"]
    sizes = ["--steps", "5", "--train-size", "300", "--test-size", "20"]
    done = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, env=subprocess_environment(), check=True
    )
    assert "same after reloading   yes" in done.stdout
    assert json.loads((tmp_path / "model" / "results.json").read_text())["numbers_tested"] == 20


def test_quickstart_gets_99_percent_of_unseen_numbers_right_within_four_minutes():
    results = ROOT / "runs" / "quickstart" / "results.json"
    if not results.exists():
        pytest.skip("run `python examples/quickstart.py` first: its result is checked here")
    figures = json.loads(results.read_text())
    assert figures["numbers_tested"] >= 1000
    assert figures["exactly_right"] >= 0.99
    assert figures["same_after_reloading"]
    assert figures["minutes"] <= 4


def test_help_shows_a_command_to_copy():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "quickstart.py", "--help"],
        capture_output=True,
        text=True,
        env=subprocess_environment(),
        check=True,
    )
    assert "python examples/quickstart.py" in done.stdout
    assert "default" in done.stdout
