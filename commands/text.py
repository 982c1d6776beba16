"""Text files of `translate`, `score` and `align`: lines in, lines out."""

import gzip
import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..configuration.extras import needs
from ..corpora.atomic_folder import replaced_file
from .parser import CommandError

_STANDARD_INPUT = ("-", "/dev/stdin")
_BROKEN_PIPE = 141  # exit status of programs that a closed pipe ends: 128 + SIGPIPE


def lines_without_tokens(tokenizer: Any, sources: Sequence[str]) -> list[int]:
    """Return the indices of blank sources that the tokenizer encodes to no tokens at all."""
    blank = [number for number, source in enumerate(sources) if not source.strip()]
    return [number for number in blank if not tokenizer(sources[number])["input_ids"]]


def check_text(sources: Sequence[str], output: str) -> None:
    """Check, before a model is loaded, that the paths can be read and written.

    Raises:
        CommandError: a path cannot be read or written. The message names it.
        ModuleNotFoundError: the output ends in .zst, and pyarrow is not installed.
    """
    if sum(source in _STANDARD_INPUT for source in sources) > 1:
        raise CommandError("standard input cannot be both source and target: name a file for one")
    for source in sources:
        if source == "-":
            if sys.stdin is None:
                raise CommandError("standard input is closed: name an input file")
        elif Path(source).is_dir():
            raise CommandError(f"the input {source} is a folder: name a file")
        elif not Path(source).exists():
            raise CommandError(f"no such input file: {source}")
    if output == "-":
        if sys.stdout is None:
            raise CommandError("standard output is closed: name a file with --output")
        return
    if not Path(output).absolute().parent.is_dir():
        raise CommandError(f"there is no folder for the output {output}: make it first")
    if Path(output).is_dir():
        raise CommandError(f"the output {output} is a folder: name a file")
    target = Path(os.path.realpath(output))  # a link stays a link
    is_replaced = not target.exists() or (target.is_file() and not _is_standard_output(output))
    if is_replaced and not os.access(target.parent, os.W_OK):
        raise CommandError(f"the folder of the output {output} is not writable: choose another")
    if output.endswith(".zst"):
        _pyarrow()


def write_lines(lines: Iterable[str], output: str) -> None:
    """Write lines to standard output ("-") or to a file, which is replaced when it is complete.

    Names that end in .gz or .zst are compressed. After an error, the lines so far are kept in
    another file beside the output, and the output is unchanged. The output may therefore be the
    input file.
    """
    if output == "-" or _is_standard_output(output):
        _print_lines(lines)
        return
    with replaced_file(Path(output)) as partial:
        started = False
        try:
            with _opened(partial, output) as file:
                for line in lines:
                    print(line, file=file)
                    started = True
        except (Exception, KeyboardInterrupt) as error:
            if partial.is_file() and started and not isinstance(error, OSError):
                kept = partial.replace(partial.with_name(f"{Path(output).name}.partial"))
                print(f"The lines so far are in {kept}", file=sys.stderr)
            raise


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines. If a reader such as `head` closes the pipe, exit as other filters do."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output at its exit, and would complain about the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)


def _opened(path: Path, name: str) -> TextIO:
    """Open a file to write text, compressed as the ending of its final name says."""
    if name.endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8")  # type: ignore[return-value]
    if name.endswith(".zst"):
        stream = _pyarrow().output_stream(str(path), compression="zstd")
        return io.TextIOWrapper(stream, encoding="utf-8")
    return open(path, "w", encoding="utf-8")


def _pyarrow() -> Any:
    with needs("vaswani[train]"):
        import pyarrow
    return pyarrow


def _is_standard_output(path: str) -> bool:
    """Tell whether a path such as /dev/stdout is standard output."""
    return (
        sys.stdout is not None
        and os.path.exists(path)
        and os.path.samestat(os.stat(path), os.fstat(1))
    )
