"""Objectives on whole translations that a model samples: minimum risk training and REINFORCE."""

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..corpora.packed_collator import packed
from .objective import Objective, ObjectiveError, Update, over
from .rewards import Reward, reward_of, rewarded


@dataclasses.dataclass
class Candidates:
    """The translations of a batch: the reference of each sentence first, then the samples.

    Args:
        log_probs: (B, 1 + k) their log-probabilities, with gradients; 0 where there is none.
        rewards: (B, 1 + k).
        present: (B, 1 + k) marks the translations that exist: a sample may repeat another.
        likelihood: the label-smoothed loss of the references, summed over their tokens.
    """

    log_probs: torch.Tensor
    rewards: torch.Tensor
    present: torch.Tensor
    likelihood: torch.Tensor


class SequenceObjective(Objective):
    """A loss on translations that the model samples, mixed with the likelihood of the references.

        loss = likelihood * mean over tokens of (5.4) + (1 - likelihood) * mean over sentences of
        `sentence_losses`

    Edunov et al. (2018) mix in this way. Samples come from the fast search without dropout, the
    passes with gradients have dropout. Cost: an update samples k translations a sentence and learns
    from 1 + k; the logits of a batch exist. Divide `max_source_tokens` by about 1 + k.

    Args:
        reward: "bleu", "chrf", or a function (hypotheses, references) -> list of floats, which gets
            all translations of a batch at once, references included.
        candidates: k, samples a sentence.
        likelihood: weight of the likelihood, from 0 to 1.

    Raises:
        ObjectiveError: a number has no meaning, or there is no such reward.
    """

    repeats = False  # whether a sample that repeats another translation counts again
    fewest = 1  # samples that the loss needs

    def __init__(
        self, reward: str | Reward = "bleu", candidates: int = 5, likelihood: float = 0.3
    ) -> None:
        self.reward = reward_of(reward)
        if candidates != int(candidates) or candidates < self.fewest:
            raise ObjectiveError(
                f"candidates must be an integer of at least {self.fewest}, got {candidates}."
            )
        if not 0 <= likelihood <= 1:
            raise ObjectiveError(f"likelihood must be from 0 to 1, got {likelihood}.")
        self.candidates, self.likelihood = int(candidates), likelihood

    def prepare(self, trainer: Any) -> None:
        """Take the tokenizer of a trainer, and try the reward on a reference of its data.

        Raises:
            ObjectiveError: there is no tokenizer or no reference, or the reward fails.
        """
        if trainer.processing_class is None:
            raise ObjectiveError(
                "Rewards compare texts: pass the tokenizer to the trainer as processing_class."
            )
        own = self.unwrap(trainer.model)
        self.tokenizer = own.target_tokenizer(trainer.processing_class)
        first: dict[str, Any] = next(iter(trainer.train_dataset), {})
        if not len(first.get("labels", ())):
            raise ObjectiveError(
                "Rewards compare translations with references, but the first row of the training "
                "data has no labels."
            )
        reference = self._texts([[token for token in first["labels"] if token >= 0]])[0]
        rewarded(self.reward, [reference, ""], [reference, reference])

    def sentence_losses(self, candidates: Candidates) -> torch.Tensor:
        """Compute the loss of each sentence, (B,), from its translations."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        candidates = self._candidates(model, *_sentences(inputs))
        loss = over(self.sentence_losses(candidates).sum(), update.sentences)
        likelihood = over(candidates.likelihood, update.tokens)
        return self.likelihood * likelihood + (1 - self.likelihood) * loss

    def _candidates(
        self, model: nn.Module, sources: list[torch.Tensor], references: list[torch.Tensor]
    ) -> Candidates:
        """Sample translations, and compute their log-probabilities and rewards."""
        own = self.unwrap(model)
        rows = [
            [reference, *self._counted(reference, samples)]
            for reference, samples in zip(references, self._samples(own, sources), strict=True)
        ]
        sentence = torch.tensor([row for row, found in enumerate(rows) for _ in found])
        column = torch.tensor([column for found in rows for column in range(len(found))])
        targets = [target for found in rows for target in found]
        values = rewarded(
            self.reward,
            self._texts([target.tolist() for target in targets]),
            self._texts([references[row].tolist() for row in sentence]),
        )
        log_probs, likelihood = _log_probs(
            model, own, [sources[row] for row in sentence], targets, column == 0
        )
        place = (sentence.to(log_probs.device), column.to(log_probs.device))
        empty = log_probs.new_zeros(len(rows), 1 + self.candidates)
        return Candidates(
            log_probs=empty.index_put(place, log_probs),
            rewards=empty.index_put(place, log_probs.new_tensor(values)),
            present=empty.bool().index_put(place, torch.ones_like(place[0], dtype=torch.bool)),
            likelihood=likelihood,
        )

    def _counted(self, reference: torch.Tensor, samples: list[torch.Tensor]) -> list[torch.Tensor]:
        """Leave out samples that repeat the reference or another sample, if those do not count."""
        if self.repeats:
            return samples
        found = {tuple(sample.tolist()): sample for sample in samples}
        found.pop(tuple(reference.tolist()), None)
        return list(found.values())

    def _samples(self, own: Any, sources: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Sample k translations of each source, without dropout, ended as labels are."""
        ids = nn.utils.rnn.pad_sequence(sources, batch_first=True)
        lengths = torch.tensor([len(source) for source in sources], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with own.evaluating():
            sequences = own.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                num_return_sequences=self.candidates,
                num_beams=1,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                return_dict_in_generate=False,
            )[:, 1:]
        end = own.config.eos_token_id
        # The end counts as a token; what follows is padding.
        open_before = (sequences == end).cumsum(dim=1) - (sequences == end).long() == 0
        samples = [row[real] for row, real in zip(sequences, open_before, strict=True)]
        return [
            samples[first : first + self.candidates]
            for first in range(0, len(samples), self.candidates)
        ]

    def _texts(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)


