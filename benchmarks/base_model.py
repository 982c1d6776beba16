"""The model and the sentences that the speed benchmarks decode.

The model has the paper's base size and 37,000 tokens. It is trained on Multi30k for 15 minutes at
most, so its translations end, and some training pairs are joined, so long translations end too.
Decoding speed depends on sizes and lengths, and hardly on quality.

The training fits two slow cores: batches are random sentences without padding, the model has no
dropout, and the learning rate follows the clock. On a GPU, or on a CPU with bfloat16 instructions,
the model computes in bfloat16. The optimizer updates float32 weights, and the saved model has them.
"""

import gzip
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase
from vaswani.corpora.packed_collator import packed
from vaswani.corpora.token_batches import PackedBatchSampler
from vaswani.training.circumstances import circumstances

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = _ROOT / "runs" / "benchmark-base"
_STEPS, _PEAK = 3400, 4e-4
_WARMUP = 0.25  # the share of the training in which the learning rate rises
_SECONDS = 15 * 60  # the learning rate reaches 0 then, after as many updates as the host makes
# Post-norm layers learn slowly at first unless their residual branches start small.
_BRANCH_GAIN = 0.3
_TOKENS = 512  # of a batch, on either side
_EVERY = 100  # updates between checkpoints
VOCAB_SIZE = 37_000
LONG = (40, 60)  # tokens of a long source
_SAMPLE = 200  # sentences, among which those of middle length are found
_JOINED = 3  # sentences of a joined pair, and one pair in three begins one


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


