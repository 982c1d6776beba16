"""Checks of `vaswani train` that need transformers: settings, models and tokenizers."""

import argparse
import dataclasses
import os
from pathlib import Path

from huggingface_hub.utils import validate_repo_id
from transformers import Seq2SeqTrainingArguments

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.names_vaswani import complaints
from ..configuration.places_vaswani import check_folder, check_path
from ..generation.settings_vaswani import VaswaniGenerationConfig
from ..hub_cards.metadata import is_language, is_licence
from ..training.objectives import make_objective
from ..training.presets import PRESETS
from .trainer_check import SettingsError, check_trainer_arguments


def check_settings(args: argparse.Namespace) -> None:
    """Check, before data are read, what would fail later.

    Raises:
        ObjectiveError: --objective-settings are wrong.
        OSError: --model or --tokenizer cannot be loaded.
        SettingsError: a name or value is wrong. The message suggests a name.
    """
    _check_names(args)
    check_trainer_arguments(args)
    _check_outputs(args)
    _check_model_settings(args)
    if args.objective:
        make_objective(args.objective, **args.objective_settings)
    if args.model:
        check_folder(args.model)
        VaswaniConfig.from_pretrained(args.model)
    if args.tokenizer:
        check_path(args.tokenizer)
        _check_has_tokenizer(Path(args.tokenizer))


def _check_names(args: argparse.Namespace) -> None:
    """Refuse unknown names of --trainer, --generation and --preset."""
    known = {
        "trainer": [
            field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init
        ],
        "generation": [name for name in vars(VaswaniGenerationConfig()) if name[0] != "_"],
    }
    for option, names in known.items():
        if wrong := complaints(getattr(args, option), names):
            raise SettingsError(f"--{option}: {wrong}")
    presets = [*PRESETS, *VaswaniConfig.presets()]
    if wrong := complaints([args.preset], presets):
        raise SettingsError(f"--preset: {wrong} The presets are {', '.join(presets)}.")


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse entries of the card, and places, that could not be written at the end."""
    for code in args.languages or ():
        if not is_language(code):
            raise SettingsError(f"--languages takes ISO 639 codes, such as de, not {code!r}")
    if args.license and not is_licence(args.license):
        raise SettingsError(f"--license takes a name of the Hub, such as mit, not {args.license!r}")
    if args.results:
        _check_results_file(Path(args.results))
    if args.push_to_hub:
        try:
            validate_repo_id(args.push_to_hub)
        except ValueError as error:
            raise SettingsError(f"--push-to-hub: {error}") from error


def _check_model_settings(args: argparse.Namespace) -> None:
    """Refuse values of --set and --generation that no model could have, or that have no effect."""
    for name in ("vocab_size", "decoder_vocab_size"):
        if name in args.set:
            raise SettingsError(f"--set {name}: the tokenizer has this size. Pass --vocab-size")
    no_rule = args.model or args.generation.get("max_length_offset") == 0
    if "max_length" in args.generation and not no_rule:
        raise SettingsError(
            "--generation max_length has no effect, because the length of the source limits a "
            "translation: pass max_new_tokens, or max_length_offset=0 beside it"
        )
    try:
        VaswaniConfig.preset("base" if args.preset in PRESETS else args.preset, **args.set)
        generation = VaswaniGenerationConfig(**args.generation)
        if not args.model:  # otherwise the run checks them together with the model's
            generation.validate(strict=True)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error


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
