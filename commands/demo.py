"""Open a page on this machine that translates, with scores, word links and attention.

vaswani demo runs/en-de
"""

import argparse

from .parser import CommandError, CommandParser, positive


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("demo", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub id of a saved model with its tokenizer")
    add("--port", type=positive, help="port of the page (default: the first free one from 7860)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Serve the page until the program is stopped."""
    from ..configuration.extras import needs

    try:
        with needs("vaswani[demo]"):
            from ..demo.page import serve
        serve(args.model, port=args.port)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise CommandError(error) from error
