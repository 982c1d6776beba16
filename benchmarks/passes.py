"""Forward and backward passes of whole networks and of the loss alone, for training.py."""

import math
from typing import Any

import torch
from base_model import VOCAB_SIZE, padded
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode
from training_run import SMOOTHING
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging
from vaswani.conversion.to_marian import to_marian
from vaswani.corpora.token_batches import TokenBatchSampler
from vaswani.modeling.loss_vaswani import ChunkedCrossEntropy
from worker import PeakMemory, timed

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

NETWORKS = ("ours", "MarianMT")
LOSSES = ("plain", "ours", "torch")
# FlopCounterMode counts this product under its other name alone.
IN_PLACE = {
    torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * math.prod(total) * a[1]  # shapes
}

Pairs = tuple[list[list[int]], list[list[int]]]


class NetworkContender:
    """Forward and backward passes of one model, in a separate process.

    Args:
        name: "ours" or "MarianMT".
        precision: "float32", or "bfloat16" by autocast, the weights in float32.
        pairs: token ids of sources and targets.
        fields: fields of the configuration that differ from the base size.
    """

    def __init__(
        self,
        name: str,
        precision: str,
        device: str,
        threads: int,
        pairs: Pairs,
        fields: dict[str, Any],
    ) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.name, self.device, self.pairs = name, device, pairs
        self.bf16 = precision == "bfloat16"
        self.memory = PeakMemory(device)
        self.before = self.memory.now()
        ours = VaswaniForConditionalGeneration(VaswaniConfig.preset("base", **fields))
        self.model: Any = ours if name == "ours" else to_marian(ours)
        self.model.to(device).train()

    def __call__(self, tokens: int, updates: int, seed: int) -> dict[str, float]:
        """Measure passes of batches of `tokens` tokens. `seed` sets the order of the pairs."""
        self.model.zero_grad(set_to_none=True)
        self.memory.now()
        self.memory.forget()
        measured = self._passes(tokens, updates, seed)
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

    def _passes(self, tokens: int, updates: int, seed: int) -> dict[str, float]:
        sources, targets = self.pairs
        batches = []
        sampler = TokenBatchSampler(lengths_of(self.pairs), tokens, seed=seed)
        for rows in list(sampler)[: updates + 1]:
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
        sizes = [batch["input_ids"].numel() + batch["labels"].numel() for batch in batches[1:]]
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            work(batches[1:2])
        real = {
            name: sum(int((batch[name] != padding).sum()) for batch in batches[1:])
            for name, padding in (("attention_mask", 0), ("labels", -100))
        }
        return {
            "seconds": seconds,
            "tokens": real["labels"],
            "source_tokens": real["attention_mask"],
            "padding": 1 - sum(real.values()) / sum(sizes),
            "flops": counter.get_total_flops() * sum(sizes) / sizes[0],
        }


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

    def __call__(self, tokens: int, updates: int, seed: int) -> dict[str, float]:
        """Measure forward and backward passes of `tokens` random tokens."""
        torch.manual_seed(seed)
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


def lengths_of(pairs: Pairs) -> list[tuple[int, int]]:
    """Return the numbers of tokens of each pair."""
    return [(len(source), len(target)) for source, target in zip(*pairs, strict=True)]
