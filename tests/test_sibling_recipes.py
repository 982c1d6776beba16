"""The recipes of the siblings: the baseline is a distribution, and each recipe runs."""

import importlib.util
import json
import os
import random
import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "siblings"
SHORT = {
    "classify": [],
    "language_model": ["--models", "n-grams", "vaswani"],
    "masked_words": ["--pretraining-updates", "2", "--pairs", "60", "--seeds", "1"],
    "one_stream": ["--data", "Multi30k"],
}


@pytest.fixture(autouse=True)
def _beside_the_recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_the_probabilities_of_every_context_sum_to_1(order):
    spec = importlib.util.spec_from_file_location("recipe", RECIPES / "language_model.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    draw = random.Random(0)
    sentences = [
        [2, *(draw.randrange(3, 9) for _ in range(draw.randrange(1, 9))), 2] for _ in range(60)
    ]
    model = recipe.KneserNey(sentences, order, 9)
    contexts = {tuple(row[max(end - order + 1, 0) : end]) for row in sentences for end in (1, 2, 4)}
    for context in {*contexts, (8, 8, 8)[: order - 1], ()}:
        total = sum(
            model.probability(context[-order + 1 :] if order > 1 else (), n) for n in range(9)
        )
        assert total == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_every_recipe_runs(name, tmp_path, monkeypatch):
    if not Path(os.environ.get("VASWANI_DATA", ""), "multi30k").is_dir():
        pytest.skip("needs Multi30k in the folder $VASWANI_DATA")
    results = tmp_path / "results.json"
    words = [f"{name}.py", "--updates", "2", "--results", str(results), *SHORT[name]]
    words += ["--lines", "60"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    assert {"command", "commit", "hardware", "versions", "date"} < json.loads(
        results.read_text()
    ).keys()
