"""Seq2SeqTrainer with the paper's batches (section 5.1)."""

from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, TrainingArguments
from transformers.trainer_utils import has_length, seed_worker

from .batching import TokenBatchSampler


class VaswaniTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer whose training batches are of so many tokens, not sentences (section 5.1).

    With `max_source_tokens=None` it is Seq2SeqTrainer; otherwise `per_device_train_batch_size` and
    `train_sampling_strategy` play no part in training. The budgets hold for each batch of each
    process; batches of all processes and `gradient_accumulation_steps` make an update. Training
    resumes in the middle of an epoch with the batches that the uninterrupted run would have had,
    with one and with several processes.

    Args:
        *args, **kwargs: those of Seq2SeqTrainer. Batches are shuffled by `data_seed`, or `seed`.
        max_source_tokens, max_target_tokens, drop_oversize: those of TokenBatchSampler.
        lengths: (source, target) tokens of every training pair, of shape (N, 2). None counts them
            in the columns `input_ids` and `labels`. A collator that pads to a multiple keeps the
            budgets if these lengths are rounded up to it.

    Raises:
        ValueError: `max_target_tokens` is given alone; `lengths` does not match the training
            data; these have no length or lack the two columns. All that TokenBatchSampler raises.
    """

    def __init__(
        self,
        *args: Any,
        max_source_tokens: int | None = None,
        max_target_tokens: int | None = None,
        lengths: np.ndarray | None = None,
        drop_oversize: bool = False,
        **kwargs: Any,
    ) -> None:
        if max_source_tokens is None and max_target_tokens is not None:
            raise ValueError("max_target_tokens needs max_source_tokens: give both.")
        super().__init__(*args, **kwargs)
        self.max_source_tokens = max_source_tokens
        self.max_target_tokens = max_target_tokens
        self.lengths = lengths
        self.drop_oversize = drop_oversize
        self._sentences_per_update: int | None = None

    def get_train_dataloader(self) -> DataLoader:
        """Load batches of at most so many tokens, dealt out to the processes in turn."""
        if self.max_source_tokens is None or self.train_dataset is None:
            return super().get_train_dataloader()
        sampler = self._token_batch_sampler(self.max_source_tokens)
        dataset, collator = self.train_dataset, self.data_collator
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        workers = self.args.dataloader_num_workers
        dataloader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            in_order=self.args.dataloader_in_order,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=self.args.process_index),
        )
        prepared = self.accelerator.prepare(dataloader)
        if prepared.batch_sampler is not sampler:
            # Resuming wraps the process's share of the batches once more before it sets the epoch;
            # Accelerate then looks no deeper than for a sampler of that share.
            prepared.batch_sampler.sampler = sampler
        return prepared

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Sentences of an average update, from which samples per second are reported."""
        if self._sentences_per_update is None:
            return super().get_total_train_batch_size(args)
        return self._sentences_per_update

    def _token_batch_sampler(self, max_source_tokens: int) -> TokenBatchSampler:
        if not has_length(self.train_dataset):
            raise ValueError(
                "Batches by tokens need training data of known length: set max_source_tokens=None "
                "for an iterable data set."
            )
        lengths = _token_counts(self.train_dataset) if self.lengths is None else self.lengths
        if len(lengths) != len(self.train_dataset):
            raise ValueError(
                f"lengths are of {len(lengths)} sentence pairs, but the training data have "
                f"{len(self.train_dataset)}."
            )
        batches_per_update = self.accelerator.num_processes * self.args.gradient_accumulation_steps
        sampler = TokenBatchSampler(
            lengths,
            max_source_tokens,
            self.max_target_tokens,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_oversize=self.drop_oversize,
            batches_per_update=batches_per_update,
        )
        self._sentences_per_update = round(
            sampler.num_sentences * batches_per_update / len(sampler)
        )
        return sampler


def _token_counts(dataset: Any) -> np.ndarray:
    """Count the tokens of `input_ids` and `labels` in every row: (N, 2).

    Raises:
        ValueError: a column is missing.
    """
    columns = ("input_ids", "labels")
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        missing = [column for column in columns if column not in dataset.column_names]
        if missing:
            raise ValueError(
                f"The training data have no column {missing[0]!r} but "
                f"{', '.join(map(repr, dataset.column_names))}: tokenize them, or pass lengths."
            )
        tables = dataset.select_columns(list(columns)).with_format("arrow").iter(100_000)
        counts = [
            np.stack([pyarrow.compute.list_value_length(table[name]) for name in columns], axis=1)
            for table in tables
        ]
        return np.concatenate([np.empty((0, 2), dtype=np.int64), *counts])
    try:
        return np.array([[len(row[name]) for name in columns] for row in dataset])
    except KeyError as error:
        raise ValueError(
            f"A row of the training data has no {error.args[0]!r}: tokenize them, or pass lengths."
        ) from error


__all__ = ["VaswaniTrainer"]
