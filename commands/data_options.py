"""Options about data."""

import argparse
import os

from .parser import positive, positive_number

FORMS = """Pairs of a source and a target line come in any of these forms:

    --train train.en train.de              two parallel text files
    --train pairs.tsv                      one TSV file: source, tab, target (first two columns)
    --train pairs.jsonl                    one JSONL or Parquet file
    --train ID[@CONFIG][:SPLIT]            a data set of the Hub, or a local folder of one
    --train "part-*.en" "part-*.de"        many files of one corpus, in the order of their names
    --train a.tsv=2 b.en b.de=1            several corpora, with the share of each in an epoch

Text, TSV and JSONL files may end in .gz or .zst. For JSONL, Parquet and data sets, --columns names
the two columns, for example --columns en de."""


def add_data_options(parser: argparse.ArgumentParser, training: bool = True) -> None:
    """Add the options that name the data.

    Args:
        parser: receives the options.
        training: also add the options that `prepare` does not read: --valid, --test, --stream and
            --stream-buffer.
    """
    add = parser.add_argument_group("data").add_argument
    add("--train", nargs="+", required=True, metavar="DATA", help="training pairs, see above")
    if training:
        add("--valid", nargs="+", metavar="DATA", help="pairs for evaluations during training")
        add("--test", nargs="+", metavar="DATA", help="pairs to translate and score at the end")
    add(
        "--columns",
        nargs=2,
        default=("source", "target"),
        metavar=("SOURCE", "TARGET"),
        help="columns of JSONL, Parquet and data sets (default: source target)",
    )
    add(
        "--max-length",
        type=positive,
        default=256,
        metavar="TOKENS",
        help="drop longer training pairs (default: 256)",
    )
    add_filter_options(parser)
    group = add_mixing_options(parser)
    if training:
        add_stream_options(group)


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that filter training pairs."""
    add = parser.add_argument_group("filters of training pairs").add_argument
    add(
        "--max-ratio",
        type=positive_number,
        metavar="R",
        help="drop pairs whose longer side has more than R tokens per token of the shorter side",
    )
    add(
        "--drop-empty",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="drop pairs with a blank side",
    )
    add(
        "--drop-identical",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="drop pairs with equal sides",
    )
    add(
        "--drop-duplicates",
        choices=("pairs", "source", "target"),
        help="of several equal pairs of a corpus, keep the first; source or target compares one "
        "side only",
    )
    add(
        "--scripts",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="drop pairs with letters of other scripts, one per side: --scripts Latin Cyrillic",
    )
    add(
        "--filter",
        metavar="MODULE:FUNCTION",
        help="keep pairs for which this Python function of source and target returns true",
    )
    add(
        "--skip-unreadable",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="count and drop pairs that cannot be read, instead of stopping at the first",
    )


def add_mixing_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options about several corpora and their preparation, and return their group."""
    group = parser.add_argument_group("several corpora, and their preparation")
    add = group.add_argument
    add(
        "--temperature",
        type=positive_number,
        metavar="T",
        help="share of a corpus in an epoch = (number of its pairs) to the power 1 / T "
        "(default: 1)",
    )
    add(
        "--tag",
        nargs="+",
        default=[],
        metavar="LANGUAGE",
        help="put the token >>LANGUAGE<< of the target language before each source; give one for "
        "all corpora, or one for each",
    )
    add(
        "--data-cache",
        type=os.path.expanduser,
        metavar="FOLDER",
        help="folder of prepared corpora (default: vaswani, in the cache of Hugging Face datasets)",
    )
    add(
        "--prepare-processes",
        type=positive,
        metavar="N",
        help="number of tokenising processes (default: the number of cores)",
    )
    return group


def add_stream_options(group: argparse._ArgumentGroup) -> None:
    """Add the options about data that are not prepared."""
    add = group.add_argument
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read and tokenise pairs during training, instead of preparing them before",
    )
    add(
        "--stream-buffer",
        type=positive,
        default=20_000,
        metavar="PAIRS",
        help="with --stream: number of pairs from which batches are made at a time "
        "(default: 20000)",
    )
