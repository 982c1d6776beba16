"""The positions of a run's streams, saved and loaded with its checkpoints."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..configuration.errors import InputError


class StreamStates:
    """States of a process's loader workers after the batches that were trained on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start all streams at their beginning."""
        self.start: dict[int, Any] = {}  # the states that the run resumes from
        self.states: dict[int, Any] = {}
        self.before: tuple[int, dict[int, Any]] = (-1, {})  # see `begin_update`

    def begin_update(self, updates: int) -> None:
        """Keep the states before the batches of the next update, after this number of updates."""
        self.before = updates, dict(self.states)

    def batches(self, items: Iterable[tuple[Any, tuple[int, Any]]]) -> Iterator[Any]:
        """Yield the batches of a TokenBatchStream, and keep each worker's state after its batch.

        Batches before the resume are None. They are dropped here, because a trainer with
        `ignore_data_skip` does not skip them.
        """
        for batch, (worker, state) in items:
            self.states[worker] = state
            if batch is not None:
                yield batch

    def save(
        self, checkpoint: str, args: TrainingArguments, updates: int, settings: dict[str, Any]
    ) -> None:
        """Write the states of a process after this number of updates, and the settings.

        A checkpoint in the middle of an update, such as transformers' on SIGTERM, has the states
        before that update. A resumed run repeats the whole update.
        """
        begun, before = self.before
        states = before if begun == updates else self.states
        # A worker without a batch has no state, so the number of workers is saved too.
        text = json.dumps({"workers": _workers(args), "settings": settings, "states": states})
        _file(checkpoint, args.process_index).write_text(text, encoding="utf-8")

    def load(
        self, checkpoint: str, args: TrainingArguments, update: int, settings: dict[str, Any]
    ) -> None:
        """Read the states of a process, and start its streams there.

        Args:
            checkpoint: folder of the checkpoint.
            args: arguments of the run.
            update: number of updates of the checkpoint.
            settings: settings of this run that decide which rows a batch has.

        Raises:
            InputError: the checkpoint has no streams, other settings, or another number of
                processes, loader workers or accumulated batches.
        """
        processes = stream_processes(checkpoint)
        if not processes:
            raise InputError(
                f"{checkpoint} was not saved by a run on a stream: resume with the data of that "
                "run, or start a new run."
            )
        if processes != args.world_size:
            raise InputError(
                f"{checkpoint} has the streams of {processes} processes, but this run has "
                f"{args.world_size}: resume with {processes} processes."
            )
        saved = json.loads(_file(checkpoint, args.process_index).read_text(encoding="utf-8"))
        if saved["workers"] != _workers(args):
            raise InputError(
                f"{checkpoint} has the streams of {saved['workers']} loader workers, but this run "
                f"has {args.dataloader_num_workers}: resume with "
                f"dataloader_num_workers={saved['workers']}."
            )
        # Older clones saved no settings.
        for name, before in saved.get("settings", {}).items():
            if settings[name] != before:
                raise InputError(
                    f"{checkpoint} was saved with {name}={before!r}, but this run has "
                    f"{settings[name]!r}: a stream would lose or repeat rows. Resume with the "
                    "setting of the checkpoint."
                )
        accumulated = sum(state["total"] for state in saved["states"].values()) // max(update, 1)
        if update and accumulated != args.gradient_accumulation_steps:
            raise InputError(
                f"{checkpoint} was saved with gradient_accumulation_steps={accumulated}, but this "
                f"run has {args.gradient_accumulation_steps}: a stream would lose or repeat "
                "batches. Resume with the number of the checkpoint."
            )
        self.start = {int(worker): state for worker, state in saved["states"].items()}
        self.states = dict(self.start)


def stream_processes(checkpoint: str | os.PathLike) -> int:
    """Return the number of processes whose streams a checkpoint has."""
    return len(list(Path(checkpoint).glob("stream_state_*.json")))


def _workers(args: TrainingArguments) -> int:
    return max(args.dataloader_num_workers, 1)  # 0 reads in the process itself


def _file(checkpoint: str, process: int) -> Path:
    return Path(checkpoint) / f"stream_state_{process}.json"


__all__ = ["StreamStates", "stream_processes"]
