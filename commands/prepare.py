r"""Learn the vocabulary of a run and tokenise its training data ahead of time.

    vaswani prepare --train train.en train.de --vocab-size 37000 --data-cache prepared

`vaswani train` with the same options for data and vocabulary then starts at once. --preset tiny has
--vocab-size 8000, and --preset small has 10000. On another machine, copy the data and the folder
`prepared` there, and pass --data-cache prepared. Results are stored under a hash of the data and
the options, so a changed file or option is prepared again.
"""

import argparse
import sys
from typing import Any

from .data_options import FORMS, add_data_options
from .parser import CommandError, CommandParser, seed
from .vocabulary_options import add_vocabulary_options


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("prepare", f"{__doc__}\n{FORMS}")
    add_data_options(parser, training=False)
    add_vocabulary_options(parser)
    add = parser.add_argument_group("other options of the run").add_argument
    add("--model", metavar="FOLDER_OR_HUB_ID", help="the model to fine-tune; its tokenizer is used")
    add("--seed", type=seed, default=42, help="chooses the lines of the vocabulary (default: 42)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Prepare the data, and print their folder and the pairs that were left out."""
    from transformers import AutoTokenizer

    from ..configuration.extras import needs

    with needs("vaswani[train]"):
        import datasets

    from ..configuration.places_vaswani import check_folder, check_path
    from ..training.progress import in_terminal
    from ..training.run_data import RunData

    if not in_terminal(sys.stderr):
        datasets.disable_progress_bars()

    try:
        if args.model:
            check_folder(args.model)
        elif args.tokenizer:
            check_path(args.tokenizer)
        data = RunData(args, print)
        if args.model or args.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(args.model or args.tokenizer)
        else:
            tokenizer = data.learn_vocabulary()
        pairs = data.prepare(tokenizer, _target_tokenizer(args.model, tokenizer))
    except (OSError, ModuleNotFoundError, ValueError) as error:
        raise CommandError(error) from error
    if pairs.dropped:
        print(pairs.describe_dropped())
    print(f"{pairs.kept:,} pairs are prepared in {data.cache}.")


def _target_tokenizer(model: str | None, tokenizer: Any) -> Any:
    """Load the tokenizer of a separate target vocabulary."""
    from transformers import AutoModelForSeq2SeqLM

    if model is None:
        return tokenizer
    return AutoModelForSeq2SeqLM.from_pretrained(model).target_tokenizer(tokenizer)
