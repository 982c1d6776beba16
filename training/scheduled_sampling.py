"""Scheduled sampling for Transformers, in two passes (Mihaylova and Martins, 2019)."""

import math
from typing import Any

import torch
from torch import nn

from ..modeling.packing_vaswani import decoder_inputs
from .objective import Objective, ObjectiveError, Update

_SCHEDULES = ("linear", "exponential", "inverse_sigmoid")


class ScheduledSampling(Objective):
    """The loss (5.4) with prefixes that mix reference tokens and predicted tokens.

    A first pass without gradients predicts each target token from the reference prefix. The second
    pass reads the reference token at each position with probability epsilon, and otherwise the most
    probable token of the first pass. Its loss is the model's own. Epsilon falls with the number i
    of updates (Bengio et al., 2015):

        linear             max(floor, k - c i)
        exponential        k^i, with k <= 1
        inverse_sigmoid    k / (k + exp(i / k)), with k >= 1

    By default, epsilon falls to 1/2 at the last of the T updates of a run:

        linear             k = 1, and c = k / (2 T), also for another k
        exponential        k = 2^(-1 / T)
        inverse_sigmoid    k ln k = T

    Cost: one more forward pass per update, which holds the logits of a whole batch.

    Args:
        schedule: "linear", "exponential" or "inverse_sigmoid".
        k: k of the equations. None means the default for T.
        c: slope of the linear schedule. None means the default for T.
        floor: lowest epsilon of the linear schedule.

    Raises:
        ObjectiveError: the schedule is unknown, or a number is out of its range or belongs to
            another schedule.
    """

    translates = True

    def __init__(
        self,
        schedule: str = "inverse_sigmoid",
        k: float | None = None,
        c: float | None = None,
        floor: float = 0.0,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ObjectiveError(
                f"schedule must be one of {', '.join(_SCHEDULES)}, got {schedule!r}."
            )
        if schedule != "linear" and (c is not None or floor):
            raise ObjectiveError(
                f"c and floor belong to the linear schedule: leave them out for {schedule!r}."
            )
        self.schedule, self.k, self.c, self.floor = schedule, k, c, floor
        highest = math.inf if schedule == "inverse_sigmoid" else 1.0
        lowest = 1.0 if schedule == "inverse_sigmoid" else 0.0
        if k is not None and (not lowest <= k <= highest or math.isinf(k)):
            raise ObjectiveError(
                f"k of the {schedule} schedule must lie between {lowest:g} and {highest:g}, got "
                f"{k}."
            )
        if not ((c is None or 0 <= c < math.inf) and 0 <= floor <= 1):
            raise ObjectiveError(
                f"c must be 0 or more and floor between 0 and 1, got c={c} and floor={floor}."
            )

    def probability_of_reference_tokens(self, update: int, updates: int) -> float:
        """Return epsilon after `update` updates of a run with `updates` updates."""
        updates = max(updates, 1)
        if self.schedule == "linear":
            k = 1.0 if self.k is None else self.k
            c = k / (2 * updates) if self.c is None else self.c
            return max(self.floor, k - c * update)
        if self.schedule == "exponential":
            return 0.5 ** (update / updates) if self.k is None else self.k**update
        log_k = _log_of_default_k(updates) if self.k is None else math.log(self.k)
        # Numerator and denominator are divided by k, so that large exponentials do not overflow.
        return 1 / (1 + math.exp(min(update / math.exp(log_k) - log_k, 700.0)))

    def __call__(self, model: nn.Module, inputs: dict[str, Any], update: Update) -> torch.Tensor:
        """Compute the share of a batch in the mean loss of its update."""
        reference, unwrapped = inputs.get("decoder_input_ids"), self.unwrap(model)
        if reference is None:
            reference = decoder_inputs(unwrapped, inputs["labels"], inputs)
        epsilon = self.probability_of_reference_tokens(update.number, update.updates)
        mixed = reference
        if epsilon < 1:
            predicted = self._predictions(model, inputs, reference)
            kept = torch.rand(reference.shape, device=reference.device) < epsilon
            mixed = torch.where(kept | _starts(inputs, reference), reference, predicted)
        inputs = {**inputs, "decoder_input_ids": mixed, "num_items_in_batch": update.tokens}
        return model(**inputs, return_dict=True)["loss"]

    def _predictions(
        self, model: nn.Module, inputs: dict[str, Any], reference: torch.Tensor
    ) -> torch.Tensor:
        """Predict the token at each position from the reference tokens before it."""
        batch = {name: value for name, value in inputs.items() if name != "labels"}
        if "cu_seq_lens_q" in batch:
            batch["pad_outputs"] = False
        with torch.no_grad():
            batch |= {"decoder_input_ids": reference, "use_cache": False, "return_dict": True}
            outputs = model(**batch)
        # The first position of a row has no prediction, so `_starts` keeps its reference token.
        return outputs["logits"].argmax(dim=-1).roll(1, dims=1)


def _log_of_default_k(updates: int) -> float:
    """Solve k ln k = updates for ln k by Newton's method."""
    log_k = math.log1p(updates)  # not below the root, so that all steps go down towards it
    for _ in range(50):
        k = math.exp(log_k)
        log_k -= (k * log_k - updates) / (k * (1 + log_k))
    return log_k


def _starts(inputs: dict[str, Any], reference: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first position of each sentence, which has the start token."""
    first = torch.zeros_like(reference, dtype=torch.bool)
    boundaries = inputs.get("decoder_cu_seq_lens_q")
    if boundaries is None:
        first[:, 0] = True
    else:
        first[0, boundaries[:-1].long()] = True
    return first


__all__ = ["ScheduledSampling"]
