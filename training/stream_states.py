"""The positions of a run's streams, saved and loaded with its checkpoints."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainingArguments


class StreamStates:
    """States of a process's loader workers after the batches that were trained on."""

    def __init__(self) -> None:
        self.start: dict[int, Any] = {}  # the states that the run resumes from
        self.states: dict[int, Any] = {}

    def reset(self) -> None:
        """Start all streams at their beginning."""
        self.start, self.states = {}, {}

    def batches(self, items: Iterable[tuple[Any, tuple[int, Any]]]) -> Iterator[Any]:
        """Yield the batches of a TokenBatchStream, and keep each worker's state after its batch.

        Batches of the run before are None. Trainers with `ignore_data_skip` do not skip them.
        """
        for batch, (worker, state) in items:
            self.states[worker] = state
            if batch is not None:
                yield batch

    def save(self, checkpoint: str, args: TrainingArguments) -> None:
        """Write the states of a process if its data are a stream."""
        if self.states:
            # A worker without a batch has no state, so the number of workers is saved too.
            text = json.dumps({"workers": _workers(args), "states": self.states})
            _file(checkpoint, args.process_index).write_text(text, encoding="utf-8")

    def load(self, checkpoint: str, args: TrainingArguments) -> None:
        """Read the states of a process, and start its streams there.

        Raises:
            ValueError: the checkpoint has another number of processes or loader workers.
        """
        processes = len(list(Path(checkpoint).glob("stream_state_*.json")))
        if processes != args.world_size:
            raise ValueError(
                f"{checkpoint} has the streams of {processes} processes, but this run has "
                f"{args.world_size}: resume with {processes} processes."
            )
        saved = json.loads(_file(checkpoint, args.process_index).read_text(encoding="utf-8"))
        if saved["workers"] != _workers(args):
            raise ValueError(
                f"{checkpoint} has the streams of {saved['workers']} loader workers, but this run "
                f"has {args.dataloader_num_workers}: resume with "
                f"dataloader_num_workers={saved['workers']}."
            )
        self.start = {int(worker): state for worker, state in saved["states"].items()}
        self.states = dict(self.start)


def _workers(args: TrainingArguments) -> int:
    return max(args.dataloader_num_workers, 1)  # 0 reads in the process itself


def _file(checkpoint: str, process: int) -> Path:
    return Path(checkpoint) / f"stream_state_{process}.json"


__all__ = ["StreamStates"]
