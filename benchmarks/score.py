r"""A recipe's published score: the mean of several seeds, and what each ingredient is worth.

    pip install scipy
    python benchmarks/score.py multi30k-muon --seeds 1 2 3 --ingredients --json FILE

Every seed is a run of `vaswani train` in its own folder under runs/. A finished run is not
repeated, and a killed run is resumed. A folder with a run of other settings is refused. If a recipe
continues from another recipe's model, that recipe runs first, with the same seed. The score of a
seed is that of the final model. The test set chooses nothing.

Seeds can be trained on several machines, or on several days. If FILE exists, its other seeds stay
in the report. With `--keep-scores`, the recipe is trained for seeds that FILE lacks only. The first
seed is trained again if the bootstrap of an ingredient needs its translations. Runs with or without
an ingredient are trained for all `--seeds`.

A small model does not keep several cores busy. `--at-once 2` trains two models side by side, each
on half of the cores, and finishes both sooner.

`--ingredients` measures each ingredient with all seeds. For averaging and the length penalty, the
trained models are decoded again. For the others, the recipe runs again without the ingredient, or
with it. A second stage, such as R-Drop, is compared with as many further updates without it.

RECIPE may also be the path of another recipe. The paths in it begin at the project's folder.
`--published` is the score that its seeds are compared with.

Where a score counts exact matches, the seeds also vote. The ensemble's output is the most frequent
output. In a tie, the output of the first such seed wins.

Three tests of significance are made: a t-test of the seeds against the published score, a paired
t-test of the seeds for each ingredient, and sacreBLEU's paired bootstrap for the first seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest
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
REPORTED = (
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


# Published scores on the test set, and where they come from.
PUBLISHED = {
    "multi30k-tiny": (41.02, "Wu et al. (2021)"),
    "multi30k-muon": (41.02, "Wu et al. (2021)"),
    "multi30k-muon-r-drop": (41.02, "Wu et al. (2021)"),
    "multi30k-muon-risk": (41.02, "Wu et al. (2021)"),
    "g2p-eng_us": (58.06, "SIGMORPHON 2021 Task 1, the baseline ensemble"),
}
SPLITS = ("valid", "test")
# Length penalties by the names of their rows. Each row compares a penalty with no penalty.
PENALTIES = {
    "length penalty of GNMT, alpha 0.6": {"length_penalty_type": "gnmt", "length_penalty": 0.6},
    "score / length": {"length_penalty_type": "hf", "length_penalty": 1.0},
}
NO_PENALTY = {"length_penalty_type": "hf", "length_penalty": 0.0}
SECOND_STAGE_OPTIONS = ("r-drop", "objective", "objective-settings")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    add("recipe", metavar="RECIPE", help=f"a YAML file, or one of {', '.join(names)}")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4, 5],
        metavar="N",
        help="default: 1 2 3 4 5",
    )
    add("--at-once", type=int, default=1, metavar="N", help="models trained side by side")
    add(
        "--ingredients",
        nargs="*",
        metavar="NAME",
        help='also measure these ingredients, such as "BPE-dropout"; without names, all of them',
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--published", type=float, metavar="SCORE", help="published score of the test set")
    add("--keep-scores", action="store_true", help="take scores of the recipe from FILE")
    add("--runs", type=Path, default=ROOT / "runs", metavar="FOLDER", help="default: runs/")
    args = parser.parse_args(argv)
    if not recipe_file(args.recipe).is_file():
        parser.error(f"RECIPE: {args.recipe!r} is neither a file nor one of {', '.join(names)}")
    if len(set(args.seeds)) < len(args.seeds):
        parser.error(f"--seeds: give each seed once, got {' '.join(map(str, args.seeds))}")
    if args.keep_scores and args.json is None:
        parser.error("--keep-scores: name the FILE that holds the scores with --json")
    return args


def require_scipy() -> None:
    """End the program before the first training if scipy is missing."""
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        sys.exit(f"The tests of significance need scipy: pip install scipy ({error})")


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


def refuse_other_recipe(recipe: dict[str, Any], output: Path) -> None:
    """End the program if `output` holds a run whose recipe is another or unknown."""
    path = output.with_suffix(".yaml")
    if not output.exists():
        return
    saved = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    if saved != yaml.safe_load(yaml.safe_dump(recipe)):
        sys.exit(
            f"{output} holds a run, but its recipe {path} is missing or differs from the recipe "
            "asked for. Remove the folder, or choose another one with --runs."
        )


def train_all(recipes: dict[Path, dict[str, Any]], at_once: int) -> Iterator[dict[str, Any]]:
    """Yield the results of each output folder's recipe, in order; `at_once` run side by side."""
    for output, recipe in recipes.items():
        refuse_other_recipe(recipe, output)
    threads = max(1, (os.cpu_count() or 1) // at_once) if at_once > 1 else None
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda output: train(recipes[output], output, threads), recipes)


