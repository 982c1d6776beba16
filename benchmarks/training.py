r"""Training speed and memory against MarianMTModel with Seq2SeqTrainer, in one run.

    python benchmarks/training.py                     all tables: most of an hour on two cores
    python benchmarks/training.py --quick             small batches, float32: under a minute
    python benchmarks/training.py --json results.json --device cuda

Both models have the paper's base size and 37,000 tokens. They train from random weights on Multi30k
(English-German), with label smoothing 0.1 and dropout 0.1. There are four measurements:

"trainer": a run as a user starts it. Ours is VaswaniTrainer with a budget of padded tokens.
MarianMT is Seq2SeqTrainer(label_smoothing_factor=0.1) with random batches of as many sentences as
ours has on average. Speed counts real target tokens, not padding.

"network": forward and backward passes without an optimizer. Both models get our batches.

"loss": forward and backward passes of only the map to the vocabulary and the loss. Three versions
take turns: plain (logits, then torch's cross_entropy), ours, and torch's linear_cross_entropy. The
last one runs without label smoothing, because it has none when it works in chunks.

"batching": updates of our model in the size --size, with equal numbers of real tokens. The batches
are packed random sentences, padded random sentences, and padded sorted sentences.

Every contender runs in its own process. The contenders take turns in every round, so that a slow
minute of the machine affects all of them. Times are medians over rounds. A ratio is the median over
rounds of the peer's time per token divided by ours. Memory is the peak of the process minus its
memory before it had a model. It includes weights, gradients and, in "trainer", Adam's averages.
"""

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from base_model import DEFAULT_MODEL, VOCAB_SIZE, padded, read_lines, vocabulary
from batchings import BATCHINGS, BatchingContender
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging
from vaswani.conversion.to_marian import to_marian
from vaswani.corpora.token_batches import TokenBatchSampler
from vaswani.modeling.loss_vaswani import ChunkedCrossEntropy
from vaswani.training.circumstances import circumstances
from vaswani.training.trainer import VaswaniTrainer
from worker import PeakMemory, Worker, synchronize, timed

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

SMOOTHING = 0.1
TOKENS = (1024, 2048, 4096, 8192)
LOSSES = ("plain", "ours", "torch")
PARTS = ("trainer", "network", "loss", "batching")
# Threads stay awake for a moment after their last job, on cores that the next one needs.
PAUSE = 0.3
# FlopCounterMode counts this product under its other name alone.
IN_PLACE = {
    torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * math.prod(total) * a[1]  # shapes
}

Pairs = tuple[list[list[int]], list[list[int]]]


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
    add("--size", choices=("tiny", "base"), default="tiny", help="of batching (default: tiny)")
    add("--profile", action="store_true", help="print where our network spends its time, no more")
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


