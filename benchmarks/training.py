r"""Training speed and memory against MarianMTModel and earlier versions, in one run.

    python benchmarks/training.py                     all tables: hours on two cores
    python benchmarks/training.py --quick             small batches, float32: a few minutes
    python benchmarks/training.py --earlier 55ba48e   version 0.1 trains, too
    python benchmarks/training.py --json results.json --device cuda
    python benchmarks/training.py --profile FILE      where an update spends its time

The models start from random weights, and train on Multi30k (English-German). Size "base" is the
paper's base size with 37,000 tokens and dropout 0.1. Size "tiny" is that of the recipe
multi30k-muon: `vaswani train --preset tiny` with 10,000 tokens and dropout 0.3. Label smoothing
is 0.1. There are four measurements:

"trainer": a run as a user starts it. "packed" and "sorted" are the batches of VaswaniTrainer, with
a budget of real and of padded tokens. MarianMT is Seq2SeqTrainer(label_smoothing_factor=0.1) with
random batches of as many sentences as "sorted" has on average. The package at each commit of
`--earlier` trains with sorted batches. Speed counts real target tokens, not padding.

"network": forward and backward passes without an optimizer. Both models get our batches.

"loss": forward and backward passes of only the map to the vocabulary and the loss. Three versions
take turns: plain (logits, then torch's cross_entropy), ours, and torch's linear_cross_entropy. The
last one runs without label smoothing, because it has none when it works in chunks.

"batching": updates of our model on packed random, padded random and padded sorted sentences. The
budget of sorted batches counts padding, and the other budgets count real tokens. "tiny" has a
vocabulary of 8,000 tokens here.

Every contender has a process of its own, in "trainer" a new one for each turn. The contenders take
turns in every round, so that a slow minute of the machine affects all of them. Each round has
other batches. Times are medians over rounds. A ratio is the median over rounds of the peer's time
per token divided by ours. Memory is the peak of the process minus its memory before it had a model.
It includes weights, gradients and, in "trainer", Adam's averages.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from base_model import DEFAULT_MODEL, VOCAB_SIZE, read_lines, vocabulary
from batchings import BATCHINGS, BatchingContender
from passes import LOSSES, NETWORKS, LossContender, NetworkContender, Pairs, lengths_of
from training_processes import TrainingProcess, write_commit
from training_run import Job
from vaswani.commands.recipes import settings
from vaswani.training.circumstances import circumstances
from vaswani.training.presets import PRESETS
from worker import Worker, timed

TOKENS = (1024, 2048, 4096, 8192)
TRAINERS = ("packed", "sorted", "MarianMT")
TINY_VOCAB_SIZE = 10_000
PROFILED = 25  # operators of a profile that are printed and written
PARTS = ("trainer", "network", "loss", "batching")
# Threads stay awake for a moment after their last job. The next worker needs their cores.
PAUSE = 0.3


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--quick", action="store_true", help="512 tokens, float32, one round, no loss alone")
    add("--tokens", type=int, nargs="+", metavar="N", help=f"default: {TOKENS}")
    add("--precisions", nargs="+", choices=("float32", "bfloat16"), help="default: both")
    add("--rounds", type=int, help="turns of every contender (default: 3, 1 with --quick)")
    add("--updates", type=int, help="in a turn (default: 4, 1 with --quick)")
    add("--parts", nargs="+", choices=PARTS, help="default: all but batching")
    add("--size", choices=("tiny", "base"), help="default: base; tiny for batching")
    add(
        "--earlier",
        nargs="+",
        default=[],
        metavar="COMMIT",
        help="versions whose trainer takes part",
    )
    add("--profile", type=Path, metavar="FILE", help="only write the operators of an update")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    args.tokens = args.tokens or ([512] if args.quick else TOKENS)
    args.precisions = args.precisions or (["float32"] if args.quick else ["float32", "bfloat16"])
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.updates = args.updates or (1 if args.quick else 4)
    parts: list[str] = ["trainer", "network"]
    args.parts = args.parts or (parts if args.quick else [*parts, "loss"])
    for name in ("rounds", "updates"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def fields_of(part: str, size: str) -> dict[str, Any]:
    """Return the fields of a configuration of `size` that differ from the base size."""
    if size == "base":
        return {"vocab_size": VOCAB_SIZE}
    tiny = PRESETS["tiny"]
    number = tiny["vocab_size"] if part == "batching" else TINY_VOCAB_SIZE
    return {"vocab_size": number, **settings(tiny["set"])}


def size_of(part: str, args: argparse.Namespace) -> str:
    """Return the size of the models of a part."""
    return args.size or ("tiny" if part == "batching" else "base")


def folded(pairs: Pairs, vocab_size: int) -> Pairs:
    """Return pairs with the ids of a smaller vocabulary. The special ids 0, 1 and 2 stay."""
    sources, targets = (
        [[i if i < vocab_size else i % (vocab_size - 3) + 3 for i in ids] for ids in side]
        for side in pairs
    )
    return sources, targets


def take_turns(
    workers: dict[tuple[str, str], Any], jobs: list[tuple[int, int]], rounds: int
) -> list[dict[str, Any]]:
    """Let every worker do every job (tokens, updates) in turn, round after round.

    A worker that dies, for example for lack of memory, gets no more jobs. Its row says why.
    """
    rows = []
    for tokens, updates in jobs:
        taken: dict[tuple[str, str], list[dict[str, float]]] = {
            contender: [] for contender in workers
        }
        for turn in range(rounds):
            # Every round starts with another worker, because a worker may disturb the next one.
            order = list(workers)[turn % len(workers) :] + list(workers)[: turn % len(workers)]
            for contender in order:
                time.sleep(PAUSE)
                try:
                    taken[contender].append(workers[contender](tokens, updates, turn))
                except RuntimeError as error:
                    del workers[contender]
                    row = dict(zip(("name", "precision"), contender, strict=True))
                    rows.append({**row, "tokens_per_batch": tokens, "died": str(error)})
                    print(f"{contender[0]:10}{contender[1]:10}{tokens:8}  {error}", flush=True)
        for (name, precision), measured in taken.items():
            if (name, precision) not in workers:
                continue
            speeds = [one["tokens"] / one["seconds"] for one in measured]
            more = {
                key: statistics.mean(one[key] for one in measured)
                for key in ("padding", "flops")
                if key in measured[0]
            }
            row = {
                "name": name,
                "precision": precision,
                "tokens_per_batch": tokens,
                "tokens_per_second": statistics.median(speeds),
                "rounds": speeds,
                "tokens_of_rounds": [
                    {key: one[key] for key in ("source_tokens", "tokens") if key in one}
                    for one in measured
                ],
                "peak_mb": max(one["peak_mb"] for one in measured),
                **more,
            }
            if "flops" in row:
                rates = [one["flops"] / one["seconds"] for one in measured]
                row["flops_per_second"] = statistics.median(rates)
            rows.append(row)
            padding = f"{100 * row['padding']:9.1f}%" if "padding" in row else f"{'':10}"
            print(
                f"{name:10}{precision:10}{row['tokens_per_batch']:8}"
                f"{row['tokens_per_second']:12.0f}{row['peak_mb']:10.0f}{padding}",
                flush=True,
            )
    return rows


def start(make: Any, names: tuple[str, ...], args: argparse.Namespace, *more: Any) -> dict:
    """Start a worker for every name and precision; say which this machine cannot run."""
    workers = {
        (name, precision): Worker(make, name, precision, args.device, args.threads, *more)
        for precision in args.precisions
        for name in names
    }
    for contender in list(workers):
        try:
            workers[contender].wait()
        except RuntimeError as error:
            print(f"{' '.join(contender)} is missing: {error}")
            del workers[contender]
    return workers


def compare(rows: list[dict[str, Any]], peer: str, own: str = "ours") -> list[dict[str, Any]]:
    """How many times faster ours is, paired by round, and its memory over the peer's."""
    found = {
        (row["name"], row["precision"], row["tokens_per_batch"]): row
        for row in rows
        if "died" not in row
    }
    ratios = []
    for (name, precision, tokens), theirs in found.items():
        ours = found.get((own, precision, tokens))
        if name != peer or ours is None:
            continue
        pairs = zip(ours["rounds"], theirs["rounds"], strict=True)
        speeds = [mine / other for mine, other in pairs]
        ratios.append(
            {
                "own": own,
                "peer": peer,
                "precision": precision,
                "tokens_per_batch": tokens,
                "speed": statistics.median(speeds),
                "speed_of_rounds": speeds,
                "memory": ours["peak_mb"] / theirs["peak_mb"],
            }
        )
    return ratios


