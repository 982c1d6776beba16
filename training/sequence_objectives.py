"""Objectives on whole translations that a model samples: minimum risk training and REINFORCE."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

from ..corpora.packed_collator import packed
from ..corpora.token_batches import is_whole
from ..corpora.token_counts import counts_fast, first_empty, token_counts
from ..generation.limits_vaswani import length_limits, length_rule, real_tokens
from ..generation.settings_vaswani import VaswaniGenerationConfig
from .objective import Objective, ObjectiveError, Update, mean_of
from .rewards import Reward, checked_rewards, reward_of

logger = logging.get_logger(__name__)

_LEAST_SHARPNESS_OF_A_MIXTURE = 0.1


@dataclasses.dataclass
class Candidates:
    """The translations of a batch: the reference of each sentence first, then the samples.

    Args:
        log_probs: (B, 1 + k) log-probabilities with gradients. Missing translations have 0.
        rewards: (B, 1 + k) rewards.
        present: (B, 1 + k) mask of the translations. If repeated samples were removed, False fills
            the end of the row.
        likelihood: the label-smoothed loss of the references, summed over their tokens. None if its
            weight is 0.
    """

    log_probs: torch.Tensor
    rewards: torch.Tensor
    present: torch.Tensor
    likelihood: torch.Tensor | None


class SequenceObjective(Objective):
    """A loss on translations that the model samples, mixed with the likelihood of the references.

        loss = likelihood * mean over tokens of (5.4) + (1 - likelihood) * mean over sentences of
        `sentence_losses`

    This mixture is that of Edunov et al. (2018). Samples come from the fast search without dropout,
    and the passes with gradients have dropout. Cost: an update samples k translations per sentence
    and learns from 1 + k. The logits of a whole batch are in memory, so divide `max_source_tokens`
    by about 1 + k.

    Args:
        reward: "bleu", "chrf", or a function (hypotheses, references) -> list of floats, also by
            its name as "module:function". The function gets all translations of a batch at once,
            including the references. Both lists are decoded from tokens, so unknown words are
            missing. `train` also calls it once before the first update.
        candidates: k, the number of samples per sentence.
        likelihood: weight of the likelihood, from 0 to 1.
        reward_processes: number of worker processes that compute the reward, each for an equal part
            of the translations of a batch; 0 computes it in the process that trains.
        target_tokenizer: decodes the target. None takes the trainer's `processing_class`, or the
            folder `target_tokenizer` beside its files.

    Raises:
        ObjectiveError: a number is out of range, or the reward is unknown.
    """

    translates = True
    repeats = False  # whether a sample that repeats another translation counts again
    min_candidates = 1

    def __init__(
        self,
        reward: str | Reward = "bleu",
        candidates: int = 5,
        likelihood: float = 0.3,
        reward_processes: int = 0,
        target_tokenizer: Any = None,
    ) -> None:
        self.reward = reward_of(reward, reward_processes)
        if not is_whole(candidates, self.min_candidates):
            raise ObjectiveError(
                f"candidates must be an integer of at least {self.min_candidates}, got "
                f"{candidates!r}."
            )
        if not _is_number(likelihood) or not 0 <= likelihood <= 1:
            raise ObjectiveError(f"likelihood must be a number from 0 to 1, got {likelihood!r}.")
        self.candidates, self.likelihood = int(candidates), likelihood
        self.reward_processes = reward_processes
        if target_tokenizer is not None and not hasattr(target_tokenizer, "batch_decode"):
            raise ObjectiveError(f"target_tokenizer must be a tokenizer, got {target_tokenizer!r}.")
        self.target_tokenizer = target_tokenizer

    def prepare(self, trainer: Any) -> None:
        """Get the tokenizer of a trainer, and test the reward on a reference of its data.

        Raises:
            ObjectiveError: there is no tokenizer, no end token or no reference, the reward fails,
                or no process has the whole weights.
        """
        if trainer.train_dataset is None:
            return  # `train` reports missing data
        if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():
            raise ObjectiveError(
                "Sampling needs the whole weights in each process, but FSDP and ZeRO-3 divide "
                "them: train with DDP or ZeRO-2."
            )
        if trainer.get_tp_size() > 1:
            raise ObjectiveError(
                "With tensor parallelism, the processes of one model would draw different samples: "
                "train with DDP or ZeRO-2."
            )
        if trainer.processing_class is None and self.target_tokenizer is None:
            raise ObjectiveError(
                "Rewards compare texts: pass the tokenizer to the trainer as processing_class."
            )
        unwrapped = self.unwrap(trainer.model)
        if unwrapped.config.eos_token_id is None:
            raise ObjectiveError("Samples need an end token: set model.config.eos_token_id.")
        self.tokenizer = self.target_tokenizer or unwrapped.target_tokenizer(
            trainer.processing_class
        )
        rows = iter(trainer.train_dataset)
        if rows is not trainer.train_dataset:  # a generator would lose its first row
            self._test_reward(next(rows, {}))
        if trainer.max_source_tokens is None:
            # Otherwise the sampler of token batches checks the lengths, which it counts anyway.
            known = trainer.lengths
            if known is None and counts_fast(trainer.train_dataset):
                known = token_counts(trainer.train_dataset)
            if known is not None:
                self.check_lengths(known)

    def _test_reward(self, row: dict[str, Any]) -> None:
        """Reward the reference of a row, and an empty text."""
        labels = row.get("labels")
        if labels is None or not len(labels):
            raise ObjectiveError(
                "Rewards compare translations with references, but the first row of the training "
                "data has no labels."
            )
        reference = self._texts([[token for token in labels if token >= 0]])[0]
        checked_rewards(self.reward, [reference, ""], [reference, reference])

    def check_lengths(self, lengths: np.ndarray) -> None:
        """Refuse data with an empty source or reference.

        Raises:
            ObjectiveError: a row has none. The message names the first such row.
        """
        for side, name in enumerate(("source", "reference")):
            if (row := first_empty(lengths, side)) is not None:
                raise ObjectiveError(
                    f"Row {row} of the training data, counted from 0, has no {name}. Sampled "
                    "translations need a source and a reference with at least an end token: "
                    "leave the row out."
                )

    def sentence_losses(self, candidates: Candidates) -> torch.Tensor:
        """Compute the loss of each sentence, (B,), from its translations."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        try:
            candidates = self._candidates(model, *_sentences(inputs))
        except ObjectiveError as error:
            raise ObjectiveError(f"Update {update.number + 1}: {error}") from error
        loss = mean_of(self.sentence_losses(candidates).sum(), update.sentences)
        if candidates.likelihood is None:
            return loss
        likelihood = mean_of(candidates.likelihood, update.tokens)
        return self.likelihood * likelihood + (1 - self.likelihood) * loss

    def _candidates(
        self, model: nn.Module, sources: list[torch.Tensor], references: list[torch.Tensor]
    ) -> Candidates:
        """Sample translations, and compute their log-probabilities and rewards."""
        unwrapped = self.unwrap(model)
        rows = [
            [reference, *self._counted(reference, samples)]
            for reference, samples in zip(
                references, self._samples(unwrapped, sources), strict=True
            )
        ]
        sentence = torch.tensor([row for row, found in enumerate(rows) for _ in found])
        column = torch.tensor([column for found in rows for column in range(len(found))])
        targets = [target for found in rows for target in found]
        values = checked_rewards(
            self.reward,
            self._texts([target.tolist() for target in targets]),
            self._texts([references[row].tolist() for row in sentence]),
        )
        log_probs, likelihood = _log_probs(
            model,
            unwrapped,
            [sources[row] for row in sentence],
            targets,
            is_reference=column == 0 if self.likelihood else None,
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
        """Return the samples that count, without repeated translations unless `repeats` is set."""
        if self.repeats:
            return samples
        found = {tuple(sample.tolist()): sample for sample in samples}
        found.pop(tuple(reference.tolist()), None)
        return list(found.values())

    def _samples(self, unwrapped: Any, sources: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Sample k translations of each source from P(y|x). They end as labels do.

        The samples have no dropout. Only the length limits of the model's generation settings
        count.
        """
        ids = nn.utils.rnn.pad_sequence(sources, batch_first=True)
        lengths = torch.tensor([len(source) for source in sources])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        settings = self._sampling(unwrapped)
        with unwrapped.evaluating(), _generation_settings(unwrapped, settings):
            sequences = unwrapped.generate(
                input_ids=ids.to(unwrapped.device), attention_mask=mask.long().to(unwrapped.device)
            )
        sequences = sequences[:, 1:].cpu()  # the code below reads single tokens
        rule = length_rule(settings.max_length_factor, settings.max_length_offset)
        limits = None
        if rule is not None and settings.max_new_tokens is None:
            limits = length_limits(lengths, *rule).repeat_interleave(self.candidates)
        real = real_tokens(sequences, unwrapped.config.eos_token_id, limits)
        samples = [row[kept] for row, kept in zip(sequences, real, strict=True)]
        return [
            samples[first : first + self.candidates]
            for first in range(0, len(samples), self.candidates)
        ]

    def _sampling(self, unwrapped: Any) -> VaswaniGenerationConfig:
        """Return the settings that sample k translations from P(y|x)."""
        limits = ("max_length", "max_new_tokens", "max_length_factor", "max_length_offset")
        tokens = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
        return VaswaniGenerationConfig(
            do_sample=True,
            top_k=0,
            num_return_sequences=self.candidates,
            **{name: getattr(unwrapped.generation_config, name, None) for name in limits},
            **{name: getattr(unwrapped.config, name) for name in tokens},
        )

    def _texts(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)


class MinimumRisk(SequenceObjective):
    """Minimum risk training (Shen et al., 2016).

    The loss of a sentence is the expected risk of its candidates S, which include its reference:

        sum over y in S of Q(y) * (-reward(y)),   Q(y) = P(y)^sharpness / sum over S of P^sharpness

    The defaults of sharpness and likelihood are those of Shen et al. The gradient is proportional
    to the sharpness. To mix in the likelihood as Edunov et al. (2018) do, raise the sharpness to 1.

    Args:
        reward, candidates, likelihood, reward_processes, target_tokenizer: as for
            SequenceObjective.
        sharpness: the exponent, called alpha by Shen et al.

    Raises:
        ObjectiveError: as for SequenceObjective, or the sharpness is not a positive number.
    """

    def __init__(
        self,
        reward: str | Reward = "bleu",
        candidates: int = 5,
        likelihood: float = 0.0,
        sharpness: float = 0.005,
        reward_processes: int = 0,
        target_tokenizer: Any = None,
    ) -> None:
        super().__init__(reward, candidates, likelihood, reward_processes, target_tokenizer)
        if not _is_number(sharpness) or not 0 < sharpness < math.inf:
            raise ObjectiveError(f"sharpness must be a positive number, got {sharpness!r}.")
        self.sharpness = sharpness

    def prepare(self, trainer: Any) -> None:
        """Do the same as SequenceObjective, and warn if the likelihood outweighs the risk."""
        super().prepare(trainer)
        if self.likelihood and self.sharpness < _LEAST_SHARPNESS_OF_A_MIXTURE:
            logger.warning(
                f"The gradient of the risk is proportional to sharpness={self.sharpness}. With "
                f"likelihood={self.likelihood}, the likelihood outweighs it: set sharpness=1, or "
                "likelihood=0."
            )

    def sentence_losses(self, candidates: Candidates) -> torch.Tensor:
        """Compute the expected risk of each sentence: (B,)."""
        scores = self.sharpness * candidates.log_probs
        shares = scores.masked_fill(~candidates.present, -math.inf).softmax(dim=1)
        return -(shares * candidates.rewards).sum(dim=1)


class Reinforce(SequenceObjective):
    """REINFORCE with a baseline (Williams, 1992; Ranzato et al., 2016).

    The loss of a sentence has the gradient of its expected reward, estimated from k samples:

        -1/k * sum over samples y of (reward(y) - baseline(y)) * log P(y)

    The baseline of a sample is the mean reward of the other samples, so that the gradient is
    unbiased.
    """

    repeats = True
    min_candidates = 2

    def sentence_losses(self, candidates: Candidates) -> torch.Tensor:
        """Compute the loss of each sentence from its samples alone: (B,)."""
        rewards, log_probs = candidates.rewards[:, 1:], candidates.log_probs[:, 1:]
        baselines = (rewards.sum(dim=1, keepdim=True) - rewards) / (self.candidates - 1)
        return -((rewards - baselines) * log_probs).mean(dim=1)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)


@contextlib.contextmanager
def _generation_settings(unwrapped: Any, settings: VaswaniGenerationConfig) -> Iterator[None]:
    """Replace the generation config of a model, and of the wrappers of an adapter.

    `generate` fills settings that a call leaves at None from the model's config, so an argument
    cannot switch them off.
    """
    holders = [module for module in unwrapped.modules() if "generation_config" in vars(module)]
    kept = [module.generation_config for module in holders]
    try:
        for module in holders:
            module.generation_config = settings
        yield
    finally:
        for module, config in zip(holders, kept, strict=True):
            module.generation_config = config


def _sentences(inputs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split a padded or packed batch into the source and reference tokens of each sentence.

    The tokens are moved to the CPU at once: on a GPU, reading each sentence would wait for it.

    Raises:
        ObjectiveError: a reference is empty, or labels of -100 hide a part of it.
    """
    tensors = {
        name: value.cpu() if torch.is_tensor(value) else value for name, value in inputs.items()
    }
    flat = packed(tensors)
    sides = (("input_ids", "cu_seq_lens_q"), ("labels", "decoder_cu_seq_lens_q"))
    sources, targets = (
        flat[name][0].split(flat[boundaries].diff().tolist()) for name, boundaries in sides
    )
    references = [target[target != -100] for target in targets]
    if not all(map(len, references)):
        spare = " Or the collator adds such rows: set its pad_to_multiple_of to None."
        raise ObjectiveError(
            "A row of the training data has no reference: its labels are empty, or all are -100."
            + (spare if "cu_seq_lens_q" in inputs else "")
        )
    if any(-100 in target[: len(found)] for target, found in zip(targets, references, strict=True)):
        raise ObjectiveError(
            "A row of the training data has a label of -100 before the end of its reference. "
            "Rewards compare whole references: leave the label out."
        )
    return list(sources), references


def _log_probs(
    model: nn.Module,
    unwrapped: Any,
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    is_reference: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log P of each target, and the loss (5.4) of the references, in one forward pass.

    Without `is_reference`, there is no loss of references.
    """
    pad = nn.utils.rnn.pad_sequence
    source = pad(sources, batch_first=True, padding_value=-100)
    batch = packed(
        {
            "input_ids": source.clamp(min=0),
            "attention_mask": (source != -100).long(),
            "labels": (labels := pad(targets, batch_first=True, padding_value=-100)),
            "decoder_input_ids": unwrapped.prepare_decoder_input_ids_from_labels(labels),
        }
    )
    batch = {
        name: value.to(unwrapped.device) if torch.is_tensor(value) else value
        for name, value in batch.items()
    }
    gold = batch.pop("labels")[0]
    call = {"use_cache": False, "pad_outputs": False, "return_dict": True}
    logits = model(**batch, **call).logits[0]  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    at_target = logits.gather(1, gold[:, None]).squeeze(1) - logits.logsumexp(dim=1)
    lengths = torch.tensor([len(target) for target in targets], device=gold.device)
    row = torch.arange(len(targets), device=gold.device).repeat_interleave(lengths)
    log_probs = at_target.new_zeros(len(targets)).index_add(0, row, at_target)
    if is_reference is None:
        return log_probs, None
    of_references = is_reference.to(gold.device)[row]
    likelihood = F.cross_entropy(
        logits[of_references],
        gold[of_references],
        reduction="sum",
        label_smoothing=unwrapped.config.label_smoothing,
    )
    return log_probs, likelihood


__all__ = ["Candidates", "MinimumRisk", "Reinforce", "SequenceObjective"]
