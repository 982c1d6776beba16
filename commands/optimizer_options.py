"""Options about the optimizer, evaluations and checkpoints."""

import argparse

from .parser import positive, positive_number, seed


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
        type=positive_number,
        help="peak learning rate (default: 1 / sqrt(d_model * warmup), section 5.3)",
    )
    add(
        "--scheduler",
        default="noam",
        help="noam, which is equation 3, or any of transformers' (default: noam; inverse_sqrt with "
        "--preset tiny and small)",
    )
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute in bfloat16, and keep weights, optimizer and loss in float32",
    )
    add(
        "--muon",
        nargs="?",
        type=positive_number,
        const=1.0,
        metavar="FACTOR",
        help="train the matrices of layers with Muon, at FACTOR times the learning rate (1 without "
        "a number), and everything else with AdamW",
    )
    add("--seed", type=seed, default=42, help="default: 42")
    add(
        "--trainer",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="Seq2SeqTrainingArguments that have no option of their own: --trainer "
        "max_grad_norm=25 save_total_limit=20",
    )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluations and checkpoints (section 6.1)."""
    add = parser.add_argument_group("evaluations and checkpoints").add_argument
    add(
        "--eval-steps",
        type=positive,
        default=1000,
        metavar="N",
        help="updates between evaluations (default: 1000)",
    )
    add(
        "--save-steps",
        type=positive,
        metavar="N",
        help="updates between checkpoints (default: --eval-steps)",
    )
    add(
        "--average",
        type=positive,
        default=1,
        metavar="N",
        help="the model is the mean of the last N checkpoints (default: 1; section 6.1: 5 or 20); "
        "a run keeps max(N, 5) checkpoints",
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
        help="continue from the last complete checkpoint in the output folder, or start a new run "
        "if the folder has none; without auto, the folder must exist",
    )
