"""Data, token batches and the training loop of the siblings' recipes."""

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from vaswani.corpora.token_batches import TokenBatchSampler
from vaswani.training.circumstances import circumstances

Batch = dict[str, torch.Tensor]


def arguments(description: str, results: str, updates: int) -> argparse.ArgumentParser:
    """Make the parser of a recipe."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results") / results)
    parser.add_argument("--lines", type=int, help="read no more lines of each file, for a trial")
    return parser


def multi30k(part: str, language: str, lines: int | None = None) -> list[str]:
    """Read a side of Multi30k, lowercased and tokenised, from $VASWANI_DATA or data/."""
    folder = Path(os.environ.get("VASWANI_DATA", "data")) / "multi30k"
    with gzip.open(folder / f"{part}.lc.norm.tok.{language}.gz", "rt", encoding="utf-8") as file:
        return [line.strip() for line in file][:lines]


def pad(rows: list[list[int]], value: int = 0) -> torch.Tensor:
    """Put rows of numbers into one tensor, padded on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], True, value)


def token_batches(lengths: list[int], tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield the sentence indices of each batch, epoch after epoch without end."""
    sampler = TokenBatchSampler([(length, length) for length in lengths], tokens, seed=seed)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from sampler
        epoch += 1


def train(
    model: Any,
    make_batch: Callable[[list[int]], Batch],
    lengths: list[int],
    *,
    updates: int,
    tokens: int,
    peak: float,
    seed: int = 0,
    batches_per_update: int = 1,
) -> float:
    """Train with Adam, and return the minutes.

    The learning rate rises for a tenth of the updates, then falls to 0. The sentences of a batch
    have similar lengths. With several batches of `tokens` tokens, an update sees mixed lengths.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=peak, betas=(0.9, 0.98))
    warmup = max(updates // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, (updates - step) / max(updates - warmup, 1)),
    )
    start = time.perf_counter()
    model.train()
    batches = token_batches(lengths, tokens, seed)
    for update in range(1, updates + 1):
        for _ in range(batches_per_update):
            loss = model(**make_batch(next(batches))).loss
            (loss / batches_per_update).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if update % 100 == 0:
            print(f"update {update}: loss {loss.item():.3f}", flush=True)
    model.eval()
    return round((time.perf_counter() - start) / 60, 2)


def parameters(model: torch.nn.Module) -> int:
    """Count the parameters of a model, shared ones once."""
    return sum(weight.numel() for weight in model.parameters())


def write_results(path: Path, **results: Any) -> None:
    """Write a results file: what was run where, and what came out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**circumstances(), **results}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"Wrote {path}")
