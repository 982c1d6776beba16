"""Warnings of `vaswani train`: options that are probably not meant as they stand."""

import argparse
from collections.abc import Sequence
from pathlib import Path

_VOCABULARY = ("--vocab-size", "--tokenizer-kind", "--space-after", "--pattern")


def swapped_sides(args: argparse.Namespace) -> list[str]:
    """Say which data have the endings of the training data's two files the other way round."""

    def endings(files: list[str]) -> list[str]:
        return [Path(file.removesuffix(".gz")).suffix for file in files]

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
    """Name the options that do nothing because a model or tokenizer brings its own."""
    given = {word.partition("=")[0] for word in words}
    idle = sorted(given.intersection(_VOCABULARY)) if args.model or args.tokenizer else []
    if args.model:
        idle += sorted(given & {"--preset"})
    owner = f"--model {args.model}" if args.model else f"--tokenizer {args.tokenizer}"
    return [f"{name} has no effect: {owner} brings its own" for name in idle]
