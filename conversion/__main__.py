"""Convert models of other toolkits to this package, and back.

    python -m vaswani.conversion fairseq checkpoint_best.pt out/ --source-dict dict.en.txt
    python -m vaswani.conversion to-ctranslate2 runs/en-de out/ --quantization int8

`python -m vaswani.conversion CONVERTER --help` explains a converter and its options.
"""

import argparse
import sys
from pathlib import Path

from ..training.atomic_folder import refuse_existing
from .converter import SUMMARIES, find
from .errors import ConversionError


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vaswani.conversion",
        description=__doc__,
        epilog="converters:\n"
        + "\n".join(f"  {name:<16} {summary}" for name, summary in SUMMARIES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("converter", choices=SUMMARIES, metavar="CONVERTER")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    given = parser.parse_args(argv)
    converter = find(given.converter)
    own_parser = argparse.ArgumentParser(
        prog=f"{parser.prog} {given.converter}",
        description=converter.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    converter.add_arguments(own_parser)
    own_parser.add_argument(
        "output", metavar="OUTPUT", help="folder to write, which must not exist"
    )
    arguments = vars(own_parser.parse_args(given.arguments))
    try:
        refuse_existing(Path(arguments["output"]))  # before any work
        converter.convert(**arguments)
    except (ConversionError, OSError) as error:
        sys.exit(f"{own_parser.prog}: {error}")


if __name__ == "__main__":
    main()
