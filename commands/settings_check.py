"""Checks of `vaswani train` that need transformers: settings, models and tokenizers."""

import argparse
import dataclasses
import os
from pathlib import Path

import torch
from huggingface_hub.utils import validate_repo_id
from transformers import SchedulerType, Seq2SeqTrainingArguments, get_scheduler

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.errors import InputError
from ..configuration.names_vaswani import complaints
from ..configuration.places_vaswani import check_folder, check_path
from ..generation.settings_vaswani import VaswaniGenerationConfig
from ..hub_cards.metadata import is_language, is_licence
from ..training.objectives import make_objective
from ..training.presets import PRESETS

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


def check_settings(args: argparse.Namespace) -> None:
    """Check, before data are read, what would fail later.

    Raises:
        ObjectiveError: --objective-settings are wrong.
        OSError: --model or --tokenizer cannot be loaded.
        SettingsError: a name or value is wrong. The message suggests a name.
    """
    known = {
        "trainer": [
            field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init
        ],
        "generation": [name for name in vars(VaswaniGenerationConfig()) if name[0] != "_"],
    }
    for option, names in known.items():
        if wrong := complaints(getattr(args, option), names):
            raise SettingsError(f"--{option}: {wrong}")
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
    _check_scheduler(args)
    for code in args.languages or ():
        if not is_language(code):
            raise SettingsError(f"--languages takes ISO 639 codes, such as de, not {code!r}")
    if args.license and not is_licence(args.license):
        raise SettingsError(f"--license takes a name of the Hub, such as mit, not {args.license!r}")
    presets = [*PRESETS, *VaswaniConfig.presets()]
    if wrong := complaints([args.preset], presets):
        raise SettingsError(f"--preset: {wrong} The presets are {', '.join(presets)}.")
    try:
        VaswaniConfig.preset("base" if args.preset in PRESETS else args.preset, **args.set)
        generation = VaswaniGenerationConfig(**args.generation)
        if not args.model:  # otherwise the run checks them together with the model's
            generation.validate(strict=True)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error
    optimizer = str(args.trainer.get("optim", "adamw_torch"))
    if args.muon and optimizer not in ("adamw_torch", "adamw_torch_fused"):
        raise SettingsError(
            f"--muon is an optimizer too: leave out --muon or --trainer optim={optimizer}"
        )
    if args.results:
        _check_results_file(Path(args.results))
    if args.push_to_hub:
        try:
            validate_repo_id(args.push_to_hub)
        except ValueError as error:
            raise SettingsError(f"--push-to-hub: {error}") from error
    if args.objective:
        make_objective(args.objective, **args.objective_settings)
    if args.model:
        check_folder(args.model)
        VaswaniConfig.from_pretrained(args.model)
    if args.tokenizer:
        check_path(args.tokenizer)
        _check_has_tokenizer(Path(args.tokenizer))


def _check_results_file(file: Path) -> None:
    """Refuse a place where no file can be written."""
    if file.is_dir():
        raise SettingsError(f"--results {file} is a folder: name a file")
    parent = next(folder for folder in file.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise SettingsError(
            f"--results {file} cannot be written, because {parent} is not a writable folder"
        )


def _check_has_tokenizer(folder: Path) -> None:
    """Refuse a folder without the files by which transformers finds the class of a tokenizer."""
    names = ("tokenizer_config.json", "tokenizer.json", "config.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise SettingsError(f"--tokenizer {folder} holds no tokenizer: it has no {names[0]}")


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
