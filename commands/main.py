"""`vaswani COMMAND ...`: choose the command, check its arguments, and run it."""

import difflib
import signal
import sys
from collections.abc import Sequence

from ..configuration import __version__
from . import align, average, card, convert, demo, prepare, score, train, translate
from .parser import CommandError

COMMANDS = {
    "train": (train, "train a model on your own pairs, or fine-tune one"),
    "prepare": (prepare, "tokenise training data ahead of time"),
    "translate": (translate, "translate lines of text"),
    "score": (score, "print log-probabilities of given translations"),
    "align": (align, "link the words of given translations"),
    "average": (average, "average the last checkpoints of a run into one model"),
    "convert": (convert, "convert a model from or to another toolkit"),
    "card": (card, "write the model card of a saved model"),
    "demo": (demo, "open a page that translates and shows attention"),
}

# Options that save memory, by command.
_MEMORY_HINTS = {
    "train": "halve --max-source-tokens (or --batch-size), and double --accumulate.",
    **dict.fromkeys(("translate", "score", "align"), "pass a smaller --batch-tokens."),
}
_INTERRUPTED = 130  # exit status of programs that Ctrl-C ends: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line. A wrong command line exits with status 2."""
    pipes_end_quietly = argv is None and hasattr(signal, "SIGPIPE")
    if pipes_end_quietly:
        # If a reader such as `head` closes the pipe of a help page, end without an error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_help_text())
        return
    if argv[0] == "--version":
        print(__version__)
        return
    name, *arguments = argv
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else "."
        sys.stderr.write(f"vaswani: {name} is unknown{hint}\nvaswani --help lists the commands.\n")
        sys.exit(2)
    command = COMMANDS[name][0]
    parser = command.make_parser()
    args = parser.parse_args(arguments)
    if pipes_end_quietly:
        # Restore Python's default; otherwise a client that disconnects would end the demo.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        _register_models()
        command.run(args)
    except KeyboardInterrupt:
        if name == "train":
            hint = "the same command with --resume auto continues from the last checkpoint."
            print(f"\n{parser.prog}: stopped; {hint}", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except (CommandError, ModuleNotFoundError) as error:  # the latter for a missing extra
        sys.exit(f"{parser.prog}: {error}")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        hint = _MEMORY_HINTS.get(name, "use a machine with more memory.")
        reason = f" ({str(error).splitlines()[0][:200]})" if str(error) else ""
        sys.exit(f"{parser.prog}: out of memory{reason}: {hint}")
    except _configuration_error() as error:
        sys.exit(f"{parser.prog}: wrong model configuration: {' '.join(str(error).split())}")


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means out of memory. torch has an error class for GPUs only."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


def _configuration_error() -> type[Exception]:
    """Return the class of errors in a model's config, imported here because the import is slow."""
    from huggingface_hub.errors import StrictDataclassError

    return StrictDataclassError


def _register_models() -> None:
    """Import torch and register the models. The arguments are checked before this slow step."""
    from transformers.utils import logging

    from .. import registration  # noqa: F401

    logging.disable_progress_bar()  # transformers draws one for each file it reads or writes


def _help_text() -> str:
    lines = [f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "vaswani COMMAND ...: the Transformer of 'Attention Is All You Need'",
            "",
            *lines,
            "",
            "vaswani COMMAND --help shows the options of a command.",
        ]
    )
