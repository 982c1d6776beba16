r"""Measure quantization on a CPU: memory, speed and error of the common forms in PyTorch.

    pip install torchao bitsandbytes
    python benchmarks/quantization.py --json benchmarks/results/quantization.json

The model is that of generation.py. If that model was never trained, the weights are random, and
outputs are cut at 16 tokens. The measurement takes under three minutes on two cores, and prints the
table of docs/deploy.md.

Each form runs in a separate process. All forms translate the same batches of 32 in turn, and every
round begins with another form. Memory is the growth of the process since before it loaded the
model. The error is the mean absolute change of a target token's log-probability against float32.
"""

import argparse
import contextlib
import copy
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from base_model import DEFAULT_MODEL, Text, batched, load
from engines import TorchEngine, quieten
from host import write
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from vaswani.training.circumstances import circumstances
from worker import PeakMemory, Worker, timed

from vaswani import VaswaniInt8Config

BATCH = 32


def quantized_dynamically(folder: Path) -> Any:
    """Load linear layers with int8 weights by torch. Each call converts activations to int8."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def torchao_form(name: str) -> Callable[[Path], PreTrainedModel]:
    """Return a loader of a torchao form over bfloat16, by the name of its configuration."""

    def load_form(folder: Path) -> PreTrainedModel:
        from torchao import quantization

        form = TorchAoConfig(getattr(quantization, name)())
        return AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=form
        )

    return load_form


def bitsandbytes_form(**settings: Any) -> Callable[[Path], PreTrainedModel]:
    """Return a loader of a bitsandbytes form over bfloat16."""

    def load_form(folder: Path) -> PreTrainedModel:
        form = BitsAndBytesConfig(**settings)
        return AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=form, device_map="cpu"
        )

    return load_form


def plain(dtype: torch.dtype) -> Callable[[Path], PreTrainedModel]:
    """Return a loader of the model in one dtype.

    The model is copied, because loaded weights are read from the disk at their first use.
    """
    return lambda folder: copy.deepcopy(AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype))


def rounded_to_int8(folder: Path) -> PreTrainedModel:
    """int8 weights of this package over float32."""
    return AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=VaswaniInt8Config())


FORMS: dict[str, Callable[[Path], Any]] = {
    "float32": plain(torch.float32),
    "bfloat16": plain(torch.bfloat16),
    "VaswaniInt8Config": rounded_to_int8,
    "quantize_dynamic, int8": quantized_dynamically,
    "torchao, int8 weights": torchao_form("Int8WeightOnlyConfig"),
    "torchao, int8": torchao_form("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes, int8": bitsandbytes_form(load_in_8bit=True),
    "bitsandbytes, 4 bits": bitsandbytes_form(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="FOLDER")
    add("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), metavar="FORM")
    add("--sentences", type=int, default=64, metavar="N", help="sentences of a measurement")
    add("--rounds", type=int, default=2, help="turns of every form")
    return parser.parse_args(argv)


def job_of(form: str, folder: Path, threads: int) -> Callable:
    """Load a form and return a function that measures it. It runs in a separate process."""
    quieten()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    with contextlib.suppress(ImportError):  # import libraries first, so that memory excludes them
        if form.startswith("torchao"):
            import torchao  # noqa: F401
        if form.startswith("bitsandbytes"):
            import bitsandbytes  # noqa: F401
    memory = PeakMemory("cpu")
    before = memory.now()
    try:
        model = FORMS[form](folder).eval()
    except ImportError as error:
        raise RuntimeError(str(error)) from error
    weights = memory.now() - before
    engine = TorchEngine("ours", form, model, limited=True)

    def measure(what: str, *inputs: Any) -> Any:
        if what == "memory":
            return weights
        if what == "score":
            return torch.cat(model.score(*inputs).log_probs).tolist()
        sentences, beams, forced = inputs
        batches = [engine.prepare(batch) for batch in batched(sentences, BATCH)]
        return sum(timed(lambda batch=batch: engine.run(batch, beams, forced)) for batch in batches)

    return measure


def measure_forms(
    workers: dict[str, Worker], text: Text, sentences: int, rounds: int
) -> list[dict[str, Any]]:
    """Return rows of memory, speed and error."""
    indices = text.chosen(sentences)
    sources = [text.sources[index] for index in indices]
    eos = sources[0][-1]
    targets = [[*text.targets[index], eos] for index in indices]
    rows = {
        form: {"form": form, "weights_mb": worker("memory")} for form, worker in workers.items()
    }
    scores = {form: worker("score", sources, targets) for form, worker in workers.items()}
    exact = torch.tensor(scores["float32"])
    for form, values in scores.items():
        rows[form]["error"] = (torch.tensor(values) - exact).abs().mean().item()
    for beams in (1, 4):
        seconds: dict[str, list[float]] = {form: [] for form in workers}
        for worker in workers.values():
            worker("speed", sources[:BATCH], beams, text.forced)
        names = list(workers)
        for turn in range(rounds):
            for form in names[turn:] + names[:turn]:
                seconds[form].append(workers[form]("speed", sources, beams, text.forced))
        for form, taken in seconds.items():
            speed = len(sources) / statistics.median(taken)
            rows[form] |= {f"seconds_beam_{beams}": taken, f"sentences_per_second_{beams}": speed}
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table in docs/deploy.md."""
    lines = [
        "| form | weights | error | sentences/s, greedy | sentences/s, beam 4 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["form"], f"{row['weights_mb']:.0f}", f"{row['error']:.3f}"]
        cells += [f"{row[f'sentences_per_second_{beams}']:.1f}" for beams in (1, 4)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    quieten()
    model, text = load(args.model, untrained=True)
    trained = text.tokenizer is not None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        forms = dict.fromkeys(["float32", *args.forms])  # errors are measured against float32
        workers, missing = {}, []
        for form in forms:
            worker = Worker(job_of, form, Path(folder), torch.get_num_threads())
            try:
                worker.wait()
            except RuntimeError as error:
                missing.append({"form": form, "reason": str(error)})
                print(f"{form} is missing: {error}")
            else:
                workers[form] = worker
        results = {
            **circumstances(),
            "model": args.model.name if trained else "random weights",
            "parameters": model.num_parameters(),
            "sentences": args.sentences,
            "batch": BATCH,
            "rounds": args.rounds,
            "missing": missing,
            "forms": measure_forms(workers, text, args.sentences, args.rounds),
        }
        for worker in workers.values():
            worker.close()
    write(args.json, results)
    print("\n".join(table(results["forms"])))


if __name__ == "__main__":
    main()