def has_bfloat16() -> bool:
    """Tell whether this CPU has bfloat16 instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def train(folder: Path, steps: int = _STEPS, device: str = "cpu") -> None:
    """Train from scratch into `folder`, or continue from the checkpoint of a killed run.

    Writes the float32 model, its tokenizer and training.json.

    Args:
        device: "cpu" or "cuda".
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = vocabulary(folder)
    sources, targets = (
        _with_joined(tokenizer(read_lines("train", side))["input_ids"]) for side in ("en", "de")
    )
    valid = [tokenizer(read_lines("val", side)[:256])["input_ids"] for side in ("en", "de")]
    torch.manual_seed(0)
    config = VaswaniConfig.preset("base", vocab_size=VOCAB_SIZE, dropout=0.0)
    model = VaswaniForConditionalGeneration(config).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("fc2.weight", "out_proj.weight")):
                weight.mul_(_BRANCH_GAIN)
    exact = [weight.detach().clone() for weight in model.parameters()]
    if device == "cuda" or has_bfloat16():
        model.bfloat16()
    optimizer = torch.optim.Adam(exact, lr=_PEAK, betas=(0.9, 0.98), eps=1e-9, fused=True)
    checkpoint = folder / "unfinished.pt"
    done, seconds, log = 0, 0.0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        _copy(state["weights"], exact)
        done, seconds, log = state["done"], state["seconds"], state["log"]
    _copy(exact, model.parameters())

    sampler = PackedBatchSampler(
        [(len(source), len(target)) for source, target in zip(sources, targets, strict=True)],
        _TOKENS,
    )
    started, losses, step = time.monotonic() - seconds, [], done
    model.train()
    for step, batch in _numbered(sampler, done + 1, steps):
        progress = min(max(step / steps, (time.monotonic() - started) / _SECONDS), 1.0)
        last = progress == 1
        optimizer.param_groups[0]["lr"] = _PEAK * min(
            progress / _WARMUP, (1 - progress) / (1 - _WARMUP)
        )
        rows = packed(padded([sources[i] for i in batch], [targets[i] for i in batch]))
        loss = model(**_moved(rows, device)).loss
        loss.backward()
        for weight, rounded in zip(exact, model.parameters(), strict=True):
            weight.grad, rounded.grad = rounded.grad.float(), None
        torch.nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
        _copy(exact, model.parameters())
        losses.append(loss.item())
        if step % _EVERY == 0 or last:
            seconds = time.monotonic() - started
            log.append({"step": step, "loss": sum(losses) / len(losses), "seconds": seconds})
            log[-1]["valid_loss"] = _loss(model, *valid)
            losses = []
            print("  ".join(f"{name} {value:.5g}" for name, value in log[-1].items()), flush=True)
            state = {"weights": exact, "optimizer": optimizer.state_dict(), "done": step}
            torch.save({**state, "seconds": seconds, "log": log}, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
        if last:
            break

    model.float().cpu()
    _copy(exact, model.parameters())
    report = {**circumstances(), "steps": step, "minutes": round(seconds / 60, 1), "log": log}
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    model.save_pretrained(folder)
    checkpoint.unlink(missing_ok=True)


def _with_joined(sentences: list[list[int]]) -> list[list[int]]:
    """Add sequences of three consecutive sentences, with one end token."""
    joined = [
        [token for sentence in sentences[start : start + _JOINED] for token in sentence[:-1]]
        + sentences[start][-1:]
        for start in range(0, len(sentences) - _JOINED + 1, _JOINED)
    ]
    return sentences + joined


class Text:
    """The sentences to translate, as token ids with the end token.

    Args:
        tokenizer: tokenizer of the model. None means an untrained model: its sentences are random,
            and its outputs are cut after `forced` tokens.
    """

    def __init__(self, tokenizer: VaswaniTokenizer | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.forced = 16 if tokenizer is None else None
        self.references: list[str] = []
        if tokenizer is None:
            rng = random.Random(0)
            lengths = [rng.randint(6, 24) for _ in range(1000)]
            self.sources = [[*rng.choices(range(3, vocab_size), k=n - 1), 2] for n in lengths]
            self.targets = [source[:-1] for source in self.sources]
        else:
            self.sources = tokenizer(read_lines("test_2016_flickr", "en"))["input_ids"]
            self.references = read_lines("test_2016_flickr", "de")
            self.targets = [ids[:-1] for ids in tokenizer(self.references)["input_ids"]]

    def chosen(self, number: int) -> list[int]:
        """Return the indices of `number` sentences across the file, shortest source first."""
        if number > len(self.sources):
            raise ValueError(f"The test set has {len(self.sources)} sentences, not {number}.")
        picked = [index * len(self.sources) // number for index in range(number)]
        return sorted(picked, key=lambda index: len(self.sources[index]))

    def middle(self, size: int, kind: str = "short") -> list[list[int]]:
        """Return `size` sources of middle length, among `_SAMPLE` sources of a kind.

        The kinds are "short", for sentences across the file, and "long".
        """
        number = max(size, _SAMPLE)
        sources = (
            self.long(number)
            if kind == "long"
            else [self.sources[index] for index in self.chosen(number)]
        )
        start = (len(sources) - size) // 2
        return sources[start : start + size]

    def bleu(self, indices: Sequence[int], outputs: list[list[int]]) -> float | None:
        """Return the BLEU of translations on the corpus' own tokens, or None without references."""
        if self.tokenizer is None:
            return None
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        metric = sacrebleu.BLEU(tokenize="none", force=True)
        references = [self.references[index] for index in indices]
        return metric.corpus_score(texts, [references]).score

    def long(self, number: int) -> list[list[int]]:
        """Return `number` sources of 40 to 60 tokens, made of consecutive sentences."""
        found, source = [], []
        for sentence in self.sources * 4:
            source = [*source[:-1], *sentence]
            if len(source) >= LONG[0]:
                if len(source) <= LONG[1]:
                    found.append(source)
                source = []
        if len(found) < number:
            raise ValueError(f"The test set has {len(found)} long sources, not {number}.")
        return sorted(found[:number], key=len)


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield batches of `size` items. The last batch may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def load(
    folder: Path, untrained: bool = False, device: str = "cpu"
) -> tuple[PreTrainedModel, Text]:
    """Load the model of a folder, on the CPU.

    If it is missing, train it on `device`, or build an `untrained` one.
    """
    if (folder / "model.safetensors").exists():
        model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        tokenizer = VaswaniTokenizer.from_pretrained(folder)
        return model, Text(tokenizer, model.config.vocab_size)
    if untrained:
        print(
            f"No trained model in {folder.name}: random weights and sentences, outputs cut at "
            "16 tokens, no BLEU. `--train` makes the real one."
        )
        torch.manual_seed(0)
        config = VaswaniConfig.preset("base", vocab_size=VOCAB_SIZE)
        return VaswaniForConditionalGeneration(config).eval(), Text(None, VOCAB_SIZE)
    print(f"No trained model in {folder.name}: training it first.", flush=True)
    train(folder, device=device)
    return load(folder)


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


def _numbered(
    sampler: PackedBatchSampler, first: int, last: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the updates first, ..., last with their batches, through as many epochs as needed."""
    for epoch in range(last // len(sampler) + 1):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(sampler, start=epoch * len(sampler) + 1):
            if first <= step <= last:
                yield step, batch


def _moved(batch: dict[str, Any], device: Any) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@torch.no_grad()
def _copy(values: Any, tensors: Any) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)


@torch.no_grad()
def _loss(model: PreTrainedModel, sources: list[list[int]], targets: list[list[int]]) -> float:
    model.eval()
    loss = model(**_moved(padded(sources, targets), model.device)).loss.item()
    model.train()
    return loss


__all__ = [
    "DEFAULT_MODEL",
    "VOCAB_SIZE",
    "Text",
    "batched",
    "has_bfloat16",
    "load",
    "padded",
    "read_lines",
    "train",
    "vocabulary",
]