class CountingCollator:
    """Wraps a collator, and counts the real and the padded target tokens of each batch."""

    def __init__(self, collator: Callable) -> None:
        self.collator = collator
        self.real: list[int] = []
        self.all: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate rows and count."""
        batch = self.collator(rows)
        self.real.append(int((batch["labels"] != -100).sum()))
        self.all.append(batch["labels"].numel())
        return batch


class Clock(TrainerCallback):
    """Seconds of the updates after the first two, which warm everything up.

    Args:
        updates: how many are timed.
    """

    WARM_UP = 2

    def __init__(self, updates: int) -> None:
        self.last = self.WARM_UP + updates
        self.started = self.seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start with the first update that counts."""
        if state.global_step == self.WARM_UP:
            synchronize()
            self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after the last."""
        if state.global_step == self.last:
            synchronize()
            self.seconds = time.perf_counter() - self.started


class Contender:
    """One model in one process, measured as "trainer" or "network".

    Args:
        name: "ours" or "MarianMT".
        precision: "float32", or "bfloat16" by autocast, the weights in float32.
        pairs: token ids of sources and targets.
    """

    def __init__(self, name: str, precision: str, device: str, threads: int, pairs: Pairs) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.name, self.device, self.pairs = name, device, pairs
        self.bf16 = precision == "bfloat16"
        self.memory = PeakMemory(device)
        self.before = self.memory.now()
        config = VaswaniConfig.preset("base", vocab_size=VOCAB_SIZE)
        ours = VaswaniForConditionalGeneration(config)
        self.model: Any = ours if name == "ours" else to_marian(ours)
        self.model.to(device).train()

    def __call__(self, part: str, tokens: int, updates: int) -> dict[str, float]:
        """Measure one part with batches of so many tokens."""
        self.model.zero_grad(set_to_none=True)
        self.memory.now()
        self.memory.forget()
        measured = {"trainer": self._trainer, "network": self._network}[part](tokens, updates)
        measured["peak_mb"] = self.memory.peak() - self.before
        self.model.zero_grad(set_to_none=True)
        self.memory.now()  # gives back what the next contender may need
        return measured

    def autocast(self) -> Any:
        """bfloat16 where it is safe, if that is the precision."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.bf16)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss of a batch, MarianMT's as Seq2SeqTrainer computes it with label smoothing."""
        if self.name == "ours":
            return self.model(**batch).loss
        inputs = {**batch, "decoder_input_ids": shifted(self.model, batch["labels"])}
        labels = inputs.pop("labels")
        outputs = self.model(**inputs)
        return LabelSmoother(epsilon=SMOOTHING)(outputs, labels)

    def _network(self, tokens: int, updates: int) -> dict[str, float]:
        sources, targets = self.pairs
        batches = []
        for rows in list(sampler_of(self.pairs, tokens))[: updates + 1]:
            batch = padded([sources[i] for i in rows], [targets[i] for i in rows])
            batches.append({name: tensor.to(self.device) for name, tensor in batch.items()})

        def work(chosen: list[dict[str, torch.Tensor]]) -> None:
            for batch in chosen:
                self.model.zero_grad(set_to_none=True)
                with self.autocast():
                    loss = self.loss(batch)
                loss.backward()

        work(batches[:1])
        seconds = timed(lambda: work(batches[1:]))
        labels = [batch["labels"] for batch in batches[1:]]
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            work(batches[1:2])
        first = labels[0].numel()
        numbers = sum(label.numel() for label in labels)
        return {
            "seconds": seconds,
            "tokens": sum(int((label != -100).sum()) for label in labels),
            "padding": 1 - sum(int((label != -100).sum()) for label in labels) / numbers,
            "flops": counter.get_total_flops() * numbers / first,
        }

    def _trainer(self, tokens: int, updates: int) -> dict[str, float]:
        sources, targets = self.pairs
        rows = [
            {"input_ids": source, "attention_mask": [1] * len(source), "labels": target}
            for source, target in zip(sources, targets, strict=True)
        ]
        clock = Clock(updates)
        sampler = sampler_of(self.pairs, tokens)
        tokenizer = vocabulary(DEFAULT_MODEL)
        collator = CountingCollator(DataCollatorForSeq2Seq(tokenizer, model=self.model))
        arguments: dict[str, Any] = {
            "max_steps": clock.last,
            "learning_rate": 1e-5,
            "bf16": self.bf16,
            "use_cpu": self.device == "cpu",
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
        }
        own: dict[str, Any] = {"max_source_tokens": tokens}
        trainer: Any = VaswaniTrainer
        if self.name != "ours":
            own, trainer = {}, Seq2SeqTrainer
            arguments["per_device_train_batch_size"] = round(len(rows) / len(sampler))
            arguments["label_smoothing_factor"] = SMOOTHING
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            trainer(
                model=self.model,
                args=Seq2SeqTrainingArguments(folder, **arguments),
                train_dataset=rows,
                data_collator=collator,
                callbacks=[clock],
                **own,
            ).train()
        counted = slice(clock.WARM_UP, clock.last)
        real, numbers = sum(collator.real[counted]), sum(collator.all[counted])
        return {"seconds": clock.seconds, "tokens": real, "padding": 1 - real / numbers}


