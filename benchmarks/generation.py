r"""Decoding speed on this host, against CTranslate2 and MarianMTModel with the same weights.

    python benchmarks/generation.py --results benchmarks/results/generation
    python benchmarks/generation.py --train             only make the model that is measured
    python benchmarks/generation.py --profile FILE      where our search spends its time

Each engine runs alone, in a process that starts for its turn and ends with it. All engines take
their turns in every round, and every round starts with another engine. In its turn an engine
translates the same sentences of Multi30k's test set in the same batches, sorted by length as in
every toolkit. Inputs and outputs are token ids, so tokenizers are not timed.

Search rules. "ours, the peer's rule" is CTranslate2's rule: rank by score / length, and stop when
the number of finished hypotheses equals the number of beams. "ours" is the model's own rule: length
penalty ((5 + |Y|) / 6)^0.6, a search until no open hypothesis can win, and at most source length +
50 tokens for each sentence. MarianMT follows CTranslate2's rule too.

A ratio is the peer's time divided by ours in the same round. Tables print its least, median and
largest value over the rounds. `--allocators` names allocators of memory. `--instructions` computes
as on a machine with fewer instructions. An engine takes a turn with each of them. `--threads` is
the number of threads of every engine.
"""

import argparse
import contextlib
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from base_model import DEFAULT_MODEL, Text, batched, load, train
from decoding_profile import hypotheses_a_sentence, measure_profile
from engines import (
    OURS,
    PEERS_RULE,
    Workshop,
    distance_to_ctranslate2,
    distance_to_marian,
    marian_twin,
    quieten,
    translator,
)
from host import ALLOCATORS, INSTRUCTIONS, environment, host_facts, host_name, preloaded, write
from ratios import SETTING, Row, compare, search_name
from transformers import PreTrainedModel
from vaswani.generation.library_vaswani import library
from vaswani.training.circumstances import circumstances, weights_sha256
from worker import Worker

