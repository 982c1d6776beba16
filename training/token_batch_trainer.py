"""The trainer's batches by tokens (5.1), from data sets and from streams."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Seq2SeqTrainer, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length, seed_worker
from transformers.utils import logging

from ..configuration.errors import InputError
from ..configuration.extras import needs
from ..corpora.mixing import Mixture
from ..corpora.packed_collator import PackedCollator
from ..corpora.streaming import BUFFER, TokenBatchStream, rows_of_process
from ..corpora.text_stream import TextStream
from ..corpora.token_batches import PackedBatchSampler, TokenBatchSampler
from ..corpora.token_counts import first_empty, token_counts
from .objective import Loss, Objective
from .r_drop import RDrop
from .stream_states import StreamStates

with needs("vaswani[train]"):
    import datasets

logger = logging.get_logger(__name__)

_BATCHES = "token_batches.json"  # the settings of batches, in a checkpoint
_MULTIPLE = 128  # tokens of a packed batch are a multiple of this, where a new number costs time


class TokenBatchTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer whose training batches have a budget of tokens.

    VaswaniTrainer documents and sets the fields.
    """

    max_source_tokens: int | None
    max_target_tokens: int | None
    lengths: np.ndarray | None
    drop_oversize: bool
    batching: str
    mixture: Mixture | None
    stream_buffer: int
    training_objective: Loss | None
    _streams: StreamStates
    _sentences_per_update: int | None = None

    @property
    def _has_stream(self) -> bool:
        return self.train_dataset is not None and not has_length(self.train_dataset)

    def _refuse_options_of_other_data(self) -> None:
        """Refuse `lengths` and `mixture` for a stream, and `stream_buffer` without a stream."""
        is_iterable = isinstance(self.train_dataset, IterableDataset)
        if self.max_source_tokens and is_iterable and not self._has_stream:
            raise InputError(
                f"{type(self.train_dataset).__name__} is an IterableDataset with a length, so its "
                "rows have no numbers: leave out its __len__ and pass max_steps, or use a Dataset."
            )
        if not self._has_stream:
            if self.stream_buffer != BUFFER:
                raise InputError(
                    f"stream_buffer={self.stream_buffer} needs training data without a length: "
                    "leave stream_buffer out."
                )
            return
        if self.lengths is not None:
            raise InputError(
                "lengths needs training data with a length: leave lengths out, because a stream "
                "counts the tokens of its rows."
            )
        if self.mixture is not None:
            raise InputError(
                "mixture needs training data with a length: leave mixture out, and give weights "
                "to the corpora of a TextStream instead."
            )

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of token batches, distributed over the processes in turn."""
        if self.max_source_tokens is None or self.train_dataset is None:
            return super().get_train_dataloader()
        if self._has_stream:
            return self._stream_dataloader(self.max_source_tokens)
        sampler = self._token_batch_sampler(self.max_source_tokens)
        dataset: Any = self.train_dataset
        collator = self.data_collator
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        if self.batching == "packed":
            collator = PackedCollator(collator, self._multiple_of_tokens())
        dataloader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            persistent_workers=self.args.dataloader_persistent_workers,
            **self._loader_settings(),
        )
        prepared = self.accelerator.prepare(dataloader)
        if prepared.batch_sampler is not sampler:
            # Resuming wraps the batch sampler of a process once more before it sets the epoch.
            # Accelerate then looks for `set_epoch` one level down only.
            prepared.batch_sampler.sampler = sampler
        return prepared

    def _stream_dataloader(self, max_source_tokens: int) -> DataLoader:
        """Return a loader of a stream's batches.

        Each data-parallel group and worker reads its own shards.
        """
        data = self.train_dataset
        collator = self._get_collator_with_removed_columns(self.data_collator, "training")
        if self.batching == "packed":
            collator = PackedCollator(collator, self._multiple_of_tokens())
        stream = TokenBatchStream(
            rows_of_process(data, *self._data_parallel_rank()),
            max_source_tokens,
            self.max_target_tokens,
            collator,
            data.encode if isinstance(data, TextStream) else None,
            PackedBatchSampler if self.batching == "packed" else TokenBatchSampler,
            seed=self._seed_of_data(),
            buffer=self.stream_buffer,
            states=self._streams.start,
            drop_oversize=self.drop_oversize,
        )
        return DataLoader(stream, batch_size=None, **self._loader_settings())

    def _multiple_of_tokens(self) -> int | None:
        """Return a multiple for the number of tokens in packed batches, or None for any number.

        On a CPU, a bfloat16 product with a new number of rows starts slowly in oneDNN. Other
        objectives may count the sentences of a batch, so their batches get no spare sentences.
        """
        if self.args.device.type != "cpu" or not isinstance(self.training_objective, RDrop | None):
            return None
        is_half = self.args.bf16 or getattr(self.model, "dtype", None) == torch.bfloat16
        return _MULTIPLE if is_half else None

    def _data_parallel_rank(self) -> tuple[int, int]:
        return data_parallel_rank(
            self.args.process_index, self.accelerator.num_processes, self.get_tp_size()
        )

    def _loader_settings(self) -> dict[str, Any]:
        args, workers = self.args, self.args.dataloader_num_workers
        return {
            "num_workers": workers,
            "pin_memory": args.dataloader_pin_memory,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
            "worker_init_fn": partial(seed_worker, num_workers=workers, rank=args.process_index),
        }

    def _token_batch_sampler(self, max_source_tokens: int) -> TokenBatchSampler:
        dataset: Any = self.train_dataset
        lengths = token_counts(dataset) if self.lengths is None else self.lengths
        if len(lengths) != len(dataset):
            raise InputError(
                f"lengths has {len(lengths)} sentence pairs, but the training data have "
                f"{len(dataset)}: pass one row of lengths per pair."
            )
        batches_per_update = self._batches_per_update()
        kind = PackedBatchSampler if self.batching == "packed" else TokenBatchSampler
        sampler = kind(
            lengths,
            max_source_tokens,
            self.max_target_tokens,
            seed=self._seed_of_data(),
            drop_oversize=self.drop_oversize,
            batches_per_update=batches_per_update,
            mixture=self.mixture,
        )
        if self.batching == "packed" and (row := first_empty(lengths, 0)) is not None:
            raise InputError(
                f"Row {row} of the training data, counted from 0, has no source tokens. "
                "batching='packed' needs at least an end token in each source: leave the row out."
            )
        if isinstance(self.training_objective, Objective):
            self.training_objective.check_lengths(lengths)
        is_counted = self.lengths is None or self.batching == "packed"
        if is_counted and (row := first_empty(lengths, 1)) is not None:
            raise InputError(
                f"Row {row} of the training data, counted from 0, has no labels. Token batches "
                "need at least an end token in each target: leave the row out."
            )
        self._sentences_per_update = round(
            sampler.num_sentences * batches_per_update / len(sampler)
        )
        return sampler

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the sentences of an average update. Samples per second are derived from it."""
        if self._sentences_per_update is None:
            return super().get_total_train_batch_size(args)
        return self._sentences_per_update

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.max_source_tokens and self._has_stream:
            settings = self._settings_of_batches()
            self._streams.save(output_dir, self.args, self.state.global_step, settings)
        elif self.max_source_tokens and self.is_world_process_zero():
            text = json.dumps(self._settings_of_batches())
            Path(output_dir, _BATCHES).write_text(text, encoding="utf-8")

    def _settings_of_batches(self) -> dict[str, Any]:
        """Return the settings that decide which rows a batch has."""
        names = ("max_source_tokens", "max_target_tokens", "batching", "drop_oversize")
        own = {name: getattr(self, name) for name in names} | {"seed": self._seed_of_data()}
        if own["max_target_tokens"] is None:
            own["max_target_tokens"] = own["max_source_tokens"]
        if self._has_stream:
            return own | {"stream_buffer": self.stream_buffer}
        dataset: Any = self.train_dataset
        return own | {
            "training pairs": len(dataset),
            "batches of an update": self._batches_per_update(),
        }

    def _batches_per_update(self) -> int:
        """Return the batches of an update, counted over all data-parallel groups."""
        return self._data_parallel_rank()[1] * self.args.gradient_accumulation_steps

    def _warn_of_other_batches(self, checkpoint: Path, state: TrainerState) -> None:
        """Warn about changed settings that change the batches in the rest of a resumed epoch."""
        file, epoch = checkpoint / _BATCHES, state.epoch or 0.0
        if math.isclose(epoch, round(epoch), abs_tol=1e-6) or not self.is_world_process_zero():
            return
        changes = []
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            none = {"max_source_tokens": None}
            now = self._settings_of_batches() if self.max_source_tokens else none
            changes = [
                f"was saved with {name}={before[name]}, but this run has {setting}"
                for name, setting in now.items()
                if setting != before[name]
            ]
        elif self.max_source_tokens:
            changes = ["was saved without token batches, or by an older version"]
        for change in changes:
            logger.warning(
                f"{checkpoint} {change}. If the batches differ, some pairs come twice in this "
                "epoch, and others do not come."
            )

    def _seed_of_data(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed


def data_parallel_rank(process: int, processes: int, tensor_parallel: int) -> tuple[int, int]:
    """Return the number of a process's tensor-parallel group, and the number of groups.

    Processes of a group have consecutive ranks and parts of one model, so they need the same batch.

    Args:
        process: rank of the process.
        processes: number of processes.
        tensor_parallel: number of processes in a group.
    """
    return process // tensor_parallel, processes // tensor_parallel


__all__ = ["TokenBatchTrainer", "data_parallel_rank"]
