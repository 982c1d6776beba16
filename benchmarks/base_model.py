"""A base-size model of 37,000 tokens that stops by itself, trained on Multi30k in half an hour.

Decoding speed depends on sizes and on the lengths of real translations, hardly on their quality:
this training is short, not the paper's. Two cores are enough because the model itself is bfloat16
(float32 weights live in the optimizer alone) and attention over a dozen tokens is cheaper written
out than fused.
"""

import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vaswani.corpora.token_batches import TokenBatchSampler
from vaswani.training.circumstances import circumstances

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

_ROOT = Path(__file__).resolve().parent.parent
_STEPS, _WARMUP, _PEAK = 1700, 200, 7e-4
# Post-norm layers learn slowly at first unless their residual branches start small.
_BRANCH_GAIN = 0.3
_TOKENS = 1024  # of a batch, on either side
_EVERY = 200  # updates between checkpoints
VOCAB_SIZE = 37_000


def read_lines(split: str, language: str) -> list[str]:
    """Read a lowercased, tokenised file of Multi30k: "train", "val" or "test_2016_flickr".

    Raises:
        FileNotFoundError: neither VASWANI_DATA nor data/ holds the corpus.
    """
    folder = Path(os.environ.get("VASWANI_DATA", _ROOT / "data")) / "multi30k"
    path = folder / f"{split}.lc.norm.tok.{language}.gz"
    if not path.exists():
        raise FileNotFoundError(
            f"{path.name} is not in {folder}: set VASWANI_DATA to the folder that holds multi30k/."
        )
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def train(folder: Path, steps: int = _STEPS) -> None:
    """Train from scratch into `folder`, or go on from the checkpoint that a killed run left there.

    Writes the float32 model, its tokenizer and training.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = vocabulary(folder)
    sources, targets = (tokenizer(read_lines("train", side))["input_ids"] for side in ("en", "de"))
    valid = [tokenizer(read_lines("val", side)[:256])["input_ids"] for side in ("en", "de")]
    torch.manual_seed(0)
    config = VaswaniConfig.preset("base", vocab_size=VOCAB_SIZE)
    config._attn_implementation = "eager"
    model = VaswaniForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("fc2.weight", "out_proj.weight")):
                weight.mul_(_BRANCH_GAIN)
    exact = [weight.detach().clone() for weight in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.Adam(exact, lr=_PEAK, betas=(0.9, 0.98), eps=1e-9, fused=True)
    checkpoint = folder / "unfinished.pt"
    done, seconds, log = 0, 0.0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        _copy(state["weights"], exact)
        done, seconds, log = state["done"], state["seconds"], state["log"]
    _copy(exact, model.parameters())

    sampler = TokenBatchSampler(
        [(len(source), len(target)) for source, target in zip(sources, targets, strict=True)],
        _TOKENS,
    )
    started, losses = time.monotonic() - seconds, []
    model.train()
    for step, batch in _numbered(sampler, done + 1, steps):
        optimizer.param_groups[0]["lr"] = _PEAK * min(
            step / _WARMUP, (steps - step) / max(steps - _WARMUP, 1)
        )
        loss = model(
            **padded([sources[i] for i in batch], [targets[i] for i in batch]), skip_logits=False
        ).loss
        loss.backward()
        for weight, rounded in zip(exact, model.parameters(), strict=True):
            weight.grad, rounded.grad = rounded.grad.float(), None
        torch.nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
        _copy(exact, model.parameters())
        losses.append(loss.item())
        if step % _EVERY == 0 or step == steps:
            seconds = time.monotonic() - started
            log.append({"step": step, "loss": sum(losses) / len(losses), "seconds": seconds})
            log[-1]["valid_loss"] = _loss(model, *valid)
            losses = []
            print("  ".join(f"{name} {value:.5g}" for name, value in log[-1].items()), flush=True)
            state = {"weights": exact, "optimizer": optimizer.state_dict(), "done": step}
            torch.save({**state, "seconds": seconds, "log": log}, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)

    model.float()
    _copy(exact, model.parameters())
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(folder)
    report = {**circumstances(), "steps": steps, "minutes": round(seconds / 60, 1), "log": log}
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    checkpoint.unlink(missing_ok=True)


def padded(
    sources: Sequence[list[int]], targets: Sequence[list[int]] | None = None, pad: int = 0
) -> dict[str, torch.Tensor]:
    """Make a batch of token ids (B, S), their mask, and labels (B, T) if there are targets."""
    ids = _rectangle(sources, pad)
    lengths = torch.tensor([len(source) for source in sources])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch if targets is None else {**batch, "labels": _rectangle(targets, -100)}


def _rectangle(rows: Sequence[list[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def vocabulary(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `folder`, or train it there on Multi30k (5.1: shared byte pairs)."""
    if (folder / "tokenizer.json").exists():
        return VaswaniTokenizer.from_pretrained(folder)
    lines = [line for side in ("en", "de") for line in read_lines("train", side)]
    tokenizer = VaswaniTokenizer.train_from_iterator(
        lines, vocab_size=VOCAB_SIZE, show_progress=False
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _numbered(sampler: TokenBatchSampler, first: int, last: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the updates first, ..., last with their batches, through as many epochs as needed."""
    for epoch in range(last // len(sampler) + 1):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(sampler, start=epoch * len(sampler) + 1):
            if first <= step <= last:
                yield step, batch


@torch.no_grad()
def _copy(values: Any, tensors: Any) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)


@torch.no_grad()
def _loss(model: PreTrainedModel, sources: list[list[int]], targets: list[list[int]]) -> float:
    model.eval()
    loss = model(**padded(sources, targets)).loss.item()
    model.train()
    return loss


__all__ = ["VOCAB_SIZE", "padded", "read_lines", "train", "vocabulary"]
