"""The linear map to the vocabulary (section 3.4), and the loss (5.4).

Shapes: B sentences, T tokens, D = d_model, V entries of the vocabulary.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..generation.coverage_vaswani import class_replaced
from ..generation.library_vaswani import is_transformed
from .loss_vaswani import check_labels, chunked_cross_entropy, divergence

# Their hooks gather a module's weight before it is used, and change no result.
_SHARDING_LIBRARIES = ("torch.distributed.", "deepspeed.")


class LanguageHead:
    """A model whose `lm_head` maps hidden states (B, T, D) to logits (B, T, V)."""

    config: Any
    lm_head: nn.Linear
    training: bool

    def predict(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        r_drop: float | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return logits and loss. Skipped logits are None, and so is the loss without labels.

        Args:
            hidden_states: (B, T, D).
            labels: (B, T) the token to predict at each position, -100 at positions to ignore.
            num_items_in_batch: real tokens of the whole update, from the Trainer.
            logits_to_keep: number of last positions with logits (0: all), or a tensor of positions.
                The loss counts all positions.
            skip_logits: with `labels`, return no logits; None does so in training mode. This saves
                their memory, unless `lm_head` has hooks, is wrapped (LoRA), has int8 weights or is
                divided among processes. In these cases, None returns the logits.
            r_drop: weight of the divergence of two passes, as in `compute_loss`.
        """
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if labels is None:
            return self.lm_head(hidden_states[:, kept]), None
        is_plain = self._has_plain_head() and not is_transformed(hidden_states)
        if skip_logits is None:
            skip_logits = self.training and is_plain
        # The loss counts all positions. A plain head needs no logits for the loss.
        needs_logits = not is_plain or (keeps_all and not skip_logits)
        logits = self.lm_head(hidden_states) if needs_logits else None  # (B, T, V)
        loss = self.compute_loss(hidden_states, logits, labels, num_items_in_batch, r_drop)
        if skip_logits:
            return None, loss
        if logits is None:
            return self.lm_head(hidden_states[:, kept]), loss
        return logits if keeps_all else logits[:, kept], loss

    def _has_plain_head(self) -> bool:
        """Tell whether `lm_head` computes hidden_states @ weight.T + bias, and nothing else.

        Its whole weight must be in this process.
        """
        head = self.lm_head
        # Pruning and weight norm compute the weight in a hook. Accelerate's hook moves inputs.
        if (
            type(head) is not nn.Linear
            or head._parameters.keys() - {"weight", "bias"}
            or hasattr(head, "_hf_hook")
        ):
            return False
        if "forward" in vars(head) or class_replaced(type(head)) or _has_hooks(head):
            return False
        return not hasattr(head.weight, "device_mesh")  # a DTensor has a mesh

    def compute_loss(
        self,
        hidden_states: torch.Tensor,
        logits: torch.Tensor | None,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        r_drop: float | None = None,
    ) -> torch.Tensor:
        """Return the mean label-smoothed cross-entropy of real target tokens (5.4).

        Smoothing acts in training mode only. If the Trainer splits an update over batches or
        processes, it passes the update's number of target tokens as `num_items_in_batch`. Gradients
        then do not depend on the split. Without `logits` (B, T, V), the loss computes them in
        chunks, for real tokens only.

        With `r_drop`, the second half of the batch repeats the first with other dropout. The loss
        is then half of equation 4 of Liang et al. (2021): the mean loss of both halves, plus
        `r_drop` / 4 times the divergence KL(p, q) + KL(q, p) of their predictions.

        Raises:
            ValueError: a label is neither -100 nor an entry of the target vocabulary, or a batch
                for R-Drop has no two halves.
        """
        if r_drop and len(labels) > 1 and len(labels) % 2:
            raise ValueError(
                f"r_drop compares two passes over the same sentences, but {len(labels)} rows have "
                "no two halves: repeat the batch, as VaswaniTrainer(r_drop=...) does."
            )
        labels = labels.to(hidden_states.device, torch.long)
        # Adapters wrap the head. Without logits, it is a plain layer.
        size = self.lm_head.out_features if logits is None else logits.shape[-1]
        advice = "entries of the target vocabulary: mark positions to ignore by -100."
        check_labels(labels, size, advice)
        epsilon = self.config.label_smoothing if self.training else 0.0
        if logits is None:
            total = chunked_cross_entropy(
                hidden_states, self.lm_head.weight, labels, epsilon, self.lm_head.bias, r_drop
            )
        else:
            total = F.cross_entropy(
                logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
                labels.flatten().to(logits.device),
                ignore_index=-100,
                reduction="sum",
                label_smoothing=epsilon,
            )
            if r_drop is not None:
                total = total + r_drop / 2 * divergence(logits, labels.to(logits.device))
        if num_items_in_batch is None:
            num_items_in_batch = (labels != -100).sum()
        return total / torch.as_tensor(num_items_in_batch, device=total.device).clamp(min=1)


def _has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks that may change or read its results."""
    registries = (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(_SHARDING_LIBRARIES)
        for registry in registries
        for hook in registry.values()
    )


__all__ = ["LanguageHead"]
