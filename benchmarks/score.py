r"""A recipe's published score: the mean of several seeds, and what each ingredient is worth.

    python benchmarks/score.py multi30k-tiny --seeds 1 2 3 --ingredients --json FILE

Every seed is a run of `vaswani train` in its own folder under runs/. A finished run is not
repeated, and a killed run is resumed. If a recipe continues from another recipe's model, that
recipe runs first, with the same seed. The score of a seed is that of the final model. The test set
chooses nothing.

A small model does not keep several cores busy. `--at-once 2` trains two models side by side, each
on half of the cores, and finishes both sooner.

`--ingredients` removes one ingredient at a time, for the first seed. For averaging and the length
penalty, the trained model is decoded again. For R-Drop, the recipe runs once more without it. For
label smoothing and batches by tokens, short runs are compared: with both, without either one, and
with four batches of a quarter of the tokens. Short runs scale warm-up and checkpoints in
proportion. `--short 0` leaves out the short runs. A recipe that continues from a model has none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging
from vaswani.corpora.reading import Pair, read_pairs
from vaswani.training.checkpoints import run_checkpoints
from vaswani.training.circumstances import circumstances
from vaswani.training.metrics import TranslationMetric

from vaswani import VaswaniTranslationPipeline

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"
# Fields of a run that the report keeps. The run's own folder has all fields.
KEPT = (
    "command",
    "commit",
    "hardware",
    "date",
    "training_minutes",
    "resumed",
    "steps",
    "parameters",
    "weights_sha256",
    "valid",
    "test",
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    add("recipe", choices=names, help="one of examples/recipes/")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    add("--at-once", type=int, default=1, metavar="N", help="models trained side by side")
    add("--ingredients", action="store_true", help="measure what each ingredient is worth, too")
    add("--short", type=int, default=2000, help="updates of a short run (default: 2000; 0: none)")
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--runs", type=Path, default=ROOT / "runs", metavar="FOLDER", help="default: runs/")
    return parser.parse_args(argv)


def train(recipe: dict[str, Any], output: Path, threads: int | None = None) -> dict[str, Any]:
    """Run a recipe to its end in `output`, unless that has been done, and return its results."""
    results = output / "results.json"
    if not results.exists():
        path = output.with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        # Relative paths keep the location of this clone out of the run's files.
        places = [os.path.relpath(place, ROOT) for place in (path, output)]
        command = [sys.executable, "-m", "vaswani", "train", "--recipe", places[0]]
        command += ["--output", places[1], *(["--resume"] if output.is_dir() else [])]
        threads_of = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | threads_of)
    return json.loads(results.read_text(encoding="utf-8"))


def train_all(recipes: dict[Path, dict[str, Any]], at_once: int) -> Iterator[dict[str, Any]]:
    """Yield the results of each output folder's recipe, in order; `at_once` run side by side."""
    threads = max(1, (os.cpu_count() or 1) // at_once) if at_once > 1 else None
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda output: train(recipes[output], output, threads), recipes)


def recipe_of(name: str) -> dict[str, Any]:
    """Read one of examples/recipes/."""
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))


def runs_of(name: str, seeds: list[int], folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the recipe of each seed by output folder, with a `model` of the same seed if any."""
    recipes = {folder / f"{name}-seed{seed}": {**recipe_of(name), "seed": seed} for seed in seeds}
    for recipe in recipes.values():
        if "model" in recipe:
            first = folder / f"{Path(recipe['model']).name}-seed{recipe['seed']}"
            recipe["model"] = os.path.relpath(first, ROOT)
    return recipes


def main_score(recipe: dict[str, Any], scores: dict[str, Any]) -> float:
    """The figure that the recipe's task is judged by."""
    return scores[recipe.get("score", "bleu")]


def curve(results: dict[str, Any], score: str) -> list[dict[str, float]]:
    """Validation loss and score by update."""
    keys = {"loss": "eval_loss", score: f"eval_{score}"}
    return [
        {"step": entry["step"], **{name: entry[key] for name, key in keys.items() if key in entry}}
        for entry in results["log"]
        if "eval_loss" in entry
    ]


def decode(
    recipe: dict[str, Any], folder: Path, tokenizer: Path, pairs: list[Pair], **settings: Any
) -> float:
    """Score the model in `folder` with the recipe's search, overridden by `settings`."""
    translator = VaswaniTranslationPipeline(
        AutoModelForSeq2SeqLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tokenizer),
        device="cpu",
    )
    generation = {"num_beams": recipe["beams"], **recipe.get("generation", {}), **settings}
    sources, references = zip(*pairs, strict=True)
    outputs = [output["translation_text"] for output in translator(list(sources), **generation)]
    metric = TranslationMetric(recipe.get("bleu-tokenize", "13a"))
    return main_score(recipe, metric.compute(predictions=outputs, references=references))


def pairs_of(recipe: dict[str, Any], split: str) -> list[Pair]:
    """Read the sentence pairs of "train", "valid" or "test"."""
    paths = [str(ROOT / path) for path in recipe[split]]
    return read_pairs(paths, ("source", "target"), split)


