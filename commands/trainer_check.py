"""Checks of `vaswani train` for --trainer, --scheduler and --muon."""

import argparse

import torch
from transformers import SchedulerType, get_scheduler

from ..configuration.errors import InputError
from ..configuration.names_vaswani import complaints

# Arguments of transformers' trainer that have an option of their own. --trainer would change such
# an argument for a part of the run only, or not at all.
_OWN_OPTIONS = {
    "bf16": "--bf16",
    "eval_steps": "--eval-steps",
    "gradient_accumulation_steps": "--accumulate",
    "learning_rate": "--learning-rate",
    "lr_scheduler_type": "--scheduler",
    "max_steps": "--steps",
    "num_train_epochs": "--epochs",
    "output_dir": "--output",
    "per_device_train_batch_size": "--batch-size",
    "resume_from_checkpoint": "--resume",
    "save_steps": "--save-steps",
    "seed": "--seed",
    "warmup_steps": "--warmup",
}


class SettingsError(InputError):
    """A setting is unknown or has an invalid value."""


def check_trainer_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments of transformers' trainer that contradict the command.

    Raises:
        SettingsError: names the argument and the way out.
    """
    for name in args.trainer:
        if name.endswith("_token"):
            raise SettingsError(
                f"--trainer {name} would be written into results.json, recipe.yaml and the card: "
                "log in with `hf auth login`, or set the variable HF_TOKEN"
            )
        if name in _OWN_OPTIONS:
            raise SettingsError(f"--trainer {name} has its own option: pass {_OWN_OPTIONS[name]}")
    if not args.trainer.get("predict_with_generate", True):
        raise SettingsError(
            "--trainer predict_with_generate=false: evaluations always translate, so leave it out"
        )
    if args.trainer.get("batch_eval_metrics") or not args.trainer.get(
        "eval_do_concat_batches", True
    ):
        raise SettingsError(
            "--trainer batch_eval_metrics and eval_do_concat_batches=false divide an evaluation, "
            "but scores are those of whole sets: leave them out"
        )
    if args.valid and args.trainer.get("dataloader_drop_last"):
        raise SettingsError(
            "--trainer dataloader_drop_last=true would leave sentences out of evaluations, but "
            "scores are those of whole sets: leave it out"
        )
    if args.valid and not args.trainer.get("remove_unused_columns", True):
        raise SettingsError(
            "--trainer remove_unused_columns=false would pass columns to `generate` that it does "
            "not know: leave it out"
        )
    if args.trainer.get("save_strategy") == "best" and not args.patience:
        raise SettingsError("--trainer save_strategy=best needs --patience")
    optimizer = str(args.trainer.get("optim", "adamw_torch"))
    if args.muon and optimizer not in ("adamw_torch", "adamw_torch_fused"):
        raise SettingsError(
            f"--muon is an optimizer too: leave out --muon or --trainer optim={optimizer}"
        )
    _check_scheduler(args)


def _check_scheduler(args: argparse.Namespace) -> None:
    """Build the schedule of a small optimizer, as the trainer will do for the model."""
    names = ["noam", *(kind.value for kind in SchedulerType)]
    if wrong := complaints([args.scheduler], names):
        raise SettingsError(f"--scheduler: {wrong}")
    if args.scheduler == "noam":
        return
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    specific = args.trainer.get("lr_scheduler_kwargs")
    try:
        get_scheduler(args.scheduler, optimizer, 1, 2, specific)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"--scheduler {args.scheduler}: {error} (--trainer lr_scheduler_kwargs='{{...}}' has "
            "its settings)"
        ) from error
