"""Compare byte pairs that split punctuation from words with byte pairs that do not, by BLEU.

    pip install scipy
    python benchmarks/punctuation.py --json benchmarks/results/punctuation.json

Both train small models on raw Multi30k (English-German), with the same seeds, settings and updates.
The scores are those of `vaswani train` on test_2016_flickr. A paired t-test compares them. Each run
has its own folder under runs/punctuation, and a finished run is not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from host import write
from score import paired, require_scipy
from vaswani.training.circumstances import circumstances

WAYS = ("split-punctuation", "no-split-punctuation")
PARTS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
SETTINGS = (
    *("--preset", "tiny", "--set", "dropout=0.1", "initializer=fairseq", "--batching", "packed"),
    *("--max-source-tokens", "4096", "--scheduler", "linear", "--learning-rate", "3e-3"),
    *("--steps", "700", "--warmup", "200", "--save-steps", "100", "--eval-steps", "350"),
    *("--average", "1"),
)


def run(way: str, seed: int, folder: Path, data: Path) -> dict[str, Any]:
    """Train one model if it is not there, and return the results of its run."""
    output = folder / f"{way}-{seed}"
    if not (output / "results.json").exists():
        files = [
            word
            for option, part in PARTS.items()
            for word in (f"--{option}", *(f"{data}/{part}.{side}.gz" for side in ("en", "de")))
        ]
        words = [*files, *SETTINGS, f"--{way}", "--seed", str(seed), "--output", str(output)]
        subprocess.run([sys.executable, "-m", "vaswani", "train", *words], check=True)
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


def summary(scores: dict[str, list[float]]) -> dict[str, Any]:
    """Average the scores of each way, and test the difference over seeds."""
    means = {way: round(statistics.mean(values), 2) for way, values in scores.items()}
    return means | paired(*scores.values())


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"), metavar="FOLDER")
    parser.add_argument("--runs", type=Path, default=Path("runs/punctuation"), metavar="FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return parser.parse_args(argv)


def main() -> None:
    """Train, compare and report."""
    args = parse_args()
    require_scipy()
    runs = [
        {"way": way, "seed": seed, **run(way, seed, args.runs, args.data)}
        for seed in args.seeds
        for way in WAYS
    ]
    kept = ("way", "seed", "commit", "training_minutes", "parameters")
    found = {
        split: {
            score: summary(
                {way: [row[split][score] for row in runs if row["way"] == way] for way in WAYS}
            )
            for score in ("bleu", "chrf")
        }
        for split in ("valid", "test")
    }
    results = {
        **circumstances(),
        "settings": " ".join(SETTINGS),
        "signature": runs[0]["test"]["signature"],
        **found,
        "runs": [
            {name: row[name] for name in kept}
            | {split: {name: row[split][name] for name in ("bleu", "chrf")} for split in found}
            for row in runs
        ],
    }
    write(args.json, results)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