def ingredients(
    recipe: dict[str, Any], args: argparse.Namespace, whole: Path, results: dict[str, Any]
) -> list[dict[str, Any]]:
    """Scores with and without each ingredient, on the validation and the test set."""
    rows = []
    pairs = {split: pairs_of(recipe, split) for split in ("valid", "test")}

    def add(name: str, updates: int, given: dict[str, float], without: dict[str, float]) -> None:
        rows.append({"ingredient": name, "updates": updates, "with": given, "without": without})
        gains = ", ".join(f"{split} {given[split] - without[split]:+.2f}" for split in pairs)
        print(f"{name} ({updates} updates): {gains}", flush=True)

    def decoded(folder: Path, **settings: Any) -> dict[str, float]:
        return {
            split: decode(recipe, folder, whole, some, **settings) for split, some in pairs.items()
        }

    as_is = {split: main_score(recipe, results[split]) for split in pairs}
    steps = results["steps"]
    last = run_checkpoints(whole)[-1]
    add(f"average of the last {recipe['average']}", steps, as_is, decoded(last))
    gnmt = {"length_penalty_type": "gnmt", "length_penalty": 0.6}
    none = {"length_penalty_type": "hf", "length_penalty": 0.0}
    penalties = {name: decoded(whole, **settings) for name, settings in (("g", gnmt), ("n", none))}
    add("length penalty of GNMT, alpha 0.6", steps, penalties["g"], penalties["n"])
    add(
        "score / length in its place",
        steps,
        decoded(whole, **none | {"length_penalty": 1.0}),
        penalties["n"],
    )

    if "r-drop" in recipe:
        plain = {name: value for name, value in recipe.items() if name != "r-drop"}
        (run,) = train_all({args.runs / f"{args.recipe}-no-r-drop": plain}, args.at_once)
        add("R-Drop", steps, as_is, {split: main_score(recipe, run[split]) for split in pairs})

    if not args.short or "model" in recipe:  # a short run says nothing about continued training
        return rows
    short = {**recipe, "steps": args.short}
    # Scale the warm-up too. Otherwise a short run could end inside it.
    for name in {"warmup", "save-steps"} & set(recipe):
        short[name] = max(1, recipe[name] * args.short // steps)
    epochs = next(entry for entry in reversed(results["log"]) if "epoch" in entry)
    updates_per_epoch = epochs["step"] / epochs["epoch"]
    sentences = len(pairs_of(recipe, "train"))
    if recipe.get("bpe-dropout"):
        sentences *= recipe["segmentations"]  # an epoch has as many copies
    per_batch = round(sentences / updates_per_epoch / recipe.get("accumulate", 1))
    budgets = {"max-source-tokens", "max-target-tokens"} & set(short)
    by_sentences = {name: value for name, value in short.items() if name not in budgets} | {
        "batch-size": per_batch,
        "trainer": {**recipe.get("trainer", {}), "train_sampling_strategy": "random"},
    }
    quarters = {name: short[name] // 4 for name in budgets}
    variants = {
        "short": short,
        "no label smoothing": {**short, "set": {**recipe["set"], "label_smoothing": 0.0}},
        "batches by sentences": by_sentences,
        "batches by four": {**short, **quarters, "accumulate": 4 * recipe.get("accumulate", 1)},
    }
    outputs = [args.runs / f"{args.recipe}-{name.replace(' ', '-')}" for name in variants]
    trained = train_all(dict(zip(outputs, variants.values(), strict=True)), args.at_once)
    found = dict(zip(variants, trained, strict=True))
    reference = {split: main_score(recipe, found["short"][split]) for split in pairs}
    for name, ingredient in (
        ("no label smoothing", "label smoothing"),
        ("batches by sentences", f"batches by tokens (against {per_batch} random sentences)"),
        ("batches by four", "batches by tokens (against four of a quarter an update)"),
    ):
        without = {split: main_score(recipe, found[name][split]) for split in pairs}
        add(ingredient, args.short, reference, without)
        rows[-1]["minutes"] = {
            "with": found["short"]["training_minutes"],
            "without": found[name]["training_minutes"],
        }
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    logging.set_verbosity_error()
    recipe = recipe_of(args.recipe)
    score = recipe.get("score", "bleu")
    report: dict[str, Any] = {**circumstances(), "recipe": args.recipe, "score": score, "runs": []}
    if "model" in recipe:
        first = Path(recipe["model"]).name
        for run in train_all(runs_of(first, args.seeds, args.runs), args.at_once):
            print(f"{first}: {score} {main_score(recipe, run['test'])}", flush=True)
    recipes = runs_of(args.recipe, args.seeds, args.runs)
    runs = []
    for seed, run in zip(args.seeds, train_all(recipes, args.at_once), strict=True):
        runs.append(run)
        kept = {name: run[name] for name in KEPT if name in run}
        report["runs"].append({"seed": seed, **kept, "curve": curve(run, score)})
        print(f"seed {seed}: {score} {main_score(recipe, run['test'])}", flush=True)
    for split in ("valid", "test"):
        figures = [main_score(recipe, run[split]) for run in runs]
        report[split] = {
            "mean": round(statistics.mean(figures), 2),
            "standard_deviation": round(statistics.stdev(figures), 2) if len(figures) > 1 else None,
            "seeds": figures,
        }
        print(f"{split}: {score} {report[split]['mean']} (of {figures})")
    if args.ingredients:
        whole, recipe = next(iter(recipes.items()))
        report["ingredients"] = ingredients(recipe, args, whole, runs[0])
    report["log"] = runs[0]["log"]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
