"""Muon: nearly orthogonal updates for the matrices of layers (Jordan et al., 2024).

The source is kellerjordan.github.io/posts/muon.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

# a, b and c of Jordan et al.: five times X -> aX + b(XX')X + c(XX')(XX')X brings singular values
# near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(Optimizer):
    """Muon for matrices, and AdamW for the other parameters.

    Muon replaces the momentum of a gradient by a nearly orthogonal matrix. The update of a weight
    (m, n) is 0.2 * sqrt(max(m, n)) times this orthogonal matrix. The factor makes updates about as
    large as those of Adam (Liu et al., 2025, arXiv:2502.16982, equation 4).

    Args:
        matrices: the parameters for Muon. `matrices_of` names those of a model.
        others: the parameters for AdamW, or their groups.
        lr: learning rate.
        factor: factor of the learning rate for the matrices.
        momentum: factor of the running mean of a matrix' gradients, in the form of Nesterov.
        betas, eps: settings of AdamW.
        weight_decay: share of a parameter that an update removes, times the learning rate.

    Raises:
        ValueError: a parameter for Muon is not a matrix, or is divided among processes.
    """

    def __init__(
        self,
        matrices: Iterable[Any],
        others: Iterable[Any],
        lr: float = 1e-3,
        factor: float = 1.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._adam = AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        own = {"params": list(matrices), "factor": factor, "momentum": momentum}
        groups = [own, *self._adam.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        for matrix in self.param_groups[0]["params"]:
            if matrix.dim() != 2 or hasattr(matrix, "device_mesh"):
                raise ValueError(
                    f"Muon needs whole matrices, got a {type(matrix).__name__} "
                    f"{tuple(matrix.shape)}: leave it to AdamW, or train with DDP."
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients, as every optimizer of torch does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, *others = self.param_groups
        self._update(**matrices)
        # load_state_dict replaces both attributes.
        self._adam.param_groups, self._adam.state = others, self.state
        self._adam.step()
        return loss

    def _update(
        self,
        params: list[Tensor],
        lr: float,
        factor: float,
        momentum: float,
        weight_decay: float,
        **_: Any,
    ) -> None:
        lr *= factor
        by_shape = defaultdict(list)
        for weight in params:
            if weight.grad is not None:
                by_shape[weight.shape, weight.device].append(weight)
        for (shape, _device), weights in by_shape.items():
            directions = torch.stack([self._direction(weight, momentum) for weight in weights])
            rate = lr * 0.2 * math.sqrt(max(shape))
            for weight, update in zip(weights, orthogonal(directions), strict=True):
                weight.mul_(1 - lr * weight_decay).sub_(update, alpha=rate)

    def _direction(self, weight: Tensor, momentum: float) -> Tensor:
        """Update the running mean of the gradient, and return their Nesterov mix: (m, n)."""
        gradient: Any = weight.grad
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices (B, m, n) near 1, and keep their singular vectors.

    Five Newton-Schulz iterations leave singular values between about 0.7 and 1.2 (Jordan et al.).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    # GPUs multiply bfloat16 much faster, and its precision is enough (Jordan et al.).
    matrix = matrices.bfloat16() if matrices.is_cuda else matrices
    matrix = matrix.mT if tall else matrix
    matrix = matrix / (matrix.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = matrix @ matrix.mT
        matrix = torch.baddbmm(
            matrix, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), matrix, beta=_A
        )
    return (matrix.mT if tall else matrix).to(matrices.dtype)


def matrices_of(model: nn.Module) -> list[str]:
    """Name the trainable matrices of a model's layers.

    Embeddings, the vocabulary matrix and heads are not among them (Jordan et al., 2024).
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return [
        name
        for name, weight in model.named_parameters()
        if weight.dim() == 2
        and weight.requires_grad
        and id(weight) not in embeddings
        and any(part.isdigit() for part in name.split("."))  # the number of a layer
    ]


def muon_of(
    model: nn.Module, arguments: TrainingArguments, factor: float, decaying: Iterable[str]
) -> Muon:
    """Return Muon for all trainable parameters of a model, with the settings of a trainer.

    Args:
        model: the model.
        arguments: they have the learning rate and Adam's settings.
        factor: factor of the learning rate for the matrices.
        decaying: names of the parameters that weight decay applies to.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    matrices = [trained.pop(name) for name in matrices_of(model)]
    decays = set(decaying)
    return Muon(
        matrices,
        [
            {"params": [weight for name, weight in trained.items() if name in decays]},
            {
                "params": [weight for name, weight in trained.items() if name not in decays],
                "weight_decay": 0.0,
            },
        ],
        lr=arguments.learning_rate,
        factor=factor,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        weight_decay=arguments.weight_decay,
    )


__all__ = ["Muon", "matrices_of", "muon_of", "orthogonal"]
