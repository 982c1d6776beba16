"""The interface of training objectives: losses that VaswaniTrainer calls for each batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ..configuration.errors import InputError
from ..configuration.extras import needs

with needs("vaswani[train]"):
    from accelerate.utils import extract_model_from_parallel


class ObjectiveError(InputError):
    """An objective that is unknown, has wrong settings or cannot be computed."""


@dataclasses.dataclass(frozen=True)
class Update:
    """The update that a batch belongs to.

    Args:
        number: number of updates before this one.
        tokens: number of real target tokens in all batches of the update, over all processes.
        sentences: number of sentence pairs in all batches of the update, over all processes.
        updates: number of updates in the whole run.
    """

    number: int
    tokens: torch.Tensor | int
    sentences: torch.Tensor | int
    updates: int


# A training loss returns the share of a batch in the mean loss of its update. Its arguments are the
# model as wrapped for training, the batch with `labels`, and the update.
Loss = Callable[[nn.Module, dict[str, Any], Update], torch.Tensor]


class Objective:
    """A training loss that can check the model and the data before the first update."""

    translates = False  # whether it needs a translation model

    def prepare(self, trainer: Any) -> None:
        """Get what the loss needs from a trainer. `train` calls this before the first update.

        Raises:
            ObjectiveError: the loss cannot be computed with this model or these data.
        """

    def check_lengths(self, lengths: np.ndarray) -> None:
        """Check the (source, target) tokens of all rows, (N, 2), before the first update.

        Raises:
            ObjectiveError: the loss cannot be computed for a row.
        """

    @staticmethod
    def unwrap(model: nn.Module) -> Any:
        """Return the model without the wrappers of training."""
        return extract_model_from_parallel(model, keep_torch_compile=False)

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        raise NotImplementedError


def labels_of(inputs: dict[str, Any]) -> torch.Tensor:
    """Return the labels of a batch.

    Raises:
        ObjectiveError: the batch has none.
    """
    if "labels" not in inputs:
        raise ObjectiveError(
            f"An objective needs labels, but a batch has only {', '.join(inputs)}: add "
            "labels to the training data."
        )
    return inputs["labels"]


def sentences_of(inputs: dict[str, Any]) -> int:
    """Count the sentence pairs of a batch, padded or packed."""
    boundaries = inputs.get("decoder_cu_seq_lens_q", inputs.get("cu_seq_lens_q"))
    return len(inputs["labels"]) if boundaries is None else len(boundaries) - 1


def mean_of(total: torch.Tensor, number: torch.Tensor | int) -> torch.Tensor:
    """Divide a sum by the number of its items. The mean of no items is 0."""
    return total / torch.as_tensor(number, device=total.device).clamp(min=1)


def name_of(function: Any) -> str:
    """Return the name of a function, or of an object's class."""
    return getattr(function, "__name__", type(function).__name__)


__all__ = [
    "Loss",
    "Objective",
    "ObjectiveError",
    "Update",
    "labels_of",
    "mean_of",
    "name_of",
    "sentences_of",
]
