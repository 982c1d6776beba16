"""What a training objective is: a loss that VaswaniTrainer calls for each batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..configuration.extras import needs

with needs("vaswani[train]"):
    from accelerate.utils import extract_model_from_parallel


class ObjectiveError(ValueError):
    """An objective that is unknown, has wrong settings or cannot be computed."""


@dataclasses.dataclass(frozen=True)
class Update:
    """The update that a batch belongs to.

    Args:
        number: updates before this one.
        tokens: real target tokens of all its batches, in all processes.
        sentences: sentence pairs of all its batches, in all processes.
    """

    number: int
    tokens: torch.Tensor | int
    sentences: torch.Tensor | int


# A training loss: the share of a batch in the mean loss of its update. Arguments are the model, as
# it is wrapped for training, the batch with `labels`, and the update.
Loss = Callable[[nn.Module, dict[str, Any], Update], torch.Tensor]


class Objective:
    """A training loss that is checked before the first update."""

    def prepare(self, trainer: Any) -> None:
        """Take what the loss needs from a trainer; `train` calls this before the first update.

        Raises:
            ObjectiveError: the loss cannot be computed with this model or these data.
        """

    @staticmethod
    def unwrap(model: nn.Module) -> Any:
        """Return the model inside what training has wrapped around it."""
        return extract_model_from_parallel(model, keep_torch_compile=False)

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        raise NotImplementedError


def sentences_of(inputs: dict[str, Any]) -> int:
    """Count the sentence pairs of a batch, padded or packed."""
    boundaries = inputs.get("decoder_cu_seq_lens_q")
    return len(inputs["labels"]) if boundaries is None else len(boundaries) - 1


def over(total: torch.Tensor, number: torch.Tensor | int) -> torch.Tensor:
    """Divide a sum by the number of its items; a sum of no items is 0."""
    return total / torch.as_tensor(number, device=total.device).clamp(min=1)


__all__ = ["Loss", "Objective", "ObjectiveError", "Update", "over", "sentences_of"]
