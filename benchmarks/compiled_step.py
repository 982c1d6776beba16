"""Greedy search with a decoder that Inductor compiles, against our own greedy search.

    python benchmarks/compiled_step.py --json benchmarks/results/compiled-step.json

transformers compiles a decoder with a static cache. Both searches take turns to write the same
number of tokens for the same batch, in float32. The first turn includes the compilation, or loads
what an earlier run compiled.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from base_model import DEFAULT_MODEL, Text, load, padded
from engines import quieten
from host import host_facts, write
from transformers import CompileConfig, PreTrainedModel
from vaswani.training.circumstances import circumstances
from worker import timed

_BATCHES = (1, 32)
_TOKENS = 20  # of a translation
_REPEATS = 5  # turns of a search, after the first


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results here")
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="FOLDER")
    add("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    return parser.parse_args(argv)


def measure(model: PreTrainedModel, text: Text, size: int) -> dict[str, Any]:
    """Return the seconds of both searches, first turn and later turns, and their median ratio."""
    batch = padded(text.middle(size))
    compilation = CompileConfig(mode="default")
    compilation._compile_all_devices = True  # otherwise transformers compiles on GPUs only
    searches: dict[str, dict[str, Any]] = {
        "ours": {},
        "compiled": {"cache_implementation": "static", "compile_config": compilation},
    }
    seconds: dict[str, list[float]] = {name: [] for name in searches}
    for _ in range(1 + _REPEATS):
        for name, search in searches.items():
            call = {**batch, **search, "num_beams": 1, "max_new_tokens": _TOKENS}
            seconds[name].append(timed(lambda call=call: model.generate(**call)))
    row: dict[str, Any] = {"batch": size, "tokens": _TOKENS}
    for name, (first, *later) in seconds.items():
        row[name] = {"first": round(first, 3), "later": [round(turn, 4) for turn in later]}
    ratios = (
        compiled / ours
        for compiled, ours in zip(seconds["compiled"][1:], seconds["ours"][1:], strict=True)
    )
    row["compiled_by_ours"] = round(statistics.median(ratios), 2)
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    quieten()
    torch.set_num_threads(args.threads)
    facts = {"host": host_facts(), "threads": args.threads}
    model, text = load(args.model, untrained=True)
    model.generation_config.eos_token_id = None  # all translations have the same length
    rows = []
    for size in _BATCHES:
        rows.append(measure(model, text, size))
        print(
            f"batch {size}: {rows[-1]['compiled_by_ours']} times the time of our search, after "
            f"{rows[-1]['compiled']['first']:.1f} s for the first batch",
            flush=True,
        )
    write(args.json, {**circumstances(), **facts, "rows": rows})


if __name__ == "__main__":
    main()
