"""transformers' training arguments from the options of `vaswani train`."""

import argparse
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments

from ..configuration.errors import InputError
from .averaging import checkpoints_to_keep
from .processes import device_settings


class RunError(InputError):
    """A run is impossible with these options or data."""


def training_arguments(options: argparse.Namespace, d_model: int) -> Seq2SeqTrainingArguments:
    """Return transformers' arguments for the paper's optimizer and schedule (5.3).

    Raises:
        RunError: transformers refuses the value of an option, or the run keeps too few checkpoints
            for --average.
    """
    length: dict[str, Any] = {"max_steps": options.steps}
    if options.epochs:
        length = {"num_train_epochs": options.epochs}
    fields = {
        **length,
        "output_dir": options.output,
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulate,
        "train_sampling_strategy": "group_by_length",
        "learning_rate": options.learning_rate or (d_model * options.warmup) ** -0.5,
        # VaswaniTrainer makes the schedule "noam" itself. "inverse_sqrt" is the nearest name.
        "lr_scheduler_type": "inverse_sqrt" if options.scheduler == "noam" else options.scheduler,
        "warmup_steps": options.warmup,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "bf16": options.bf16,
        **device_settings(),
        "ddp_find_unused_parameters": False,  # every update uses all parameters
        "seed": options.seed,
        "logging_steps": 100,
        "eval_strategy": "steps" if options.valid else "no",
        "eval_steps": options.eval_steps,
        "save_steps": options.save_steps or options.eval_steps,
        "metric_for_best_model": options.score if options.patience else None,
        "predict_with_generate": True,
        "generation_num_beams": 1,
        "report_to": "tensorboard",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    try:
        arguments = Seq2SeqTrainingArguments(**{**fields, **options.trainer})
    except (TypeError, ValueError) as error:
        raise RunError(str(error)) from error
    try:
        _check_values(arguments)
    except (TypeError, ValueError) as error:
        given = " ".join(f"{name}={value}" for name, value in options.trainer.items())
        raise RunError(f"--trainer {given}: {error}") from error
    if options.patience and arguments.eval_strategy == "no":
        raise RunError("--patience needs evaluations: leave out --trainer eval_strategy=no.")
    if "save_total_limit" not in options.trainer:
        arguments.save_total_limit = checkpoints_to_keep(arguments, max(options.average, 5))
    needed = checkpoints_to_keep(arguments, options.average)
    kept = arguments.save_total_limit or 0
    if options.average > 1 and (arguments.save_strategy == "no" or 0 < kept < needed):
        raise RunError(
            f"--average {options.average} needs as many checkpoints, but the run keeps fewer: "
            "leave out save_strategy and save_total_limit of --trainer, or pass --average 1."
        )
    return arguments


def _check_values(arguments: Seq2SeqTrainingArguments) -> None:
    """Make a small optimizer and loader, because transformers does not check these values.

    Raises:
        TypeError, ValueError: torch refuses a value.
    """
    torch.optim.AdamW(
        [torch.zeros(1, requires_grad=True)],
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        weight_decay=arguments.weight_decay,
    )
    DataLoader(cast(Any, [0]), num_workers=arguments.dataloader_num_workers)


__all__ = ["RunError", "training_arguments"]
