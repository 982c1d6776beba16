"""Options about the model and its training."""

import argparse
import math

from .optimizer_options import add_checkpoint_options, add_optimizer_options
from .parser import positive, positive_number


def not_negative(text: str) -> float:
    """Read a finite number of at least 0."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


not_negative.__name__ = "number"  # argparse names the type in its errors


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make or choose a model."""
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="FOLDER_OR_HUB_ID", help="fine-tune this model instead of a fresh one")
    add(
        "--preset",
        default="base",
        metavar="NAME",
        help="tiny or small, settings for CPUs and small data, or a row of the paper's Table 3: "
        "base, big, C-N2, ... (default: base); no effect with --model",
    )
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of VaswaniConfig that differ from the preset: --set d_model=128 dropout=0.3; "
        "not with --model",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of section 5."""
    add_run_length_options(parser)
    add_batch_options(parser)
    add_loss_options(parser)
    add_optimizer_options(parser)
    add_checkpoint_options(parser)


def add_run_length_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say when a run ends."""
    add = parser.add_argument_group("length of the run").add_argument
    add("--steps", type=positive, metavar="N", help="updates (default: 100000)")
    add(
        "--epochs",
        type=positive_number,
        metavar="N",
        help="passes over the data, instead of --steps",
    )
    add("--minutes", type=positive_number, help="stop after this many minutes of training")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of batches and updates (section 5.1)."""
    add = parser.add_argument_group("batches").add_argument
    add(
        "--batch-size",
        type=positive,
        default=128,
        metavar="PAIRS",
        help="sentence pairs per device and batch (default: 128)",
    )
    add(
        "--max-source-tokens",
        type=positive,
        metavar="TOKENS",
        help="padded source tokens per device and batch, instead of --batch-size (section 5.1)",
    )
    add(
        "--max-target-tokens",
        type=positive,
        metavar="TOKENS",
        help="the same for the target (default: --max-source-tokens)",
    )
    add(
        "--batching",
        choices=("sorted", "packed"),
        default="sorted",
        help="sorted: padded batches of similar lengths; packed: random sentences without padding, "
        "and --max-source-tokens counts real tokens (default: sorted)",
    )
    add(
        "--accumulate",
        type=positive,
        default=1,
        metavar="N",
        help="batches per update (default: 1)",
    )


def add_loss_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training loss."""
    add = parser.add_argument_group("loss").add_argument
    add(
        "--r-drop",
        type=not_negative,
        default=0.0,
        metavar="ALPHA",
        help="compute each batch twice with different dropout, and penalise different predictions "
        "(default: 0)",
    )
    add(
        "--objective",
        choices=("reinforce", "risk", "scheduled_sampling"),
        help="a training loss for a finished model (--model) in place of the likelihood; R-Drop is "
        "--r-drop",
    )
    add(
        "--objective-settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="settings of --objective: --objective-settings reward=chrf candidates=8",
    )
