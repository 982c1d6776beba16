"""Translate text with a saved model: lines in, translations out, in the order of the input.

    python examples/translate.py runs/multi30k < source.txt > translation.txt
    python examples/translate.py runs/multi30k source.txt.gz --output translation.txt
    python examples/translate.py runs/multi30k source.txt --nbest 4 --scores

Lines are translated in windows, sorted by length inside a window so that batches hold little
padding; memory does not grow with the file. An empty line stays empty. A file of the output's name
stays as it is until all lines are translated.
"""

import argparse
import contextlib
import gzip
import os
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import pipeline
from vaswani.training.atomic_folder import replaced_file

from vaswani import VaswaniConfig, VaswaniTranslationPipeline


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of a utf-8 file, plain or .gz; "-" is standard input.

    Exits with file and line at what is not utf-8 or not readable.
    """
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            if path == "-":
                file = sys.stdin.buffer
            else:
                file = stack.enter_context(
                    (gzip.open if path.endswith(".gz") else open)(path, "rb")
                )
            for number, line in enumerate(file, start=1):
                # A byte order mark, which some editors write, is no part of the text.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        sys.exit(f"{path}, line {number}: not utf-8 ({error})")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        sys.exit(f"{path} is damaged after line {number}: {error}")


def parse_args() -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or Hub id of a saved model with its tokenizer")
    parser.add_argument(
        "input",
        nargs="?",
        default="-",
        help="text file, one sentence a line, plain or .gz (default: stdin)",
    )
    parser.add_argument(
        "--output",
        "-o",
        default="-",
        help="file of the translations, written whole at the end; it may be the input "
        "(default: stdout)",
    )
    parser.add_argument(
        "--beams", type=int, default=None, help="beam size (default: the checkpoint's own, else 4)"
    )
    parser.add_argument(
        "--nbest",
        type=int,
        default=1,
        help="translations per line, best first; lines become LINE ||| TEXT",
    )
    parser.add_argument(
        "--scores",
        action="store_true",
        help="print the length-penalised log-probability: ... ||| SCORE",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=None,
        help="alpha of section 6.1 (default: the checkpoint's)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=None,
        help="longest output (default: source length + 50)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="padded source tokens per batch (default: %(default)s)",
    )
    parser.add_argument(
        "--bf16", action="store_true", help="run in bfloat16, faster where the hardware has it"
    )
    args = parser.parse_args()
    for name in ("beams", "nbest", "max_new_tokens", "batch_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return args


def main() -> None:
    """Run the command line."""
    args = parse_args()
    if args.input != "-" and not Path(args.input).is_file():
        sys.exit(f"translate.py: no such input file: {args.input}")
    if args.output != "-" and not Path(args.output).absolute().parent.is_dir():
        sys.exit(f"translate.py: there is no folder for the output {args.output}: make it first")
    if Path(args.output).is_dir():
        sys.exit(f"translate.py: the output {args.output} is a folder: name a file")
    try:
        # Says what is wrong with another toolkit's model, or a path, before anything is loaded.
        VaswaniConfig.from_pretrained(args.model)
        translator = pipeline(
            "translation",
            model=args.model,
            pipeline_class=VaswaniTranslationPipeline,
            dtype=torch.bfloat16 if args.bf16 else "auto",
            max_tokens=args.batch_tokens,
            return_scores=args.scores,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"translate.py: {error}")
    num_beams = args.beams or translator.model.generation_config.num_beams or 4
    if args.nbest > num_beams:
        sys.exit(f"translate.py: --nbest {args.nbest} needs as many --beams, got {num_beams}")
    settings = {"length_penalty": args.length_penalty, "max_new_tokens": args.max_new_tokens}
    settings = {name: value for name, value in settings.items() if value is not None}
    settings |= {"num_beams": num_beams, "num_return_sequences": args.nbest}

    translations = translator((text for _, text in read_lines(args.input)), **settings)
    lines = formatted(translations, numbered=args.nbest > 1, scored=args.scores)
    try:
        write_lines(lines, args.output)
    except OSError as error:
        sys.exit(f"translate.py: {error}")


def formatted(
    translations: Iterable[list[dict[str, Any]]], numbered: bool, scored: bool
) -> Iterator[str]:
    """Write each translation as a line, with the number of its source and its score on request."""
    for number, hypotheses in enumerate(translations):
        for hypothesis in hypotheses:
            # One translation a line: the model may write a line break as any other character.
            text = " ".join(hypothesis["translation_text"].splitlines())
            fields = [str(number), text] if numbered else [text]
            if scored:
                fields.append(f"{hypothesis['score']:.4f}")
            yield " ||| ".join(fields)


def write_lines(lines: Iterable[str], output: str) -> None:
    """Write the output; a file takes its name when it is whole, so that it may be the input, too.

    Where translation ends early, the lines so far are kept beside the output, which stays as it is.
    """
    if output == "-" or is_standard_output(output):
        sys.stdout.reconfigure(encoding="utf-8")
        for line in lines:
            print(line)
        sys.stdout.flush()
        return
    with replaced_file(Path(output)) as partial:
        try:
            with open(partial, "w", encoding="utf-8") as file:
                for line in lines:
                    print(line, file=file)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if partial.is_file() and partial.stat().st_size and not isinstance(error, OSError):
                kept = partial.replace(partial.with_name(f"{Path(output).name}.partial"))
                print(f"translate.py: the translations so far are in {kept}", file=sys.stderr)
            raise


def is_standard_output(path: str) -> bool:
    """Tell whether a path such as /dev/stdout leads to where standard output goes."""
    return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(1))


if __name__ == "__main__":
    # A reader that closes the pipe (head) ends the program quietly, as other filters do.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
