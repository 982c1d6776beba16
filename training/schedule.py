"""The learning rate of section 5.3."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def noam_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Equation 3: d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), from step 1 on.

    Raises:
        ValueError: step, d_model or warmup_steps is less than 1.
    """
    for name, value in (("step", step), ("d_model", d_model), ("warmup_steps", warmup_steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def noam_schedule(
    optimizer: Optimizer, d_model: int, warmup_steps: int = 4000, factor: float = 1.0
) -> LambdaLR:
    """Return a schedule that sets an optimizer's learning rate to equation 3 (5.3).

    The schedule replaces the learning rate of the optimizer. Call `step` once after every
    update, with any number of processes. Do not pass the schedule to `accelerator.prepare`, which
    would step it once per process. "inverse_sqrt" of transformers is the same curve one update
    later, with a first learning rate of 0.

    Args:
        optimizer: the optimizer. The paper has Adam(betas=(0.9, 0.98), eps=1e-9).
        d_model: width of the model.
        warmup_steps: number of updates with rising learning rate.
        factor: factor of every learning rate. The paper has 1. To set the peak, pass
            peak * sqrt(d_model * warmup_steps).

    Raises:
        ValueError: d_model or warmup_steps is less than 1.
    """
    for group in optimizer.param_groups:
        # LambdaLR multiplies "initial_lr", which an earlier schedule may have left in the group.
        group["lr"] = group["initial_lr"] = factor
    return LambdaLR(optimizer, lambda updates: noam_rate(updates + 1, d_model, warmup_steps))


__all__ = ["noam_rate", "noam_schedule"]
