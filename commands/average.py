"""Average the last checkpoints of a run into one model (section 6.1).

    vaswani average runs/en-de --last 5 --output runs/en-de-averaged
    vaswani average runs/en-de/checkpoint-900 runs/en-de/checkpoint-1000 --output averaged

The paper averages the last 5 checkpoints of its base models and the last 20 of its big models. A
run keeps its last 5 checkpoints, or as many as its --average needs, so --last cannot select more.
The output folder is written completely or not at all.
"""

import argparse

from .parser import CommandError, CommandParser, positive


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("average", __doc__)
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="+",
        metavar="FOLDER",
        help="with --last: the output folder of a run; without: saved models, oldest first",
    )
    add("--last", type=positive, metavar="N", help="average the N newest checkpoints of a run")
    add("--output", "-o", required=True, metavar="FOLDER", help="new or empty folder to write")
    return parser


def run(args: argparse.Namespace) -> None:
    """Average the checkpoints, and print the new folder."""
    from ..training.averaging import average_checkpoints

    is_run = len(args.checkpoints) == 1
    checkpoints = args.checkpoints[0] if is_run else args.checkpoints
    try:
        print(average_checkpoints(checkpoints, args.output, args.last))
    except (OSError, ValueError) as error:
        raise CommandError(error) from error
