"""Options about data and vocabulary."""

import argparse

from .parser import positive

FORMS = """Pairs of a source and a target line come in any of these forms:

    --train train.en train.de              two parallel text files, plain or .gz
    --train pairs.tsv                      one TSV file: source, tab, target (first two columns)
    --train pairs.jsonl                    one JSONL file
    --train ID[@CONFIG][:SPLIT]            a data set of the Hub, or a local folder of one

JSONL records and data sets name their two columns by --columns, for example --columns en de."""


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the pairs."""
    add = parser.add_argument_group("data").add_argument
    add("--train", nargs="+", required=True, metavar="DATA", help="training pairs, see above")
    add("--valid", nargs="+", metavar="DATA", help="pairs for the loss and score of evaluations")
    add("--test", nargs="+", metavar="DATA", help="pairs that are translated and scored at the end")
    add(
        "--columns",
        nargs=2,
        default=("source", "target"),
        metavar=("SOURCE", "TARGET"),
        help="keys of JSONL records or of a data set's rows (default: source target)",
    )
    add(
        "--max-length",
        type=positive,
        default=256,
        metavar="TOKENS",
        help="drop longer training pairs (default: 256)",
    )


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
        help="what the shared vocabulary is made of (default: bpe, as in section 5.1)",
    )
    add(
        "--space-after",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="words carry the space after them, not the one before: for tokenised text",
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
        help="largest size of the vocabulary (default: 37000, section 5.1)",
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
        default=10,
        metavar="N",
        help="with --bpe-dropout, copies of the data in an epoch, each cut in its own way",
    )
