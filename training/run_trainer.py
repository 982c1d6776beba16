"""The trainer of `vaswani train`: batches of similar lengths, and an evaluation in file order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

from ..corpora.atomic_folder import replaced_files
from .checkpoints import run_folder
from .trainer import VaswaniTrainer


class RunTrainer(VaswaniTrainer):
    """VaswaniTrainer that evaluates in file order, so that predictions match their references.

    The strategy "group_by_length" of transformers shuffles the evaluation set too. In training, the
    strategy draws from torch's global generator. A resumed run, or another process, would draw
    another order.
    """

    _sampler: "EpochSampler | None" = None
    # The tokenizer of a separate target vocabulary. Each saved folder gets it.
    target_tokenizer: Any = None

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        run = run_folder(self.args)
        if self.target_tokenizer is None or not self.args.should_save:
            return
        # A push during training takes this folder from the run's own folder.
        for folder in {Path(output_dir or run), run}:
            with replaced_files(folder / "target_tokenizer") as partial:
                self.target_tokenizer.save_pretrained(partial)

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler:
        return SequentialSampler(eval_dataset)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.lengths is None or self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        # Without given lengths, transformers would tokenise every pair to count its tokens.
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        seed = self._seed_of_data()
        self._sampler = EpochSampler(batch, self.lengths.max(axis=1).tolist(), seed)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._sampler is not None:
            # In a resumed epoch of several processes, Accelerate does not pass the epoch on.
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)


class EpochSampler(LengthGroupedSampler):
    """Rows in groups of similar lengths, whose order depends only on the seed and the epoch."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = get_length_grouped_indices(
            self.lengths, self.batch_size, generator=generator
        )
        return iter(order)


__all__ = ["EpochSampler", "RunTrainer"]
