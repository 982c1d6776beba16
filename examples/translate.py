"""Translate text with a saved model: lines in, translations out, in the order of the input.

    python examples/translate.py runs/multi30k < source.txt > translation.txt
    python examples/translate.py runs/multi30k source.txt.gz --output translation.txt
    python examples/translate.py runs/multi30k source.txt --nbest 4 --scores

Lines are translated in windows, sorted by length inside a window so that batches hold little
padding; memory does not grow with the file. An empty line stays empty.
"""

import argparse
import contextlib
import gzip
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import pipeline

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
        "--output", "-o", default="-", help="where translations go (default: stdout)"
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

    sys.stdout.reconfigure(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        target = sys.stdout
        if args.output != "-":
            target = stack.enter_context(open(args.output, "w", encoding="utf-8"))
        lines = (text for _, text in read_lines(args.input))
        for number, translations in enumerate(translator(lines, **settings)):
            for translation in translations:
                # One translation a line: the model may write a line break as any other character.
                text = " ".join(translation["translation_text"].splitlines())
                fields = [str(number), text] if args.nbest > 1 else [text]
                if args.scores:
                    fields.append(f"{translation['score']:.4f}")
                print(" ||| ".join(fields), file=target)


if __name__ == "__main__":
    # A reader that closes the pipe (head) ends the program quietly, as other filters do.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