def judge(ratios: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> list[dict]:
    """Compare the ratios with our aims for 4096 tokens."""
    aims = []
    for part, found in ratios.items():
        size = size_of(part, args)
        for ratio in found:
            if ratio["tokens_per_batch"] != 4096:
                continue
            where = f"{part}, {size}, {ratio['precision']}, against {ratio['peer']}"
            limits = {}
            if part == "trainer" and ratio["peer"] in args.earlier:
                limits["speed"] = {"least": 1.5 if size == "tiny" else 1.15}
            elif ratio["peer"] == "MarianMT":
                limits["speed"] = {"least": {"trainer": 2.5, "network": 1.4}[part]}
                if part == "trainer":
                    limits["memory"] = {"most": 0.5}
            for name, limit in limits.items():
                met = limit.get("least", 0) <= ratio[name] <= limit.get("most", math.inf)
                aim = {"aim": f"{name}, {where}", **limit, "value": ratio[name], "met": met}
                aims.append(aim)
    return aims


def matrix_rate(device: str, precision: str) -> float:
    """Operations per second of a large matrix product, the best of ten."""
    size = 8192 if device == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, precision)) for _ in "ab")
    return 2 * size**3 / min(timed(lambda: a @ b) for _ in range(10))


def write_profile(contenders: dict[tuple[str, str], TrainingProcess], args: Any) -> None:
    """Profile one update of each contender, print its operators, and write them to a file."""
    profiles = []
    for (name, precision), contender in contenders.items():
        measured = contender(args.tokens[-1], 1, seed=0, profiled=True)
        found = measured["operators"]
        total = {
            "ms": round(sum(operator["ms"] for operator in found), 1),
            "calls": sum(
                operator["calls"] for operator in found if operator["name"].startswith("aten::")
            ),
            **{key: measured[key] for key in ("source_tokens", "tokens", "padding")},
        }
        print(f"\n{name} {precision}: {total['ms']:.0f} ms, {total['calls']} operator calls")
        for operator in found[:PROFILED]:
            name_and_calls = f"{operator['name']:48.48}{operator['calls']:8}"
            share = operator["ms"] / total["ms"]
            print(f"{name_and_calls}{operator['ms']:10.1f} ms{share:7.1%}")
        row = {"name": name, "precision": precision, **total, "operators": found[:PROFILED]}
        profiles.append(row)
    about = {
        "device": args.device,
        "size": size_of("trainer", args),
        "tokens_per_batch": args.tokens[-1],
    }
    args.profile.parent.mkdir(parents=True, exist_ok=True)
    args.profile.write_text(
        json.dumps({**circumstances(), **about, "profiles": profiles}, indent=1) + "\n",
        encoding="utf-8",
    )