SENTENCES = 128  # of a measurement, at least
# Seconds between processes. Threads stay awake for a moment after their last job, on cores that the
# next process needs.
PAUSE = 0.3
# Environment variables that change how engines multiply or wait. The results record them.
VARIABLES = ("CT2_USE_MKL", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")

Tokens = list[list[int]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results", type=Path, metavar="FOLDER", help="write HOST-DATE.json here")
    add("--name", help="write HOST-DATE-NAME.json, for settings beside those of HOST-DATE.json")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--train", action="store_true", help="train the model, and measure nothing")
    add("--profile", type=Path, metavar="FILE", help="only write where our search spends its time")
    add(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        metavar="FOLDER",
        help="folder of the model, which is trained if it is missing "
        "(default: runs/benchmark-base)",
    )
    add("--engines", nargs="+", metavar="NAME", help='such as "ours int8" (default: all)')
    add("--texts", nargs="+", default=["short"], choices=("short", "long"), help="default: short")
    add("--beams", type=int, nargs="+", default=[4, 1], metavar="N", help="default: 4 1")
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N")
    add("--rounds", type=int, default=3, help="turns of every engine (default: 3)")
    add("--sentences", type=int, default=SENTENCES, help=f"default and least: {SENTENCES}")
    add("--allocators", nargs="+", default=["glibc"], choices=ALLOCATORS, help="default: glibc")
    add("--instructions", nargs="+", default=["native"], choices=list(INSTRUCTIONS))
    add("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    for name in ("beams", "batches", "threads", "rounds", "sentences"):
        value = getattr(args, name)
        given = min(value) if isinstance(value, list) else value
        least = SENTENCES if name == "sentences" else 1
        if given < least:
            parser.error(f"--{name} must be at least {least}, got {given}")
    names = [" ".join(pair) for pair in engine_names(args.device)]
    for name in args.engines or []:
        if name not in names:
            parser.error(f"--engines has no {name!r}: choose from {', '.join(map(repr, names))}")
    if args.profile and len(args.instructions) > 1:
        parser.error("--profile takes one name of --instructions")
    for name in INSTRUCTIONS["avx2"]:
        if os.environ.get(name):
            parser.error(f"{name} is set, so engines may lack instructions: unset it")
    return args


def engine_names(device: str) -> list[tuple[str, str]]:
    """Return (name, precision) of all engines."""
    ours = ("float32", "bfloat16", *(("int8",) if device == "cpu" else ()))
    theirs = ("float32", "int8") if device == "cpu" else ("float32", "bfloat16", "int8_float16")
    return [
        *((PEERS_RULE, kind) for kind in ours),
        *(("CTranslate2", kind) for kind in theirs),
        *((OURS, kind) for kind in ours),
        *(("MarianMT", kind) for kind in ("float32", "bfloat16")),
    ]


def check_twins(model: PreTrainedModel, folder: Path, text: Text) -> dict[str, float]:
    """Compare the peers' outputs with ours on real targets, and exit if they differ."""
    indices = text.chosen(12)
    sources, targets = ([side[i] for i in indices] for side in (text.sources, text.targets))
    ended = [[*target, model.config.eos_token_id] for target in targets]
    distances = {"MarianMT": distance_to_marian(model, marian_twin(model), sources, ended)}
    engine = None
    with contextlib.suppress(RuntimeError):  # this machine cannot run CTranslate2
        engine = Workshop(model, "cpu", folder, 1).build("CTranslate2", "float32")
    if engine is not None:
        distances["CTranslate2"] = distance_to_ctranslate2(model, engine, sources, targets)
    limits = {"MarianMT": 1e-4, "CTranslate2": 1e-3}
    for name, distance in distances.items():
        if not distance <= limits[name]:
            sys.exit(f"{name} computes something else: off by {distance:.2g} at a target token.")
    return distances


def jobs_of(args: argparse.Namespace, text: Text) -> list[tuple[Row, list[int] | None, list]]:
    """List what an engine translates in its turn: the row's beginning, indices and batches."""
    jobs = []
    for kind in args.texts:
        for beams in args.beams:
            for size in args.batches:
                number = max(args.sentences, 2 * size if size > 1 else 1)
                indices = text.chosen(number) if kind == "short" else None
                sources = (
                    text.long(number)
                    if indices is None
                    else [text.sources[index] for index in indices]
                )
                row = {"text": kind, "beams": beams, "batch": size, "sentences": len(sources)}
                jobs.append((row, indices, list(batched(sources, size))))
    return jobs


def turn(
    engine: tuple[str, str], args: argparse.Namespace, model: Path, folder: Path, jobs: list
) -> list[Row]:
    """Run all jobs of an engine in a process of its own.

    Raises:
        RuntimeError: this machine cannot run the engine. The message gives the reason.
    """
    worker = Worker(translator, model, *engine, args.device, folder, args.threads)
    try:
        worker.wait()
        return [worker(batches, row["beams"], args.forced) for row, _, batches in jobs]
    finally:
        worker.close()
        time.sleep(PAUSE)


def measure_speed(
    args: argparse.Namespace, folder: Path, text: Text, jobs: list
) -> Iterator[tuple[list[Row], list[Row]]]:
    """Let all engines take turns, in every environment.

    Yields:
        After each round, the rows of all rounds so far, and the missing engines.
    """
    names = [pair for pair in engine_names(args.device) if _chosen(pair, args.engines)]
    rows: dict[tuple, Row] = {}
    missing: dict[tuple, Row] = {}
    environments = list(_environments(args, missing))
    for number in range(args.rounds):
        first = number % len(names)
        for engine in names[first:] + names[:first]:
            for allocator, instructions, variables in environments:
                place = (allocator, instructions, *engine)
                if place in missing:
                    continue
                try:
                    with environment(variables):
                        found = turn(engine, args, args.model, folder, jobs)
                except RuntimeError as error:
                    missing[place] = {"engine": " ".join(engine), "reason": str(error)}
                    continue
                for (about, indices, _), result in zip(jobs, found, strict=True):
                    key = (*place, *about.values())
                    row = rows.setdefault(key, _new_row(allocator, instructions, engine, about))
                    row["seconds"].append(round(result["seconds"], 4))
                    row["page_faults"] = result["page_faults"]
                    row["tokens"] = sum(map(len, result["outputs"]))
                    if indices is not None:
                        row["bleu"] = text.bleu(indices, result["outputs"])
        print(f"round {number + 1} of {args.rounds}", flush=True)
        yield list(rows.values()), list(missing.values())


def _environments(
    args: argparse.Namespace, missing: dict[tuple, Row]
) -> Iterator[tuple[str, str, dict[str, str]]]:
    for allocator in args.allocators:
        try:
            library = preloaded(allocator)
        except RuntimeError as error:
            missing[allocator,] = {"engine": f"all with {allocator}", "reason": str(error)}
            continue
        for instructions in args.instructions:
            yield allocator, instructions, {**library, **INSTRUCTIONS[instructions]}


def _chosen(engine: tuple[str, str], wanted: list[str] | None) -> bool:
    return wanted is None or " ".join(engine) in wanted


def _new_row(allocator: str, instructions: str, engine: tuple[str, str], about: Row) -> Row:
    name, precision = engine
    return {
        **{"allocator": allocator, "instructions": instructions},
        **{"engine": name, "precision": precision, **about, "bleu": None, "seconds": []},
    }


def print_speed(rows: list[Row]) -> None:
    """Print the sentences a second of every engine, a table for each setting."""
    for setting in dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows):
        allocator, instructions, kind, beams, size = setting
        search = search_name({"beams": beams})
        print(f"\n{search}, batch {size}, {kind} sentences, {allocator}, {instructions}")
        print(f"{'engine':26}{'precision':14}{'least':>8}{'median':>8}{'most':>8}{'BLEU':>8}")
        for row in rows:
            if tuple(row[name] for name in SETTING) == setting:
                rates = sorted(row["sentences"] / seconds for seconds in row["seconds"])
                cells = (rates[0], statistics.median(rates), rates[-1])
                bleu = "-" if row["bleu"] is None else f"{row['bleu']:.2f}"
                print(
                    f"{row['engine']:26}{row['precision']:14}"
                    + "".join(f"{rate:8.1f}" for rate in cells)
                    + f"{bleu:>8}",
                    flush=True,
                )


def print_ratios(ratios: list[Row]) -> None:
    """Print the ratios, with the verdict on each aim."""
    print(f"\n{'least':>6}{'median':>8}{'most':>6}{'aim':>6}  times as fast")
    for row in ratios:
        missed = row["aim"] is not None and row["median"] < row["aim"]
        aim = "" if row["aim"] is None else f"{row['aim']:g}"
        print(
            f"{row['least']:6.2f}{row['median']:8.2f}{row['most']:6.2f}{aim:>6}  "
            f"{row['ours']} as {row['peer']}: beam {row['beams']}, batch {row['batch']}, "
            f"{row['text']}, {row['allocator']}, {row['instructions']}"
            + (", MISSED" if missed else "")
        )


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    quieten()
    if args.train:
        train(args.model, device=args.device)
        return
    if args.profile:  # the search runs in this process
        os.environ.update(INSTRUCTIONS[args.instructions[0]])
    about = circumstances()
    parts = [host_name(about["hardware"]), str(datetime.datetime.now(datetime.UTC).date())]
    name = "-".join([*parts, *([args.name] if args.name else [])])
    path = args.results and args.results / f"{name}.json"
    if path and path.exists():
        sys.exit(f"{path} exists. Choose another file with --name.")
    model, text = load(args.model, untrained=args.profile is not None, device=args.device)
    args.forced = text.forced
    try:
        jobs = jobs_of(args, text)
    except ValueError as error:
        sys.exit(f"--sentences {args.sentences}: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.profile:
            torch.set_num_threads(args.threads)
            workshop = Workshop(model, args.device, folder, args.threads)
            ours = [kind for name, kind in engine_names(args.device) if name == PEERS_RULE]
            settings = ours, args.texts, args.beams, args.batches
            facts = {"host": host_facts(), "threads": args.threads, "kernels": bool(library())}
            facts["instructions"] = args.instructions[0]
            facts["profile"] = measure_profile(workshop, text, *settings)
            if text.forced is None and library() and "short" in args.texts:
                counts = hypotheses_a_sentence(workshop, text, args.beams, args.sentences)
                facts["hypotheses"] = counts
            write(args.profile, {**about, **facts})
            return
        results: dict[str, Any] = {
            **about,
            "device": args.device,
            "host": host_facts(),
            "parameters": model.num_parameters(),
            "threads": args.threads,
            "kernels": bool(library()),
            "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "weights_sha256": weights_sha256(args.model),
            "distance_of_twins": check_twins(model, folder, text),
        }
        del model  # an engine has the machine for itself
        for rounds, (rows, missing) in enumerate(measure_speed(args, folder, text, jobs), 1):
            # An interrupted measurement keeps its finished rounds.
            results |= {"rounds": rounds, "speed": rows, "missing": missing}
            results["ratios"] = compare(rows)
            write(path, results)
        for engine in results["missing"]:
            print(f"{engine['engine']} is missing: {engine['reason']}")
        print_speed(results["speed"])
        print_ratios(results["ratios"])


if __name__ == "__main__":
    main()
