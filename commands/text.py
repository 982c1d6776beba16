"""Text files of `translate`, `score` and `align`: lines in, lines out."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..corpora.atomic_folder import replaced_file
from .parser import CommandError


def check_text(source: str, output: str) -> None:
    """Check, before a model is loaded, that the paths can be read and written.

    Raises:
        CommandError: a path cannot be read or written. The message names it.
    """
    if source != "-" and not Path(source).is_file():
        raise CommandError(f"no such input file: {source}")
    if output != "-" and not Path(output).absolute().parent.is_dir():
        raise CommandError(f"there is no folder for the output {output}: make it first")
    if Path(output).is_dir():
        raise CommandError(f"the output {output} is a folder: name a file")


def load(model: str) -> tuple[Any, Any]:
    """Load a model with its tokenizer.

    Raises:
        OSError: the model does not exist, or belongs to another toolkit.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from .. import VaswaniConfig

    # Load the configuration first, because its errors explain wrong paths and foreign models.
    VaswaniConfig.from_pretrained(model)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model, dtype="auto")
    return loaded, AutoTokenizer.from_pretrained(model)


def write_lines(lines: Iterable[str], output: str) -> None:
    """Write lines to standard output ("-") or to a file, which is replaced when it is complete.

    After an error, the lines so far are kept in another file beside the output, and the output is
    unchanged. The output may therefore be the input file.
    """
    if output == "-" or _is_standard_output(output):
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        for line in lines:
            print(line)
        sys.stdout.flush()
        return
    with replaced_file(Path(output)) as partial:
        try:
            with open(partial, "w", encoding="utf-8") as file:
                for line in lines:
                    print(line, file=file)
        except (Exception, KeyboardInterrupt) as error:
            if partial.is_file() and partial.stat().st_size and not isinstance(error, OSError):
                kept = partial.replace(partial.with_name(f"{Path(output).name}.partial"))
                print(f"The lines so far are in {kept}", file=sys.stderr)
            raise


def _is_standard_output(path: str) -> bool:
    """Tell whether a path such as /dev/stdout is standard output."""
    return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(1))