def contenders_of(
    part: str, args: argparse.Namespace, pairs: Pairs, work: Path
) -> dict[tuple[str, str], Any]:
    """Start the contenders of a part, with a folder `work` for their files."""
    if part == "loss":
        return start(LossContender, LOSSES, args)
    fields = fields_of(part, size_of(part, args))
    pairs = folded(pairs, fields["vocab_size"])
    if part == "batching":
        return start(BatchingContender, BATCHINGS, args, pairs, fields)
    if part == "network":
        return start(NetworkContender, NETWORKS, args, pairs, fields)
    file, lengths = work / "pairs.json", lengths_of(pairs)
    file.write_text(json.dumps(pairs), encoding="utf-8")
    common = (args.device, args.threads, fields, str(DEFAULT_MODEL), str(file))
    contenders = {}
    for precision in args.precisions:
        for name in TRAINERS:
            job = Job(name, precision, *common)
            contenders[name, precision] = TrainingProcess(job, lengths)
        for commit in args.earlier:
            job = Job("sorted", precision, *common)
            contenders[commit, precision] = TrainingProcess(job, lengths, work / commit)
    return contenders


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    args.threads = torch.get_num_threads()
    tokenizer = vocabulary(DEFAULT_MODEL)
    sources, targets = (tokenizer(read_lines("train", side))["input_ids"] for side in ("en", "de"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        commits = {commit: write_commit(commit, work / commit) for commit in args.earlier}
        if args.profile:
            write_profile(contenders_of("trainer", args, (sources, targets), work), args)
        else:
            measure_parts(args, (sources, targets), commits, work)


def measure_parts(
    args: argparse.Namespace, pairs: Pairs, commits: dict[str, str], work: Path
) -> None:
    """Measure the parts of the command line, print tables, and write the results file."""
    rates: dict[str, list[float]] = {precision: [] for precision in args.precisions}
    results: dict[str, Any] = {
        **circumstances(),
        "device": args.device,
        "sizes": {part: size_of(part, args) for part in args.parts if part != "loss"},
        "earlier": commits,
        "rounds": args.rounds,
        "updates": args.updates,
    }
    ratios: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS:
        if part not in args.parts:
            continue
        workers = contenders_of(part, args, pairs, work)
        print(f"\n{part}\n{'name':10}{'precision':10}{'tokens':>8}{'tokens/s':>12}{'peak MB':>10}")
        jobs = [(tokens, args.updates) for tokens in args.tokens]
        for precision, measured in rates.items():
            measured.append(matrix_rate(args.device, precision))
        results[part] = take_turns(workers, jobs, args.rounds)
        for precision, measured in rates.items():
            measured.append(matrix_rate(args.device, precision))
        own = "packed" if part in ("trainer", "batching") else "ours"
        peers = dict.fromkeys(row["name"] for row in results[part] if row["name"] != own)
        ratios[part] = [ratio for peer in peers for ratio in compare(results[part], peer, own)]
        for worker in workers.values():
            worker.close()
    # A slow moment of the machine would make the share too large.
    results["matrix_flops_per_second"] = {name: max(found) for name, found in rates.items()}
    for row in results.get("network", []):
        if "flops_per_second" in row:
            rate = results["matrix_flops_per_second"][row["precision"]]
            row["share_of_matrix_rate"] = row["flops_per_second"] / rate
            print(
                f"{row['name']:10}{row['precision']:10}{row['tokens_per_batch']:8}  "
                f"{row['share_of_matrix_rate']:.0%} of the rate of large matrix products"
            )
    results |= {"ratios": ratios, "aims": judge(ratios, args)}
    print(f"\n{'ours over':22}{'precision':10}{'tokens':>8}{'speed':>8}{'memory':>8}")
    for part, found in ratios.items():
        for ratio in found:
            print(
                f"{part + ' ' + ratio['peer']:22}{ratio['precision']:10}"
                f"{ratio['tokens_per_batch']:8}{ratio['speed']:8.2f}{ratio['memory']:8.2f}"
            )
    for aim in results["aims"]:
        limit = f"at least {aim['least']}" if "least" in aim else f"at most {aim['most']}"
        print(f"{'met   ' if aim['met'] else 'MISSED'} {aim['value']:6.2f} ({limit})  {aim['aim']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
