"""The progress line of a run, and callbacks that end a run or evaluate at its end."""

import math
import sys
import time
from typing import Any, TextIO

import torch
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .perplexity import perplexity_of

_SECONDS_BETWEEN_LINES = 1.0


def in_terminal(stream: TextIO | None) -> bool:
    """Tell whether a standard stream is a terminal. A closed stream is None."""
    return stream is not None and stream.isatty()


class ProgressLine(TrainerCallback):
    """Show update, loss and minutes left in one line, and one more line per evaluation.

    In a terminal, the progress line is overwritten. A log file gets a line per evaluation, or per
    checkpoint if the run has no evaluation.

    Args:
        score: the evaluation metric to show, without the prefix "eval_".
        minutes: time limit of the run, or None.
    """

    def __init__(self, score: str = "bleu", minutes: float | None = None) -> None:
        self.score, self.minutes = score, minutes
        self.loss = math.nan
        self.first_step, self.started, self.shown = 0, time.monotonic(), -math.inf

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.first_step, self.started = state.global_step, time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the last loss."""
        self.loss = (logs or {}).get("loss", self.loss)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Overwrite the progress line, at most once a second."""
        now = time.monotonic()
        if not state.is_world_process_zero or not in_terminal(sys.stdout):
            return
        if now - self.shown >= _SECONDS_BETWEEN_LINES:
            self.shown = now
            _write(f"\r\033[K{self._line(state)}")

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write a line per checkpoint into the log file of a run without evaluation."""
        in_file = not in_terminal(sys.stdout)
        if state.is_world_process_zero and in_file and args.eval_strategy == "no":
            _write(f"{self._line(state)}\n")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the line of an evaluation."""
        if not state.is_world_process_zero:
            return
        figures = [f"update {self._position(state)}"]
        if (loss := (metrics or {}).get("eval_loss")) is not None:
            figures.append(f"validation loss {loss:.3f}, perplexity {perplexity_of(loss):.2f}")
        if (score := (metrics or {}).get(f"eval_{self.score}")) is not None:
            figures.append(f"{self.score} {score:.2f}")
        start = "\r\033[K" if in_terminal(sys.stdout) else ""
        _write(f"{start}{', '.join(figures)}, {self._left(state)} left\n")

    def _line(self, state: TrainerState) -> str:
        loss = "" if math.isnan(self.loss) else f", loss {self.loss:.3f}"
        return f"update {self._position(state)}{loss}, {self._left(state)} left"

    def _position(self, state: TrainerState) -> str:
        return f"{state.global_step:,} of {state.max_steps:,}"

    def _left(self, state: TrainerState) -> str:
        """Estimate the remaining time from the updates so far."""
        elapsed = time.monotonic() - self.started
        done = max(state.global_step - self.first_step, 1)
        seconds = elapsed / done * (state.max_steps - state.global_step)
        if self.minutes is not None:
            seconds = min(seconds, self.minutes * 60 - elapsed)
        return f"{max(seconds, 0) / 60:.0f} min"


def _write(text: str) -> None:
    if sys.stdout is None:  # it was closed
        return
    sys.stdout.write(text)
    sys.stdout.flush()


class EvaluateAtEnd(TrainerCallback):
    """Log and evaluate after the last update, so that the learning curve includes it."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a log and an evaluation after the last update."""
        if state.global_step >= state.max_steps or control.should_training_stop:
            control.should_log = True
            # With the strategy "epoch", transformers evaluates after the last update anyway.
            control.should_evaluate = args.eval_strategy == "steps"


class StopWithoutProgress(EarlyStoppingCallback):
    """Early stopping of transformers that also ends a resumed run if it had already stopped."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the number of evaluations without progress from the checkpoint, and check it."""
        super().on_train_begin(args, state, control, **kwargs)
        states: Any = state.stateful_callbacks or {}
        saved = states.get(type(self).__name__, {}).get("attributes", {})
        counter = saved.get("early_stopping_patience_counter", 0)
        self.early_stopping_patience_counter = counter
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


class StopAfter(TrainerCallback):
    """Stop training after a number of minutes."""

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.start = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if the time is up in any process."""
        late = torch.tensor(float(time.monotonic() - self.start > self.seconds), device=args.device)
        if args.world_size > 1:
            # Clocks differ between processes. If one stopped alone, the others would wait for it.
            torch.distributed.all_reduce(late)
        if late > 0:
            control.should_training_stop = True
            # --average and --resume need a last checkpoint. transformers saves it only after the
            # last planned update.
            control.should_save = args.save_strategy != "no"


__all__ = ["EvaluateAtEnd", "ProgressLine", "StopAfter", "StopWithoutProgress", "in_terminal"]
