"""A few updates of a training, measured or profiled in a process of its own, for training.py.

    python benchmarks/training_run.py JOB REPORT

training.py writes the JSON file JOB, and this program writes REPORT. It uses no name that version
0.1 lacks, because `training.py --earlier` runs it with earlier versions of the package.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.utils import logging
from vaswani.training.trainer import VaswaniTrainer
from worker import PeakMemory, synchronize

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

SMOOTHING = 0.1


@dataclasses.dataclass
class Job:
    """The settings of a training.

    Args:
        name: "packed" or "sorted" for batches of our trainer, or "MarianMT".
        precision: "float32", or "bfloat16" by autocast, the weights in float32.
        fields: fields of the configuration that differ from the base size.
        tokenizer: folder of a tokenizer, which pads the batches.
        pairs: JSON file with the token ids of all sources and of all targets.
        tokens: budget of a batch, on either side.
        sentences: number of sentences in a batch of MarianMT.
        updates: how many count. Two more come before them.
        seed: of the order of the pairs.
        profiled: whether to report the operators of the updates. Profiling slows them down.
    """

    name: str
    precision: str
    device: str
    threads: int
    fields: dict[str, Any]
    tokenizer: str
    pairs: str
    tokens: int = 0
    sentences: int = 0
    updates: int = 0
    seed: int = 0
    profiled: bool = False


class CountingCollator:
    """Wraps a collator, and counts the real tokens of each batch."""

    def __init__(self, collator: Callable) -> None:
        self.collator = collator
        self.sources: list[int] = []
        self.targets: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate rows and count."""
        batch = self.collator(rows)
        self.sources.append(int(batch["attention_mask"].sum()))
        self.targets.append(int((batch["labels"] != -100).sum()))
        return batch


class PositionCounter:
    """Counts the positions that a model computes in each forward pass, on both sides."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.positions: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        target = inputs["labels"] if "labels" in inputs else inputs["decoder_input_ids"]
        self.positions.append(inputs["input_ids"].numel() + target.numel())


class Clock(TrainerCallback):
    """Seconds of the updates after the first two, which warm everything up.

    Args:
        updates: how many are timed.
        profiler: records the same updates.
    """

    WARM_UP = 2

    def __init__(self, updates: int, profiler: Any = None) -> None:
        self.last = self.WARM_UP + updates
        self.profiler = profiler
        self.started = self.seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start with the first update that counts."""
        if state.global_step == self.WARM_UP:
            synchronize()
            if self.profiler:
                self.profiler.start()
            self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after the last."""
        if state.global_step == self.last:
            synchronize()
            self.seconds = time.perf_counter() - self.started
            if self.profiler:
                self.profiler.stop()


def measure(job: Job) -> dict[str, Any]:
    """Train, and measure the updates.

    Returns:
        "seconds"; "tokens" and "source_tokens", real ones; "padding", the share of padded
        positions on both sides; "peak_mb"; "files" of the package's modules; and "operators" if
        they are profiled.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    rows = [
        {"input_ids": source, "attention_mask": [1] * len(source), "labels": target}
        for source, target in zip(*json.loads(Path(job.pairs).read_text()), strict=True)
    ]
    if job.name == "MarianMT":  # imported here, before the memory is measured
        from vaswani.conversion.to_marian import to_marian  # 0.1 has it elsewhere
    memory = PeakMemory(job.device)
    before = memory.now()
    model: Any = VaswaniForConditionalGeneration(VaswaniConfig.preset("base", **job.fields))
    arguments: dict[str, Any] = {}
    own: dict[str, Any] = {"max_source_tokens": job.tokens}
    trainer: Any = VaswaniTrainer
    if job.name == "packed":
        own["batching"] = "packed"
    elif job.name == "MarianMT":
        model, own, trainer = to_marian(model), {}, Seq2SeqTrainer
        arguments["per_device_train_batch_size"] = job.sentences
        arguments["label_smoothing_factor"] = SMOOTHING
    model.to(job.device)
    memory.now()
    memory.forget()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.device == "cuda" else [])]
    profiler = profile(activities=activities) if job.profiled else None
    clock = Clock(job.updates, profiler)
    tokenizer = VaswaniTokenizer.from_pretrained(job.tokenizer)
    collator = CountingCollator(DataCollatorForSeq2Seq(tokenizer, model=model))
    counter = PositionCounter(model)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        arguments |= {
            "output_dir": folder,
            "max_steps": clock.last,
            "learning_rate": 1e-5,
            "seed": job.seed,
            "bf16": job.precision == "bfloat16",
            "use_cpu": job.device == "cpu",
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
        }
        trainer(
            model=model,
            args=Seq2SeqTrainingArguments(**arguments),
            train_dataset=rows,
            data_collator=collator,
            callbacks=[clock],
            **own,
        ).train()
    counted = slice(clock.WARM_UP, clock.last)
    sources, targets = sum(collator.sources[counted]), sum(collator.targets[counted])
    return {
        "seconds": clock.seconds,
        "tokens": targets,
        "source_tokens": sources,
        "padding": 1 - (sources + targets) / sum(counter.positions[counted]),
        "peak_mb": memory.peak() - before,
        "files": package_files(),
        **({"operators": operators(profiler, job.device)} if profiler else {}),
    }


def package_files() -> list[str]:
    """Return the files of all imported modules of the package."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "vaswani"]
    return sorted(file for module in modules if (file := getattr(module, "__file__", None)))


def operators(recorded: profile, device: str) -> list[dict[str, Any]]:
    """Return the operators of a profile, by the milliseconds that each takes itself."""
    spent = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    found = [
        {"name": event.key, "calls": event.count, "ms": round(getattr(event, spent) / 1000, 3)}
        for event in recorded.key_averages()
        if event.device_type == kind
    ]
    return sorted(found, key=lambda operator: -operator["ms"])


def main(argv: list[str]) -> None:
    """Run the command line."""
    job, report = map(Path, argv)
    measured = measure(Job(**json.loads(job.read_text())))
    report.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
