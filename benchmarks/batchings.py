"""Updates of our model with packed, padded random, and sorted batches, for training.py."""

from typing import Any

import torch
from base_model import padded
from passes import Pairs, lengths_of
from vaswani.corpora.packed_collator import packed
from vaswani.corpora.token_batches import PackedBatchSampler, TokenBatchSampler
from worker import PeakMemory, timed

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

BATCHINGS = ("packed", "random", "sorted")


class BatchingContender:
    """Updates of one model with one kind of batches, in a separate process.

    Args:
        name: "packed", "random" or "sorted".
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
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.name, self.device, self.pairs = name, device, pairs
        self.bf16 = precision == "bfloat16"
        self.memory = PeakMemory(device)
        self.before = self.memory.now()
        self.model = VaswaniForConditionalGeneration(VaswaniConfig.preset("base", **fields))
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def __call__(self, tokens: int, updates: int, seed: int) -> dict[str, float]:
        """Measure updates with at most `tokens` tokens on each side.

        Only sorted batches count padding. `seed` sets the order of the pairs.
        """
        batches = self.batches(tokens, updates + 2, seed)
        self.memory.now()
        self.memory.forget()
        self.update(batches[:2])
        seconds = timed(lambda: self.update(batches[2:]))
        labels = [batch["labels"] for batch in batches[2:]]
        real = sum(int((label != -100).sum()) for label in labels)
        return {
            "seconds": seconds,
            "tokens": real,
            "padding": 1 - real / sum(label.numel() for label in labels),
            "peak_mb": self.memory.peak() - self.before,
        }

    def batches(self, tokens: int, number: int, seed: int) -> list[dict[str, Any]]:
        """Return the first batches of an epoch. `seed` sets the order of the pairs."""
        sources, targets = self.pairs
        kind = TokenBatchSampler if self.name == "sorted" else PackedBatchSampler
        plan = list(kind(lengths_of(self.pairs), tokens, seed=seed))
        batches = []
        for rows in plan[:number]:
            batch = padded([sources[row] for row in rows], [targets[row] for row in rows])
            batch = packed(batch) if self.name == "packed" else batch
            batches.append(
                {
                    name: value.to(self.device) if torch.is_tensor(value) else value
                    for name, value in batch.items()
                }
            )
        return batches

    def update(self, batches: list[dict[str, Any]]) -> None:
        """Make one update with the batches."""
        for batch in batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
                loss = self.model(**batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
