"""Warnings of `vaswani train` about options that are probably mistakes."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..corpora.names import form_of, without_compression, without_weight

_VOCABULARY = (
    *("--vocab-size", "--vocabulary-lines", "--tokenizer-kind", "--pattern"),
    *("--space-after", "--no-space-after", "--split-punctuation", "--no-split-punctuation"),
)


def swapped_sides(args: argparse.Namespace) -> list[str]:
    """Return a warning for data whose two files are in the other order than those of --train."""

    def endings(files: list[str]) -> list[str]:
        return [Path(without_compression(without_weight(file))).suffix for file in files]

    source, *target = endings(args.train)
    if len(target) != 1 or source == target[0]:
        return []
    return [
        f"--{name} {' '.join(files)} has {target[0]} as its source, but --train has {source}: "
        "swap the two files"
        for name, files in (("valid", args.valid), ("test", args.test))
        if files and endings(files) == [*target, source]
    ]


def without_effect(args: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return a warning for each option without effect, because another option decides it."""
    given = {word.partition("=")[0] for word in words}
    idle = sorted(given.intersection(_VOCABULARY)) if args.model or args.tokenizer else []
    owner = f"--model {args.model}" if args.model else f"--tokenizer {args.tokenizer}"
    warnings = [f"{name} has no effect, because {owner} has its own vocabulary" for name in idle]
    if args.model and "--preset" in given:
        warnings.append(f"--preset has no effect, because --model {args.model} has its own sizes")
    if "--preset" in given and args.recipe and args.set and "--set" not in given:
        warnings.append(
            f"--preset leaves {', '.join(args.set)} as they are, because the recipe sets them: "
            "pass --set too, or change the recipe"
        )
    named = [
        without_weight(word) for word in (*args.train, *(args.valid or ()), *(args.test or ()))
    ]
    if "--columns" in given and not any(map(_may_have_columns, named)):
        warnings.append("--columns has no effect, because text and TSV files have no columns")
    if "--batch-size" in given and args.max_source_tokens:
        warnings.append(
            "--batch-size sets the batches of evaluations only: --max-source-tokens "
            f"{args.max_source_tokens} sets those of training"
        )
    return warnings


def _may_have_columns(name: str) -> bool:
    """Tell whether data may be records: JSONL, Parquet, or a data set of the Hub or a folder."""
    return form_of(name) in ("jsonl", "parquet") or not Path(name).is_file()


def all_warm_up(args: argparse.Namespace) -> list[str]:
    """Return a warning for a run that ends before the learning rate has reached its peak."""
    if not args.steps or args.steps > args.warmup or args.warmup == 1:
        return []
    return [
        f"--steps {args.steps} ends inside the warm-up of {args.warmup} updates: set --warmup "
        f"{max(args.steps // 10, 1)}, or train longer"
    ]


def untrained(args: argparse.Namespace) -> list[str]:
    """Return a warning for an objective that learns from translations of an untrained model."""
    if args.model or args.objective not in ("risk", "reinforce"):
        return []
    return [
        f"--objective {args.objective} learns from the model's own translations, but this model is "
        "not trained yet: train it without --objective first, and then pass it as --model"
    ]
