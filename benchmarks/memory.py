"""Memory of decoding: our model, CTranslate2 and MarianMTModel with the same weights.

    python benchmarks/memory.py --json benchmarks/results/memory.json

Each engine runs alone in a process, and translates the longest test sentences of Multi30k with
4 beams. Memory is that of the process without the libraries' own. The model is that of
generation.py, which trains it if it is missing.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from base_model import DEFAULT_MODEL, Text, load
from engines import PEERS_RULE, build_alone, quieten
from host import write
from vaswani.training.circumstances import circumstances
from worker import PeakMemory, Worker

from generation import engine_names

Tokens = list[list[int]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, metavar="FOLDER")
    return parser.parse_args(argv)


def memory_of(model: Path, name: str, precision: str, device: str, *arguments: Any) -> Callable:
    """Build one engine and return a function that measures its memory.

    The arguments are those of `build_alone`.
    """
    memory, before = PeakMemory(device), 0.0
    outside_torch = device == "cuda" and name == "CTranslate2"
    if outside_torch:
        free = torch.cuda.mem_get_info()[0]
    elif device == "cpu":
        before = memory.now()
    engine = build_alone(model, name, precision, device, *arguments)

    def translate(sentences: Tokens, beams: int, forced: int | None) -> dict[str, float]:
        """Translate one batch, and return the memory of the weights and the peak memory."""
        weights = memory.now() - before
        memory.forget()
        if outside_torch:
            weights = (free - torch.cuda.mem_get_info()[0]) / 2**20
        engine.run(engine.prepare(sentences), beams, forced)
        peak = memory.peak() - before
        if outside_torch:
            peak = (free - torch.cuda.mem_get_info()[0]) / 2**20
        return {"weights_mb": weights, "peak_mb": peak}

    return translate


def measure(args: argparse.Namespace, folder: Path, text: Text) -> list[dict[str, Any]]:
    """Return the peak memory of each engine on the longest sentences, without the libraries'."""
    rows = []
    kind = "GPU" if args.device == "cuda" else "resident"
    print(f"\npeak {kind} memory, beam 4, longest sentences (MB, without the libraries' own)")
    print(f"{'engine':18}{'precision':14}{'batch':>6}{'weights':>10}{'peak':>10}")
    for name, precision in engine_names(args.device):
        if name == PEERS_RULE:
            continue
        for size in (1, 32):
            sentences = sorted(text.sources, key=len)[-size:]
            arguments = (args.model, name, precision, args.device, folder)
            worker = Worker(memory_of, *arguments, torch.get_num_threads())
            try:
                worker.wait()
                measured = worker(sentences, 4, text.forced)
            except RuntimeError as error:
                print(f"{name:18}{precision:14}  not measured: {error}")
                continue
            worker.close()
            row = {"engine": name, "precision": precision, "beams": 4, "batch": size, **measured}
            rows.append(row)
            print(
                f"{name:18}{precision:14}{size:6}{row['weights_mb']:10.0f}{row['peak_mb']:10.0f}",
                flush=True,
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    quieten()
    _, text = load(args.model)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder), text)
    write(args.json, {**circumstances(), "memory": rows})


if __name__ == "__main__":
    main()
