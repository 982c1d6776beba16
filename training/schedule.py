"""The learning rate of section 5.3."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def noam_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Equation 3: d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), the first step being 1.

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
    """Set an optimizer's learning rate to equation 3 (5.3), in place of the one it was made with.

    Call its `step` once after every update, whatever the number of processes: left out of
    `accelerator.prepare`, which would step it once per process. transformers' "inverse_sqrt" is the
    same curve one update late: its first update has a learning rate of 0.

    Args:
        optimizer: Adam(betas=(0.9, 0.98), eps=1e-9) in the paper.
        d_model: width of the model.
        warmup_steps: updates of rising learning rate.
        factor: multiplies every rate; 1 is the paper's. For a peak of your own, pass
            peak * sqrt(d_model * warmup_steps).

    Raises:
        ValueError: d_model or warmup_steps is less than 1.
    """
    for group in optimizer.param_groups:
        # What LambdaLR multiplies; "initial_lr" would be left by an earlier schedule.
        group["lr"] = group["initial_lr"] = factor
    return LambdaLR(optimizer, lambda updates: noam_rate(updates + 1, d_model, warmup_steps))


__all__ = ["noam_rate", "noam_schedule"]
