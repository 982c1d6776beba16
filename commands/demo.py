"""Open a page on this machine that translates, with scores, word links and attention.

vaswani demo runs/en-de
"""

import argparse

from .parser import CommandError, CommandParser, positive

_LAST_PORT = 65535


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("demo", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub id of a saved model with its tokenizer")
    add("--port", type=port, help="port of the page (default: the first free one from 7860)")
    return parser


def port(text: str) -> int:
    """Read the number of a port."""
    number = positive(text)
    if number > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"must be at most {_LAST_PORT}, got {number}")
    return number


port.__name__ = "integer"  # argparse names the type in its errors


def run(args: argparse.Namespace) -> None:
    """Serve the page until the program is stopped."""
    from ..configuration.extras import needs

    try:
        with needs("vaswani[demo]"):
            from ..demo.page import serve
        serve(args.model, port=args.port)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise CommandError(error) from error
