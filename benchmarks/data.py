"""Measure how text files become batches: CPU seconds, wall seconds, memory and disk.

    python benchmarks/data.py --data data/multi30k --pairs 100000 1000000 4500000 \
        --json benchmarks/results/data.json

The pairs are lines of Multi30k, joined two by two at random. Three ways tokenise them: this
package, `load_dataset` and `map` of transformers' run_translation.py, and lists in memory, the way
of version 0.1. Each way runs in a process of its own, which then reads batches of 4096 tokens. At
the end, the batches of an epoch of 36 million pairs are planned from their lengths.
"""

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BUDGET = 4096
WAYS = ("vaswani", "map", "lists")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder of Multi30k: train.en.gz and train.de.gz")
    parser.add_argument("--pairs", type=int, nargs="+", default=[100_000])
    parser.add_argument(
        "--compare", type=int, default=100_000, help="most pairs for the two other ways"
    )
    parser.add_argument("--batches", type=int, default=0, help="batches to read (default: all)")
    parser.add_argument(
        "--plan",
        type=int,
        default=36_000_000,
        help="pairs of a plan of batches (default: 36000000)",
    )
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Measure all ways for all sizes."""
    args = parse_args()
    if args.worker:
        way, files, tokenizer, cache, batches = args.worker
        print(json.dumps(worker(way, files, tokenizer, cache, int(batches))))
        return
    from vaswani.training.circumstances import circumstances

    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    print(table(rows))
    plan = {"pairs": args.plan, "seconds": plan_seconds(args.plan)}
    print(plan)
    if args.json:
        report = {**circumstances(), "budget": BUDGET, "rows": rows, "plan": plan}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run each way: a first start, a second one, and two processes that start together."""
    rows = []
    tokenizer = train_tokenizer(args.data, folder)
    for pairs in args.pairs:
        files = folder / f"train-{pairs}"
        write_pairs(args.data, files, pairs)
        for way in WAYS if pairs <= args.compare else WAYS[:1]:
            cache = folder / f"cache-{way}-{pairs}"
            words = [way, str(files), str(tokenizer), str(cache), str(args.batches)]
            (first,) = started(words, 1)
            (second,) = started(words, 1)
            both = started(words, 2)
            rows.append(
                {
                    "pairs": pairs,
                    "way": way,
                    "cpu_seconds": first["cpu"],
                    "wall_seconds": first["wall"],
                    "second_start_seconds": second["wall"],
                    "memory_mib": first["memory"],
                    "second_start_memory_mib": second["memory"],
                    "memory_of_each_of_two_mib": max(run["memory"] for run in both),
                    "epoch_seconds": first["epoch"],
                    "base_memory_mib": first["base"],
                    "disk_mib": disk(cache),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def started(words: list[str], processes: int) -> list[dict[str, float]]:
    """Run worker processes at the same moment and return what they measured."""
    command = [sys.executable, __file__, "--worker", *words]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    outputs = [process.communicate()[0] for process in running]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def worker(way: str, files: str, tokenizer: str, cache: str, batches: int) -> dict[str, float]:
    """Prepare the data in one way, read an epoch, and return what it took."""
    os.environ["HF_DATASETS_CACHE"] = cache
    import datasets
    from transformers import AutoTokenizer
    from vaswani.corpora.token_batches import TokenBatchSampler

    datasets.disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    functions = {"vaswani": prepared, "map": mapped, "lists": listed}
    base = peak_memory()
    cpu, wall = cpu_seconds(), time.monotonic()
    data, lengths = functions[way](files, loaded, cache)
    report = {"cpu": cpu_seconds() - cpu, "wall": time.monotonic() - wall, "base": base}
    begun = time.monotonic()
    for number, batch in enumerate(TokenBatchSampler(lengths, BUDGET)):
        if batches and number == batches:
            break
        data.__getitems__(batch)
    report |= {"epoch": time.monotonic() - begun, "memory": peak_memory()}
    return {name: round(value, 2) for name, value in report.items()}


def prepared(files: str, tokenizer: Any, cache: str) -> tuple[Any, np.ndarray]:
    """Tokenise as `vaswani train` does."""
    from vaswani.corpora.corpus import parse_corpora
    from vaswani.corpora.filtering import Rules
    from vaswani.corpora.mapped import MappedPairs
    from vaswani.corpora.preparing import prepare

    (corpus,) = parse_corpora([f"{files}.en", f"{files}.de"])
    found = prepare(corpus, tokenizer, tokenizer, Rules(max_length=256), Path(cache), say=note)
    data = MappedPairs.from_files(found.files, found.folder.name)
    return data, data.token_counts()


def mapped(files: str, tokenizer: Any, cache: str) -> tuple[Any, np.ndarray]:
    """Tokenise as transformers' run_translation.py does, from a JSONL file."""
    import datasets
    from vaswani.corpora.token_counts import token_counts

    def encode(rows: dict[str, Any]) -> dict[str, Any]:
        sources = [row["en"] for row in rows["translation"]]
        targets = [row["de"] for row in rows["translation"]]
        encoded = tokenizer(sources, max_length=256, truncation=True)
        labels = tokenizer(text_target=targets, max_length=256, truncation=True)
        encoded["labels"] = labels["input_ids"]
        return encoded

    data = datasets.load_dataset(
        "json", data_files=f"{files}.jsonl", split="train", cache_dir=cache
    )
    data = data.map(encode, batched=True, remove_columns=data.column_names)
    return data, token_counts(data)


def listed(files: str, tokenizer: Any, cache: str) -> tuple[Any, np.ndarray]:
    """Tokenise as version 0.1 did: pairs in lists, then an unnamed data set."""
    from datasets import Dataset
    from vaswani.corpora.reading import read_parallel
    from vaswani.corpora.token_counts import token_counts

    def encode(rows: dict[str, Any]) -> dict[str, Any]:
        sources = tokenizer(rows["source"])["input_ids"]
        labels = tokenizer(text_target=rows["target"])["input_ids"]
        lengths = [max(map(len, pair)) for pair in zip(sources, labels, strict=True)]
        return {"input_ids": sources, "labels": labels, "length": lengths}

    pairs = list(zip(*read_parallel(f"{files}.en", f"{files}.de"), strict=True))
    sources, targets = zip(*pairs, strict=True)
    data = Dataset.from_dict({"source": sources, "target": targets})
    data = data.map(encode, batched=True, remove_columns=["source", "target"])
    data = data.filter(
        lambda lengths: [length <= 256 for length in lengths], input_columns="length", batched=True
    )
    return data, token_counts(data)


def plan_seconds(pairs: int) -> float:
    """Time the plan of an epoch's batches, from lengths that are there."""
    from vaswani.corpora.token_batches import TokenBatchSampler

    lengths = np.random.default_rng(0).integers(5, 60, (pairs, 2), dtype=np.int32)
    sampler = TokenBatchSampler(lengths, BUDGET)
    begun = time.monotonic()
    next(iter(sampler))
    return round(time.monotonic() - begun, 2)


def note(text: str) -> None:
    """Print beside the figures."""
    print(text, file=sys.stderr)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_memory() -> float:
    """Return the most memory that this process ever held, mapped files included, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def disk(folder: Path) -> float:
    """Return the size of a folder in MiB."""
    return round(
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20, 1
    )


def lines_of(data: str) -> list[list[str]]:
    """Read the two sides of Multi30k."""
    sides = []
    for language in ("en", "de"):
        with gzip.open(Path(data) / f"train.{language}.gz", "rt", encoding="utf-8") as file:
            sides.append(file.read().splitlines())
    return sides


def write_pairs(data: str, files: Path, pairs: int) -> None:
    """Write pairs of about 25 words a side as parallel text and as JSONL."""
    english, german = lines_of(data)
    draw = random.Random(0).randrange
    with (
        open(f"{files}.en", "w", encoding="utf-8") as source,
        open(f"{files}.de", "w", encoding="utf-8") as target,
        open(f"{files}.jsonl", "w", encoding="utf-8") as records,
    ):
        for _ in range(pairs):
            one, other = draw(len(english)), draw(len(english))
            pair = {
                "en": f"{english[one]} {english[other]}",
                "de": f"{german[one]} {german[other]}",
            }
            source.write(pair["en"] + "\n")
            target.write(pair["de"] + "\n")
            records.write(json.dumps({"translation": pair}) + "\n")


def train_tokenizer(data: str, folder: Path) -> Path:
    """Learn the vocabulary that all ways share."""
    from vaswani import VaswaniTokenizer

    lines = [line for side in lines_of(data) for line in side]
    tokenizer = VaswaniTokenizer.train_from_iterator(lines, vocab_size=10_000, show_progress=False)
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def table(rows: list[dict[str, Any]]) -> str:
    """Format the figures as Markdown."""
    names = list(rows[0])
    lines = [" | ".join(names), "|".join("---" for _ in names)]
    lines += [" | ".join(str(row[name]) for name in names) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    main()
