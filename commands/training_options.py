"""Options about the model, its training, and what a run leaves."""

import argparse
import math

from .parser import positive


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
        help="tiny or small, with training settings for CPUs and small data, or a row of the "
        "paper's Table 3: base, big, C-N2, ... (default: base)",
    )
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of VaswaniConfig that differ from the preset: --set d_model=128 dropout=0.3",
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
    add("--epochs", type=float, metavar="N", help="passes over the data, instead of --steps")
    add("--minutes", type=float, help="stop after this many minutes of training")


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
        help="train on each batch twice and pull the two predictions together (default: 0)",
    )
    add(
        "--objective",
        choices=("reinforce", "risk", "scheduled_sampling"),
        help="a training loss for a finished model (--model) in place of the likelihood",
    )
    add(
        "--objective-settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="settings of --objective: --objective-settings reward=chrf candidates=8",
    )


def add_optimizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the learning rate and of the precision (section 5.3)."""
    add = parser.add_argument_group("optimizer").add_argument
    add(
        "--warmup",
        type=positive,
        default=4000,
        metavar="N",
        help="updates of rising learning rate (default: 4000)",
    )
    add(
        "--learning-rate",
        type=float,
        help="peak learning rate (default: 1 / sqrt(d_model * warmup), section 5.3)",
    )
    add(
        "--scheduler",
        default="noam",
        help="noam, which is equation 3, or any of transformers' (default: noam)",
    )
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute in bfloat16 where it is safe; faster where the hardware has it",
    )
    add("--seed", type=int, default=42, help="default: 42")
    add(
        "--trainer",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any other Seq2SeqTrainingArguments: --trainer max_grad_norm=25 save_total_limit=2",
    )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluations and checkpoints (section 6.1)."""
    add = parser.add_argument_group("evaluations and checkpoints").add_argument
    add("--eval-steps", type=positive, default=1000, metavar="N", help="default: 1000")
    add("--save-steps", type=positive, metavar="N", help="default: --eval-steps")
    add(
        "--average",
        type=positive,
        default=1,
        metavar="N",
        help="the model is the mean of the last N checkpoints (default: 1; section 6.1: 5 or 20)",
    )
    add(
        "--patience",
        type=positive,
        metavar="N",
        help="stop after N evaluations without a better --score",
    )
    add(
        "--resume",
        nargs="?",
        const="must",
        choices=("must", "auto"),
        help="continue from the last complete checkpoint in the output folder; auto starts a new "
        "run where there is none, for launchers that restart it",
    )