def recipe_file(name: str) -> Path:
    """Return the file of a recipe, given by its name in examples/recipes/ or by its path."""
    known = RECIPES / f"{name}.yaml"
    return known if known.is_file() else Path(name)


def recipe_of_model(name: str, recipe: dict[str, Any]) -> Path | None:
    """Return the recipe of the model that a recipe continues from, which is in the same folder.

    Return None without a model, or if the model has no recipe and is used as it is.
    """
    file = recipe_file(name).with_name(f"{Path(recipe.get('model', '')).name}.yaml")
    return file if "model" in recipe and file.is_file() else None


def recipe_of(name: str) -> dict[str, Any]:
    """Read a recipe."""
    return yaml.safe_load(recipe_file(name).read_text(encoding="utf-8"))


def runs_of(name: str, seeds: list[int], folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the recipe of each seed by output folder.

    A `model` that has a recipe of its own is replaced by that of the same seed.
    """
    stem = recipe_file(name).stem
    recipes = {folder / f"{stem}-seed{seed}": {**recipe_of(name), "seed": seed} for seed in seeds}
    for recipe in recipes.values():
        if recipe_of_model(name, recipe):
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


def translations(
    recipe: dict[str, Any], folder: Path, tokenizer: Path, pairs: list[Pair], **settings: Any
) -> list[str]:
    """Decode with the model in `folder` and the recipe's search, overridden by `settings`."""
    translator = VaswaniTranslationPipeline(
        AutoModelForSeq2SeqLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tokenizer),
        device="cpu",
    )
    generation = {"num_beams": recipe["beams"], **recipe.get("generation", {}), **settings}
    sources = [pair[0] for pair in pairs]
    return [output["translation_text"] for output in translator(sources, **generation)]


def score_of(recipe: dict[str, Any], outputs: list[str], pairs: list[Pair]) -> float:
    """Score translations by the recipe's figure, rounded as in results.json."""
    metric = TranslationMetric(recipe.get("bleu-tokenize", "13a"))
    references = [pair[1] for pair in pairs]
    return round(main_score(recipe, metric.compute(predictions=outputs, references=references)), 2)


def ensemble(recipe: dict[str, Any], folders: list[Path]) -> dict[str, Any]:
    """Score the majority vote of finished runs on the test set."""
    voted = [most_common(line) for line in zip(*map(tested, folders), strict=True)]
    figure = score_of(recipe, voted, pairs_of(recipe, "test"))
    return {"members": len(folders), "test": figure}


def tested(run: Path) -> list[str]:
    """Read a run's translations of the test set. A run of another machine has none here."""
    file = run / "test.txt"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def most_common(outputs: Sequence[str]) -> str:
    """Return the most frequent output. In a tie, the first such output wins."""
    return Counter(outputs).most_common(1)[0][0]


def pairs_of(recipe: dict[str, Any], split: str) -> list[Pair]:
    """Read the sentence pairs of "train", "valid" or "test"."""
    found = [str(ROOT / path) if (ROOT / path).exists() else path for path in recipe[split]]
    return read_pairs(found, recipe.get("columns", ("source", "target")), split)


