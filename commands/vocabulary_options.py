"""Options about the vocabulary."""

import argparse

from .parser import positive


def add_vocabulary_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make or choose a tokenizer."""
    add = parser.add_argument_group("vocabulary").add_argument
    add(
        "--tokenizer", metavar="FOLDER_OR_HUB_ID", help="use this tokenizer instead of training one"
    )
    add(
        "--tokenizer-kind",
        default="bpe",
        choices=("bpe", "wordpiece", "unigram", "word", "char", "regex"),
        help="kind of the shared vocabulary (default: bpe, as in section 5.1)",
    )
    add(
        "--space-after",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="tokens include the space after a word, not before it: for tokenised text",
    )
    add(
        "--split-punctuation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="no token joins a word and punctuation (default)",
    )
    add("--pattern", help="regular expression of the tokens of kind regex (default: SMILES)")
    add(
        "--vocab-size",
        type=positive,
        default=37000,
        metavar="N",
        help="largest size of the vocabulary, without the tokens of --tag (default: 37000, 5.1)",
    )
    add(
        "--vocabulary-lines",
        type=positive,
        default=10_000_000,
        metavar="N",
        help="learn the vocabulary from about N source and target lines if there are more, chosen "
        "by --seed (default: 10 million)",
    )
    add(
        "--bpe-dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="skip merges of the training data with this probability (default: 0; often 0.1)",
    )
    add(
        "--segmentations",
        type=positive,
        default=1,
        metavar="N",
        help="with --bpe-dropout: number of times that an epoch has each pair, split differently "
        "(default: 1)",
    )