class MinimumRisk(SequenceObjective):
    """Minimum risk training (Shen et al., 2016).

    The loss of a sentence is the expected risk of its candidates S, its reference among them:

        sum over y in S of Q(y) * (-reward(y)),   Q(y) = P(y)^sharpness / sum over S of P^sharpness

    Its gradient is proportional to the sharpness: at Shen et al.'s 0.005, any weight of the
    likelihood outweighs the risk. With a likelihood, Edunov et al. (2018) take a sharpness of 1.

    Args:
        reward, candidates, likelihood: those of SequenceObjective.
        sharpness: Shen et al. call it alpha.

    Raises:
        ObjectiveError: as SequenceObjective, or the sharpness is not a positive number.
    """

    def __init__(
        self,
        reward: str | Reward = "bleu",
        candidates: int = 5,
        likelihood: float = 0.3,
        sharpness: float = 0.005,
    ) -> None:
        super().__init__(reward, candidates, likelihood)
        if not 0 < sharpness < math.inf:
            raise ObjectiveError(f"sharpness must be a positive number, got {sharpness}.")
        self.sharpness = sharpness

    def sentence_losses(self, candidates: Candidates) -> torch.Tensor:
        """Compute the expected risk of each sentence: (B,)."""
        scores = self.sharpness * candidates.log_probs
        shares = scores.masked_fill(~candidates.present, -math.inf).softmax(dim=1)
        return -(shares * candidates.rewards).sum(dim=1)


class Reinforce(SequenceObjective):
    """REINFORCE with a baseline (Williams, 1992; Ranzato et al., 2016).

    The loss of a sentence has the gradient of its expected reward, estimated from k samples:

        -1/k * sum over samples y of (reward(y) - baseline(y)) * log P(y)

    The baseline of a sample is the mean reward of the others, which leaves the gradient unbiased.
    """

    repeats = True
    fewest = 2

    def sentence_losses(self, candidates: Candidates) -> torch.Tensor:
        """Compute the loss of each sentence from its samples alone: (B,)."""
        rewards, log_probs = candidates.rewards[:, 1:], candidates.log_probs[:, 1:]
        others = (rewards.sum(dim=1, keepdim=True) - rewards) / (self.candidates - 1)
        return -((rewards - others) * log_probs).mean(dim=1)


def _sentences(inputs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Take a batch, padded or packed, apart: source tokens and reference tokens by sentence."""
    flat = packed(inputs)
    sides = (("input_ids", "cu_seq_lens_q"), ("labels", "decoder_cu_seq_lens_q"))
    sources, targets = (
        flat[name][0].split(flat[boundaries].diff().tolist()) for name, boundaries in sides
    )
    references = [target[target != -100] for target in targets]
    if not all(map(len, references)):
        raise ObjectiveError("A row of the training data has no reference: its labels are empty.")
    return list(sources), references


def _log_probs(
    model: nn.Module,
    own: Any,
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    is_reference: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log P of each target, and the loss (5.4) of the references, in one forward pass."""
    pad = nn.utils.rnn.pad_sequence
    source = pad(sources, batch_first=True, padding_value=-100)
    batch = packed(
        {
            "input_ids": source.clamp(min=0),
            "attention_mask": (source != -100).long(),
            "labels": (labels := pad(targets, batch_first=True, padding_value=-100)),
            "decoder_input_ids": own.prepare_decoder_input_ids_from_labels(labels),
        }
    )
    gold = batch.pop("labels")[0]
    logits = model(**batch, use_cache=False, pad_outputs=False).logits[0]  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    at_target = logits.gather(1, gold[:, None]).squeeze(1) - logits.logsumexp(dim=1)
    lengths = torch.tensor([len(target) for target in targets], device=gold.device)
    row = torch.arange(len(targets), device=gold.device).repeat_interleave(lengths)
    log_probs = at_target.new_zeros(len(targets)).index_add(0, row, at_target)
    of_references = is_reference.to(gold.device)[row]
    likelihood = F.cross_entropy(
        logits[of_references],
        gold[of_references],
        reduction="sum",
        label_smoothing=own.config.label_smoothing,
    )
    return log_probs, likelihood


__all__ = ["Candidates", "MinimumRisk", "Reinforce", "SequenceObjective"]
