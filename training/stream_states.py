"""Where the streams of a run were when a checkpoint was saved: a file for each process."""

import json
from pathlib import Path
from typing import Any


def save_stream(checkpoint: str, process: int, states: dict[int, Any]) -> None:
    """Write the states of the loader workers of a process."""
    _file(checkpoint, process).write_text(json.dumps(states), encoding="utf-8")


def load_stream(checkpoint: str, process: int, processes: int, workers: int) -> dict[int, Any]:
    """Read the states of the loader workers of a process.

    Raises:
        ValueError: the checkpoint is of another number of processes or loader workers.
    """
    saved = len(list(Path(checkpoint).glob("stream_state_*.json")))
    if saved != processes:
        raise ValueError(
            f"{checkpoint} has the streams of {saved} processes, this run has {processes}: resume "
            f"with {saved}."
        )
    text = _file(checkpoint, process).read_text(encoding="utf-8")
    states = {int(worker): state for worker, state in json.loads(text).items()}
    if len(states) != max(workers, 1):
        raise ValueError(
            f"{checkpoint} has the streams of {len(states)} loader workers, this run has "
            f"{workers}: resume with dataloader_num_workers={len(states)}."
        )
    return states


def _file(checkpoint: str, process: int) -> Path:
    return Path(checkpoint) / f"stream_state_{process}.json"


__all__ = ["load_stream", "save_stream"]