class LossContender:
    """The map to the vocabulary and the loss alone, in a process of its own.

    Args:
        name: "plain", "ours" or "torch".
    """

    def __init__(self, name: str, precision: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.name, self.device = name, device
        self.bf16 = precision == "bfloat16"
        self.memory = PeakMemory(device)
        self.before = self.memory.now()
        torch.manual_seed(0)
        self.weight = torch.randn(VOCAB_SIZE, 512, device=device).mul_(0.04).requires_grad_()
        if name == "torch" and not hasattr(F, "linear_cross_entropy"):
            raise RuntimeError(f"torch {torch.__version__} has no linear_cross_entropy")

    def __call__(self, tokens: int, updates: int) -> dict[str, float]:
        """Measure forward and backward passes of so many tokens."""
        states = torch.randn(tokens, 512, device=self.device, requires_grad=True)
        targets = torch.randint(0, VOCAB_SIZE, (tokens,), device=self.device)

        def work(times: int) -> None:
            for _ in range(times):
                states.grad = self.weight.grad = None
                with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
                    loss = self._loss(states, targets)
                (loss / tokens).backward()

        self.memory.now()
        self.memory.forget()
        work(1)
        seconds = timed(lambda: work(updates))
        return {
            "seconds": seconds,
            "tokens": tokens * updates,
            "peak_mb": self.memory.peak() - self.before,
        }

    def _loss(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.name == "ours":
            return ChunkedCrossEntropy.apply(states, self.weight, targets, SMOOTHING)
        if self.name == "plain":
            logits = F.linear(states, self.weight).float()
            return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=SMOOTHING)
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        return F.linear_cross_entropy(
            states.to(dtype),
            self.weight.to(dtype),
            targets,
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(),
        )


def shifted(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """The decoder's input, as the collator makes it."""
    return model.prepare_decoder_input_ids_from_labels(labels=labels)


def sampler_of(pairs: Pairs, tokens: int) -> TokenBatchSampler:
    """Return a sampler of batches with at most `tokens` padded tokens on either side."""
    return TokenBatchSampler([tuple(map(len, pair)) for pair in zip(*pairs, strict=True)], tokens)


def take_turns(
    workers: dict[tuple[str, str], Worker], jobs: list[tuple[Any, ...]], rounds: int
) -> list[dict[str, Any]]:
    """Let every worker do every job in turn, round after round.

    A worker that dies, for example for lack of memory, gets no more jobs. Its row says why.
    """
    rows = []
    for job in jobs:
        taken: dict[tuple[str, str], list[dict[str, float]]] = {
            contender: [] for contender in workers
        }
        for turn in range(rounds):
            # Every round starts with another worker, so that none always follows the same one.
            order = list(workers)[turn % len(workers) :] + list(workers)[: turn % len(workers)]
            for contender in order:
                time.sleep(PAUSE)
                try:
                    taken[contender].append(workers[contender](*job))
                except RuntimeError as error:
                    del workers[contender]
                    row = dict(zip(("name", "precision"), contender, strict=True))
                    rows.append({**row, "tokens_per_batch": job[-2], "died": str(error)})
                    print(f"{contender[0]:10}{contender[1]:10}{job[-2]:8}  {error}", flush=True)
        for (name, precision), measured in taken.items():
            if (name, precision) not in workers:
                continue
            speeds = [one["tokens"] / one["seconds"] for one in measured]
            more = {key: measured[0][key] for key in ("padding", "flops") if key in measured[0]}
            row = {
                "name": name,
                "precision": precision,
                "tokens_per_batch": job[-2],
                "tokens_per_second": statistics.median(speeds),
                "rounds": speeds,
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
        ratios.append(
            {
                "peer": peer,
                "precision": precision,
                "tokens_per_batch": tokens,
                "speed": statistics.median(mine / other for mine, other in pairs),
                "memory": ours["peak_mb"] / theirs["peak_mb"],
            }
        )
    return ratios


def judge(ratios: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compare the ratios to MarianMT with our aims."""
    aims = []
    for part, least in (("trainer", 2.5), ("network", 1.4)):
        for ratio in ratios.get(part, []):
            if ratio["tokens_per_batch"] != 4096:
                continue
            where = f"{part}, {ratio['precision']}, 4096 tokens"
            speed, memory = ratio["speed"], ratio["memory"]
            aims.append(
                {"aim": f"speed, {where}", "least": least, "value": speed, "met": speed >= least}
            )
            if part == "trainer":
                aims.append(
                    {"aim": f"memory, {where}", "most": 0.5, "value": memory, "met": memory <= 0.5}
                )
    return aims


def matrix_rate(device: str, precision: str) -> float:
    """Operations per second of a large matrix product, the best of ten."""
    size = 8192 if device == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, precision)) for _ in "ab")
    return 2 * size**3 / min(timed(lambda: a @ b) for _ in range(10))


def print_profile(args: argparse.Namespace, pairs: Pairs) -> None:
    """Print the operators that take most of the time of our network and loss, or of an update."""
    for precision in args.precisions:
        common = (precision, args.device, args.threads, pairs)
        if "batching" in args.parts:
            contender: Any = BatchingContender("packed", *common, args.size)
            batches = contender.batches(args.tokens[-1], 2)
            contender.update(batches)
            print_operators(precision, args, lambda: contender.update(batches[:1]))  # noqa: B023
        else:
            contender = Contender("ours", *common)
            contender("network", args.tokens[-1], 1)
            print_operators(precision, args, lambda: contender("network", args.tokens[-1], 1))  # noqa: B023


def print_operators(precision: str, args: argparse.Namespace, work: Callable) -> None:
    """Profile some work, and print its operators by their own time."""
    activities = [ProfilerActivity.CPU]
    if args.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        work()
    order = "self_device_time_total" if len(activities) > 1 else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=48)
    print(f"\nours {precision}, {args.tokens[-1]} tokens\n{table}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    args.threads = torch.get_num_threads()
    tokenizer = vocabulary(DEFAULT_MODEL)
    sources, targets = (tokenizer(read_lines("train", side))["input_ids"] for side in ("en", "de"))
    if args.profile:
        print_profile(args, (sources, targets))
        return
    results: dict[str, Any] = {
        **circumstances(),
        "device": args.device,
        "rounds": args.rounds,
        "updates": args.updates,
        "matrix_flops_per_second": {
            precision: matrix_rate(args.device, precision) for precision in args.precisions
        },
    }
    ratios: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS:
        if part not in args.parts:
            continue
        if part == "batching":
            workers = start(BatchingContender, BATCHINGS, args, (sources, targets), args.size)
        elif part == "loss":
            workers = start(LossContender, LOSSES, args)
        else:
            workers = start(Contender, ("ours", "MarianMT"), args, (sources, targets))
        print(f"\n{part}\n{'name':10}{'precision':10}{'tokens':>8}{'tokens/s':>12}{'peak MB':>10}")
        jobs = [(tokens, args.updates) for tokens in args.tokens]
        if part in ("trainer", "network"):
            jobs = [(part, *job) for job in jobs]
        results[part] = take_turns(workers, jobs, args.rounds)
        for row in results[part]:
            if "flops_per_second" in row:
                rate = results["matrix_flops_per_second"][row["precision"]]
                row["share_of_matrix_rate"] = row["flops_per_second"] / rate
                print(
                    f"{row['name']:10}{row['precision']:10}{row['tokens_per_batch']:8}  "
                    f"{row['share_of_matrix_rate']:.0%} of the rate of large matrix products",
                    flush=True,
                )
        for peer in ("MarianMT", "plain", "torch"):
            ratios.setdefault(part, []).extend(compare(results[part], peer))
        if part == "batching":
            for peer in BATCHINGS[1:]:
                ratios[part].extend(compare(results[part], peer, own="packed"))
        for worker in workers.values():
            worker.close()
    results |= {"ratios": ratios, "aims": judge(ratios)}
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
