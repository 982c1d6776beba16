"""`python -m vaswani.conversion TOOLKIT INPUT OUTPUT`: one converter after another.

    python -m vaswani.conversion fairseq checkpoint_best.pt out/ --source-dict dict.en.txt
    python -m vaswani.conversion to-ctranslate2 runs/en-de out/ --quantization int8

`python -m vaswani.conversion TOOLKIT --help` shows what a converter takes.
"""

import argparse
import importlib
import sys
from pathlib import Path

from safetensors import SafetensorError

from ..training.checkpoints import refuse_existing
from .rules import ConversionError

CONVERTERS = {
    "fairseq": "fairseq",
    "opennmt": "opennmt",
    "joeynmt": "joeynmt",
    "marian": "marian",
    "torch": "torch_transformer",
    "to-ctranslate2": "ctranslate2",
    "to-onnx": "onnx",
    "to-marian": "marian",
    "to-torch": "torch_transformer",
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m vaswani.conversion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "toolkit", choices=CONVERTERS, metavar="TOOLKIT", help=", ".join(CONVERTERS)
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="of the converter"
    )
    given = parser.parse_args(argv)
    module = importlib.import_module(f".{CONVERTERS[given.toolkit]}", __package__)
    outgoing = given.toolkit.startswith("to-")
    own = argparse.ArgumentParser(
        prog=f"{parser.prog} {given.toolkit}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    (module.add_save_arguments if outgoing else module.add_arguments)(own)
    own.add_argument("output", metavar="OUTPUT", help="folder to write, which must not exist")
    arguments = vars(own.parse_args(given.arguments))
    try:
        refuse_existing(Path(arguments["output"]))  # before any work
        (module.save if outgoing else module.convert)(**arguments)
    except (ConversionError, OSError, SafetensorError) as error:  # a full disk among them
        sys.exit(f"{own.prog}: {error}")


if __name__ == "__main__":
    main()
