"""The learning curve of a run as a picture: losses and the validation score by update."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_PERPLEXITIES = [mark * 10**power for power in range(6) for mark in (1, 2, 5)]


def draw_learning_curve(
    log: Sequence[Mapping[str, Any]], path: str | os.PathLike, score: str = "bleu"
) -> None:
    """Draw the training loss, the validation loss with its perplexity, and a validation score.

    The training loss is label-smoothed and under dropout (5.4), the validation loss is neither:
    the two do not meet.

    Args:
        log: a Trainer's `state.log_history`.
        path: of the picture; its suffix is the format.
        score: the evaluation metric to draw, without its "eval_".
    """
    scores = _series(log, f"eval_{score}")
    figure = Figure(figsize=(11, 4) if scores else (6, 4), layout="constrained")
    panels = figure.subplots(1, 2 if scores else 1, squeeze=False)[0]
    _plot(panels[0], _series(log, "loss"), "training (smoothed, with dropout)")
    _plot(panels[0], _series(log, "eval_loss"), "validation")
    panels[0].set(xlabel="update", ylabel="loss, nats per target token")
    if panels[0].lines:
        panels[0].legend()
        lowest, highest = panels[0].get_ylim()
        right = panels[0].secondary_yaxis("right", functions=(np.exp, _log))
        right.set_yticks([mark for mark in _PERPLEXITIES if lowest <= math.log(mark) <= highest])
        right.set_ylabel("perplexity")
    if scores:
        _plot(panels[1], scores, score)
        panels[1].set(xlabel="update", ylabel=f"validation {score}")
    figure.savefig(path, dpi=100)


def _series(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """The finite values that a log has under a name, with their updates."""
    return [
        (entry["step"], entry[name])
        for entry in log
        if name in entry and math.isfinite(entry[name])
    ]


def _log(perplexity: np.ndarray) -> np.ndarray:
    """The loss of a perplexity; matplotlib tries it on 0 and less, too."""
    return np.log(np.maximum(perplexity, 1e-9))


def _plot(panel: Axes, series: list[tuple[int, float]], label: str) -> None:
    if series:
        steps, values = zip(*series, strict=True)
        # A line through a point or two cannot be seen.
        panel.plot(steps, values, label=label, marker="." if len(series) < 30 else None)
        panel.grid(alpha=0.3)


class LearningCurve(TrainerCallback):
    """Keep "learning_curve.png" in the output folder up to date, at evaluations and at the end.

    Args:
        score: the evaluation metric to draw beside the losses, without its "eval_".
    """

    def __init__(self, score: str = "bleu") -> None:
        self.score = score

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the curve so far, in one process only."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir or "trainer_output")
            folder.mkdir(parents=True, exist_ok=True)
            draw_learning_curve(state.log_history, folder / "learning_curve.png", self.score)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the whole curve."""
        self.on_evaluate(args, state, control)


__all__ = ["LearningCurve", "draw_learning_curve"]