def variants(recipe: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return "with" or "without" and the recipe of further runs, for each ingredient."""
    if any(name in recipe for name in SECOND_STAGE_OPTIONS):
        plain = {name: value for name, value in recipe.items() if name not in SECOND_STAGE_OPTIONS}
        return {"second stage": ("without", plain)}
    plain = {**recipe, "set": {**recipe.get("set", {}), "label_smoothing": 0.0}}
    found = {"label smoothing": ("without", plain)}
    if recipe.get("batching") == "packed":
        in_order = {name: value for name, value in recipe.items() if name != "batching"}
        found["packed batches"] = ("without", in_order)
    if recipe.get("muon"):
        adam = {name: value for name, value in recipe.items() if name != "muon"}
        found["Muon"] = ("without", adam)
    if recipe.get("trainer", {}).get("weight_decay"):
        undecayed = {**recipe, "trainer": {**recipe["trainer"], "weight_decay": 0.0}}
        found["weight decay"] = ("without", undecayed)
    if recipe.get("tokenizer-kind", "bpe") == "bpe":
        found["BPE-dropout"] = ("with", {**recipe, "bpe-dropout": 0.1})
    return found


def averaging(recipe: dict[str, Any]) -> str:
    """Name the ingredient of averaged checkpoints."""
    return f"average of the last {recipe.get('average', 1)}"


class Ingredients:
    """Scores with and without each ingredient of a recipe, for all seeds.

    Args:
        recipes: the recipe of each seed, by the folder of its run.
        at_once: models trained side by side.
        rows: rows of an earlier report. Their other seeds are kept.
    """

    def __init__(
        self, recipes: dict[Path, dict[str, Any]], at_once: int, rows: list[dict[str, Any]]
    ) -> None:
        self.recipes, self.at_once = recipes, at_once
        self.recipe = next(iter(recipes.values()))
        self.pairs = {split: pairs_of(self.recipe, split) for split in SPLITS}
        self.rows = {row["ingredient"]: row for row in rows}

    def scored(
        self, recipes: dict[Path, dict[str, Any]], runs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the scores of finished runs.

        Args:
            recipes: the recipe of each run, by its folder. Only the first folder is read.
            runs: results of the runs, or what a report keeps of them.

        Returns:
            The scores of the seeds by split, what the report keeps of the runs, and the first
            seed's translations of the test set.
        """
        seeds = [recipe["seed"] for recipe in recipes.values()]
        scores = {split: [main_score(self.recipe, run[split]) for run in runs] for split in SPLITS}
        return {
            **scores,
            "runs": list(map(reported_fields, seeds, runs)),
            "translations": tested(next(iter(recipes))),
        }

    def decoded(self, last_checkpoint: bool = False, **settings: Any) -> dict[str, Any]:
        """Decode with the model of each seed, or its last checkpoint, and return as `scored`."""
        scores: dict[str, list[float]] = {split: [] for split in SPLITS}
        first: list[str] = []
        for run in self.recipes:
            folder = run_checkpoints(run)[-1] if last_checkpoint else run
            for split, pairs in self.pairs.items():
                outputs = translations(self.recipe, folder, run, pairs, **settings)
                scores[split].append(score_of(self.recipe, outputs, pairs))
                first = first or (outputs if split == "test" else [])
        return {**scores, "translations": first}

    def add(self, name: str, given: dict[str, Any], without: dict[str, Any]) -> None:
        """Add a row, or seeds to an earlier row, from what `scored` or `decoded` returned."""
        before = self.rows.get(name, {})
        seeds = [recipe["seed"] for recipe in self.recipes.values()]
        row: dict[str, Any] = {"ingredient": name}
        for split in SPLITS:
            sides: dict[str, list[float]] = {}
            for side, found in (("with", given), ("without", without)):
                earlier = before[split][side] if before else []
                scores = dict(zip(before.get("seeds", []), earlier, strict=True))
                scores |= dict(zip(seeds, found[split], strict=True))
                row["seeds"] = sorted(scores)
                sides[side] = [scores[seed] for seed in row["seeds"]]
            row[split] = sides | paired(sides["with"], sides["without"])
        if before and before.get("bootstrap_seed", row["seeds"][0]) not in seeds:
            names = ("bootstrap_p_value", "bootstrap_seed")
            row |= {name: before[name] for name in names if name in before}
        elif self.recipe.get("score", "bleu") == "bleu":
            references = [pair[1] for pair in self.pairs["test"]]
            tokenize = self.recipe.get("bleu-tokenize", "13a")
            row["bootstrap_p_value"] = bootstrap(
                given["translations"], without["translations"], references, tokenize
            )
            row["bootstrap_seed"] = seeds[0]
        self.rows[name] = row
        print(name, *(f"{split}: {row[split]['difference']:+.2f}" for split in SPLITS), flush=True)

    def measure(self, names: list[str], reported: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Measure the ingredients of these names, and return the rows of the report.

        Args:
            names: names of ingredients.
            reported: what the report keeps of the recipe's own runs.
        """
        by_seed = {run["seed"]: run for run in reported}
        own = [by_seed[recipe["seed"]] for recipe in self.recipes.values()]
        whole = self.scored(self.recipes, own)
        penalties = [name for name in names if name in PENALTIES]
        no_penalty = self.decoded(**NO_PENALTY) if penalties else {}
        if averaging(self.recipe) in names:
            # Both sides are decoded on this machine. The runs may come from another one.
            self.add(averaging(self.recipe), self.decoded(), self.decoded(last_checkpoint=True))
        for name in penalties:
            self.add(name, self.decoded(**PENALTIES[name]), no_penalty)
        for name, (side, _) in variants(self.recipe).items():
            if name not in names:
                continue
            runs = {
                run.with_name(
                    run.name.replace("-seed", f"-{side}-{name.replace(' ', '-')}-seed")
                ): variants(recipe)[name][1]
                for run, recipe in self.recipes.items()
            }
            before = self.rows.get(name, {}).get("runs", [])
            other = self.scored(runs, list(train_all(runs, self.at_once)))
            self.add(name, *((other, whole) if side == "with" else (whole, other)))
            self.rows[name]["runs"] = merged(before, other["runs"])
        return list(self.rows.values())


def lacks_bootstrap(rows: list[dict[str, Any]], names: list[str], seeds: list[int]) -> bool:
    """Tell whether the bootstrap of an ingredient needs translations of the first seed."""
    known = {row["ingredient"]: row.get("bootstrap_seed") for row in rows}
    return any(known.get(name) in (None, *seeds) for name in names)


def reported_fields(seed: int, run: dict[str, Any]) -> dict[str, Any]:
    """Return what a report keeps of a run's results."""
    return {"seed": seed, **{name: run[name] for name in REPORTED if name in run}}


def merged(before: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs of an earlier report and later runs, which replace those of the same seed."""
    by_seed = {run["seed"]: run for run in (*before, *runs)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def against_published(figures: list[float], published: float) -> dict[str, Any]:
    """Test whether the mean over seeds differs from a published score: Student's t-test.

    Equal figures have no variance, so that t is None. See `without_variance`.
    """
    from scipy import stats  # only tests of significance need scipy

    differences = [figure - published for figure in figures]
    if is_constant(differences):
        return {"t": None, "p_value": without_variance(differences)}
    test = stats.ttest_1samp(figures, published)
    return {"t": round(float(test.statistic), 2), "p_value": rounded(test.pvalue)}


def paired(given: list[float], without: list[float]) -> dict[str, Any]:
    """Return the mean difference of seeds, and the p-value of a paired t-test if there are two.

    If all seeds have the same difference, see `without_variance`.
    """
    difference = round(statistics.mean(given) - statistics.mean(without), 2)
    if len(given) < 2:
        return {"difference": difference, "p_value": None}
    differences = [score - other for score, other in zip(given, without, strict=True)]
    if is_constant(differences):
        return {"difference": difference, "p_value": without_variance(differences)}
    from scipy import stats

    return {"difference": difference, "p_value": rounded(stats.ttest_rel(given, without).pvalue)}


def is_constant(differences: list[float]) -> bool:
    """Tell whether all differences are the same, up to rounding."""
    return max(differences) - min(differences) < 1e-9


def without_variance(differences: list[float]) -> float | None:
    """Return 1 if constant differences are 0, and otherwise None, because a t-test is undefined."""
    return 1.0 if abs(differences[0]) < 1e-9 else None


def bootstrap(given: list[str], without: list[str], references: list[str], tokenize: str) -> float:
    """Compare two systems by sacreBLEU's paired bootstrap (Koehn, 2004): the p-value."""
    if given == without:
        return 1.0  # sacreBLEU's test needs a difference
    metric = BLEU(tokenize=tokenize, force=True)
    systems = [("without", without), ("with", given)]
    test = PairedTest(systems, {"BLEU": metric}, [references], test_type="bs")
    return rounded(test()[1]["BLEU"][1].p_value)


def rounded(p_value: Any) -> float:
    """Round a p-value to two digits."""
    return float(f"{p_value:.2g}")


def earlier_report(path: Path | None, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Read the report that `path` holds already, or return {} if there is none.

    Raises:
        SystemExit: the report belongs to another recipe, or to other settings of this one.
    """
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text(encoding="utf-8"))
    if "settings" not in report:
        sys.exit(f"An earlier version wrote {path}: remove it, or choose another file.")
    if (report.get("recipe"), report.get("settings")) != (name, recipe):
        sys.exit(f"{path} has seeds of another recipe, or of other settings: choose another file.")
    return report


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    require_scipy()
    logging.set_verbosity_error()
    recipe = recipe_of(args.recipe)
    if "tag" in recipe:
        sys.exit(f"{args.recipe} has several test sets: results.json of a run has their scores.")
    score = recipe.get("score", "bleu")
    earlier = earlier_report(args.json, args.recipe, recipe)
    known = [averaging(recipe)] if "average" in recipe else []
    known += [*PENALTIES, *variants(recipe)]
    names = [] if args.ingredients is None else args.ingredients or known
    for name in names:
        if name not in known:
            sys.exit(f"--ingredients: {name!r} is none of {', '.join(map(repr, known))}")
    decoded = [name for name in names if name not in variants(recipe)]
    if args.keep_scores and decoded:
        sys.exit(
            f"--keep-scores: {decoded[0]!r} needs the models of all seeds. Leave out "
            "--keep-scores, or name other --ingredients."
        )
    report: dict[str, Any] = {**circumstances(), "recipe": args.recipe, "score": score}
    report["settings"] = recipe
    rows = earlier.get("ingredients", [])
    runs: list[dict[str, Any]] = earlier.get("runs", [])
    kept = {run["seed"] for run in runs if args.keep_scores}
    if lacks_bootstrap(rows, names, args.seeds):
        kept -= {args.seeds[0]}
    if first := recipe_of_model(args.recipe, recipe):
        seeds = [seed for seed in args.seeds if seed not in kept or names]
        for run in train_all(runs_of(str(first), seeds, args.runs), args.at_once):
            print(f"{first.stem}: {score} {main_score(recipe, run['test'])}", flush=True)
    recipes = runs_of(args.recipe, args.seeds, args.runs)
    ingredients = None
    if names:
        ingredients = Ingredients(recipes, args.at_once, rows)
    if "log" in earlier:
        report["log"] = earlier["log"]
    to_train = {run: recipe for run, recipe in recipes.items() if recipe["seed"] not in kept}
    seeds = [recipe["seed"] for recipe in to_train.values()]
    for seed, run in zip(seeds, train_all(to_train, args.at_once), strict=True):
        runs = merged(runs, [{**reported_fields(seed, run), "curve": curve(run, score)}])
        if seed == runs[0]["seed"]:
            report["log"] = run["log"]
        print(f"seed {seed}: {score} {main_score(recipe, run['test'])}", flush=True)
    report["runs"] = runs
    for split in SPLITS:
        figures = [main_score(recipe, run[split]) for run in runs]
        report[split] = {
            "mean": round(statistics.mean(figures), 2),
            "standard_deviation": round(statistics.stdev(figures), 2) if len(figures) > 1 else None,
            "seeds": figures,
        }
        print(f"{split}: {score} {report[split]['mean']} (of {figures})")
    published, source = PUBLISHED.get(args.recipe, (None, ""))
    if args.published is not None:
        published, source = args.published, "the command line"
    if published is not None and len(runs) > 1:
        report["published"] = {"score": published, "source": source}
        report["published"] |= against_published(report["test"]["seeds"], published)
        print(f"published: {published}, p = {report['published']['p_value']}")
    if score == "exact_match" and len(to_train) < len(runs):
        numbers = " ".join(str(run["seed"]) for run in runs)
        print(f"no ensemble: it needs all seeds trained here, --seeds {numbers}")
    elif score == "exact_match" and len(runs) > 1:
        report["ensemble"] = ensemble(recipe, list(recipes))
        print(f"ensemble: {score} {report['ensemble']['test']}")
    if ingredients:
        rows = ingredients.measure(names, runs)
    if rows:
        report["ingredients"] = rows
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
