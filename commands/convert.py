"""Convert a model from another toolkit, or to another toolkit.

    vaswani convert fairseq model.pt out/ --source-dict dict.de.txt --target-dict dict.en.txt
    vaswani convert marian Helsinki-NLP/opus-mt-en-de out/
    vaswani convert to-ctranslate2 runs/en-de out/ --quantization int8

`vaswani convert CONVERTER --help` explains a converter and its options. A converter converts a
model exactly, or refuses it and says why.
"""

import argparse
from pathlib import Path

from ..conversion.converter import SUMMARIES, find
from .parser import CommandError, CommandParser


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("convert", __doc__)
    parser.epilog = "converters:\n" + "\n".join(
        f"  {name:<16} {summary}" for name, summary in SUMMARIES.items()
    )
    parser.add_argument("converter", choices=SUMMARIES, metavar="CONVERTER")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


def run(args: argparse.Namespace) -> None:
    """Convert."""
    from ..conversion.errors import ConversionError
    from ..corpora.atomic_folder import refuse_existing

    converter = find(args.converter)
    parser = CommandParser(f"convert {args.converter}", converter.__doc__)
    converter.add_arguments(parser)
    parser.add_argument("output", metavar="OUTPUT", help="new or empty folder to write")
    options = vars(parser.parse_args(args.arguments))
    try:
        refuse_existing(Path(options["output"]))  # before any work
        converter.convert(**options)
    except (ConversionError, OSError) as error:
        raise CommandError(f"{args.converter}: {error}") from error
