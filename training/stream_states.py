"""The positions of a run's streams, saved and loaded with its checkpoints."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainingArguments


class StreamStates:
    """States of a process's loader workers after the batches that were trained on."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def remember(self, item: tuple[Any, tuple[int, Any]]) -> Any:
        """Return the batch of a TokenBatchStream item, and keep the worker's state after it."""
        batch, (worker, state) = item
        self.states[worker] = state
        return batch

    def save(self, checkpoint: str, process: int) -> None:
        """Write the states of a process if its data are a stream."""
        if self.states:
            text = json.dumps(self.states)
            _file(checkpoint, process).write_text(text, encoding="utf-8")

    def load(self, checkpoint: str, args: TrainingArguments) -> None:
        """Read the states of a process.

        Raises:
            ValueError: the checkpoint has another number of processes or loader workers.
        """
        saved = len(list(Path(checkpoint).glob("stream_state_*.json")))
        if saved != args.world_size:
            raise ValueError(
                f"{checkpoint} has the streams of {saved} processes, but this run has "
                f"{args.world_size}: resume with {saved} processes."
            )
        text = _file(checkpoint, args.process_index).read_text(encoding="utf-8")
        states = {int(worker): state for worker, state in json.loads(text).items()}
        if len(states) != max(args.dataloader_num_workers, 1):
            raise ValueError(
                f"{checkpoint} has the streams of {len(states)} loader workers, but this run has "
                f"{args.dataloader_num_workers}: resume with dataloader_num_workers={len(states)}."
            )
        self.states = states


def _file(checkpoint: str, process: int) -> Path:
    return Path(checkpoint) / f"stream_state_{process}.json"


__all__ = ["StreamStates"]
