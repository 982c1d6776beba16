"""Pictures of learning curves: losses and the validation score over updates."""

import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..configuration.extras import needs

with needs("vaswani[train]"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from ..pictures.heat_maps import INK, LINE, write_figure

from .checkpoints import run_folder

logger = logging.get_logger(__name__)

_HIGHEST = 700  # loss whose exponential is a finite number
_PERPLEXITIES = [mark * 10**power for power in range(6) for mark in (1, 2, 5)]
_NAMES = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match, %"}
_TRAINING, _VALIDATION = "#9aa3b5", "#2f6db5"


def draw_learning_curve(
    log: Sequence[Mapping[str, Any]], path: str | os.PathLike, score: str = "bleu"
) -> None:
    """Draw the training loss, the validation loss with its perplexity, and a validation score.

    The two losses are not comparable: the training loss has label smoothing and dropout (5.4), the
    validation loss has neither. Losses whose exponential is infinite have no perplexities. The file
    is written completely or not at all.

    Args:
        log: a Trainer's `state.log_history`.
        path: path of the picture. Its suffix gives the format.
        score: the evaluation metric to draw, without the prefix "eval_".
    """
    scores = _series(log, f"eval_{score}")
    count = 2 if scores else 1
    figure = Figure(figsize=(5.5 * count, 3.8), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    panels = figure.subplots(1, count, squeeze=False)[0]
    losses = panels[0]
    _plot(losses, _series(log, "loss"), "training (smoothed, with dropout)", _TRAINING)
    validation = _series(log, "eval_loss")
    _plot(losses, validation, "validation", _VALIDATION)
    _style(losses, "loss, nats per target token")
    if losses.lines:
        losses.legend(frameon=False, labelcolor=INK)
    lowest, highest = losses.get_ylim()
    if validation and highest < _HIGHEST:
        right = losses.secondary_yaxis("right", functions=(np.exp, _log))
        marks = [mark for mark in _PERPLEXITIES if lowest <= math.log(mark) <= highest]
        right.set_yticks(marks, [f"{mark:,}" for mark in marks], color=INK)
        right.set_ylabel("validation perplexity", color=INK)
        right.tick_params(color=LINE)
        right.spines[:].set_color(LINE)
    if scores:
        _plot(panels[1], scores, score, _VALIDATION)
        _style(panels[1], f"validation {_NAMES.get(score, score)}")
        panels[1].set_ylim(bottom=max(0, panels[1].get_ylim()[0]))  # scores are 0 or more
    last_update = max(
        (max(line.get_xdata()) for panel in panels for line in panel.lines), default=0
    )
    for panel in panels:
        panel.set_xlim(0, 1.12 * max(last_update, 1))  # leaves room for labels on the right
    write_figure(figure, Path(path))


def _series(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return the (update, value) pairs of the finite values that a log has under `name`."""
    return [
        (entry["step"], entry[name])
        for entry in log
        if isinstance(entry.get(name), numbers.Real) and math.isfinite(entry[name])
    ]


def _log(perplexity: np.ndarray) -> np.ndarray:
    """Return the loss of a perplexity. matplotlib also calls it with numbers up to 0."""
    return np.log(np.maximum(perplexity, 1e-9))


def _plot(panel: Axes, series: list[tuple[int, float]], label: str, colour: str) -> None:
    """Draw a line. A validation line gets its last value as a label."""
    if not series:
        return
    steps, values = zip(*series, strict=True)
    # Markers make a line of one or two points visible.
    marker = "o" if len(series) < 30 else None
    panel.plot(steps, values, label=label, color=colour, marker=marker, markersize=3.5)
    if colour == _VALIDATION:
        panel.annotate(
            f"{values[-1]:.4g}",
            (steps[-1], values[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            color=colour,
            fontsize=9,
        )


def _style(panel: Axes, name: str) -> None:
    """Label the axes, and draw only the lines that help to read values."""
    panel.set_xlabel("update", color=INK)
    panel.set_ylabel(name, color=INK)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.tick_params(color=LINE, labelcolor=INK)
    panel.spines[["left", "bottom"]].set_color(LINE)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color=LINE, alpha=0.5, linewidth=0.6)
    panel.set_axisbelow(True)


class LearningCurve(TrainerCallback):
    """Redraw "learning_curve.png" in the output folder at every evaluation and at the end.

    Args:
        score: the evaluation metric to draw beside the losses, without the prefix "eval_".
    """

    def __init__(self, score: str = "bleu") -> None:
        self.score = score

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the curve so far, in the main process only."""
        if state.is_world_process_zero:
            folder = run_folder(args)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "learning_curve.png"
            try:
                draw_learning_curve(state.log_history, path, self.score)
            # Training must not end because of a picture, or of losses that no axis can have.
            except (OSError, ValueError) as error:
                logger.warning(f"{path} could not be written: {error}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the whole curve."""
        self.on_evaluate(args, state, control)


__all__ = ["LearningCurve", "draw_learning_curve"]
