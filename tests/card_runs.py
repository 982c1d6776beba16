"""A model with the files of a training run, and readers of its card."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers.testing_utils import CaptureLogger
from vaswani.hub_cards import card as cards
from vaswani.hub_cards import metadata as card_metadata
from vaswani.hub_cards import saved_model
from vaswani.hub_cards.card import write_model_card
from vaswani.training.circumstances import weights_sha256

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CIRCUMSTANCES = {
    "command": "python train.py --steps 6538",
    "commit": "abc1234",
    "hardware": {"cpu": "Some CPU", "cores": 2, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "date": "2026-01-31",
}
SCORES = {
    "bleu": 36.82,
    "signature": SIGNATURE,
    "chrf": 61.07,
    "chrf_signature": "nrefs:1|case:mixed|nc:6|nw:0|version:2.6.0",
    "compound_split_bleu": 37.4,
    "exact_match": 12.3,
    "beams": 4,
    "nbest_accuracy": [12.3, 18.25],
}
SAMPLE = {"source": "three hundred and forty-two", "translation": "a | b", "reference": "<i>c</i>"}
RUN = {
    **CIRCUMSTANCES,
    "training_minutes": 29.5,
    "resumed": False,
    "steps": 6538,
    "pairs": {"train": 29_000, "valid": 1014, "test": 1000},
    "settings": {
        "train": ["data/train.tok.en.gz", "data/train.tok.de.gz"],
        "valid": ["data/valid.tok.en.gz", "data/valid.tok.de.gz"],
        "test": ["data/test.tok.en.gz", "data/test.tok.de.gz"],
        "columns": ["source", "target"],
        "license": None,
        "model": None,
    },
    "arguments": {"learning_rate": 0.00417, "adam_beta2": 0.98},
    "log": [{"step": 3000, "loss": 4.0}, {"step": 6538, "eval_loss": 1.9737, "eval_bleu": 35.36}],
    "valid": {"loss": 1.97, "perplexity": 7.1973, "greedy_bleu": 35.36, "signature": SIGNATURE},
    "test": {**SCORES, "samples": [SAMPLE]},
}
SEVERAL_SEEDS = {
    **CIRCUMSTANCES,
    "recipe": "numbers",
    "score": "bleu",
    "runs": [
        {"seed": seed, "test": {**SCORES, "bleu": bleu}} for seed, bleu in ((1, 36.8), (2, 36.9))
    ],
    "test": {"mean": 36.85, "standard_deviation": 0.07, "seeds": [36.8, 36.9]},
}


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """runs/numbers in the working folder: a saved translation model without results."""
    monkeypatch.chdir(tmp_path)
    unwanted = shutil.ignore_patterns("expected.*")
    return shutil.copytree(FROZEN, Path("runs/numbers"), ignore=unwanted)


@pytest.fixture
def run(bare):
    """The same model with the files of a training run."""
    write_json(bare / "results.json", {**RUN, "weights_sha256": weights_sha256(bare)})
    (bare / "recipe.yaml").write_text("steps: 6538\nwarmup: 800\n")
    (bare / "test.txt").write_text("zwei\n")
    (bare / "learning_curve.png").write_bytes(b"drawn")
    return bare


@pytest.fixture
def warnings():
    """A function that returns the warnings of hub_cards so far."""
    with contextlib.ExitStack() as stack:
        loggers = (cards.logger, card_metadata.logger, saved_model.logger)
        logs = [stack.enter_context(CaptureLogger(logger)) for logger in loggers]
        yield lambda: "".join(log.io.getvalue() for log in logs)


# A test file gives these fixtures their names.
FIXTURES = bare, run, warnings


def text_of(folder, **options):
    return write_model_card(folder, **options).read_text(encoding="utf-8")


def metadata(text):
    """Return the YAML block, parsed without huggingface_hub."""
    block = re.match(r"---\n(.*?)\n---\n", text, re.S)
    return yaml.safe_load(block[1]) if block else {}


def score_rows(text):
    """Return the cells of the results table."""
    table = text[text.index("## Results") : text.index("## Use")]
    rows = re.findall(r"^\| (.*) \|$", table, re.M)
    cells = [re.split(r" ?(?<!\\)\| ?", row) for row in rows]
    return [row for row in cells if len(row) == 6 and row[0] != "data" and "---" not in row[0]]


def leaves(content):
    """Return all strings of a results file, and all numbers as formatted in a card."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return set().union(*map(leaves, content))
    return {f"{content:.2f}"} if isinstance(content, int | float) else {content}


def assert_every_score_stands_in_its_file(card):
    text = card.read_text(encoding="utf-8")
    rows = score_rows(text)
    for _, _, value, _, signature, link in rows:
        name = re.fullmatch(r"\[(.+)\]\(\1\)", link)[1]
        known = leaves(json.loads((card.parent / name).read_text(encoding="utf-8")))
        numbers = re.findall(r"\d+\.\d+", value)
        assert numbers
        assert set(numbers) <= known, name
        assert signature.strip("`").replace("\\|", "|") in {"", *known}
    files = [path for pattern in ("*.json", "results/*.json") for path in card.parent.glob(pattern)]
    known = set().union(*(leaves(json.loads(path.read_text("utf-8"))) for path in files))
    for entry in ModelCard.load(card).data.eval_results or []:
        assert f"{entry.metric_value:.2f}" in known
        assert (entry.metric_args or {}).get("signature", SIGNATURE) in {SIGNATURE, *known}
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (card.parent / link).is_file(), link
    return rows


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
