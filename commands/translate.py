"""Translate text with a saved model: lines in, translations out, in the order of the input.

    vaswani translate runs/en-de < source.txt > translation.txt
    vaswani translate runs/en-de source.txt.gz --output translation.txt
    vaswani translate runs/en-de source.txt --nbest 4 --scores

Lines are read in windows and sorted by length inside a window, so batches hold little padding and
memory does not grow with the file. An empty line stays empty. The output file is replaced when it
is complete, so it may be the input file.
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from .parser import CommandError, CommandParser, positive


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("translate", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub id of a saved model with its tokenizer")
    add(
        "input",
        nargs="?",
        default="-",
        metavar="INPUT",
        help="text file, one sentence per line, plain, .gz or .zst (default: standard input)",
    )
    add("--output", "-o", default="-", metavar="FILE", help="default: standard output")
    add("--beams", type=positive, metavar="N", help="beam size (default: the model's own, else 4)")
    add(
        "--nbest",
        type=positive,
        default=1,
        metavar="N",
        help="write N translations per line, best first; output lines become LINE ||| TEXT",
    )
    add("--scores", action="store_true", help="append ||| and the length-penalised log-probability")
    add(
        "--length-penalty",
        type=float,
        metavar="ALPHA",
        help="exponent of the length penalty (default: the model's own); the model's "
        "length_penalty_type chooses the formula: gnmt is that of section 6.1",
    )
    add(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="largest number of output tokens (default: the model's own limit; a fresh model has "
        "source tokens + 50)",
    )
    add(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="largest number of padded source tokens per batch (default: 4096)",
    )
    add("--bf16", action="store_true", help="run in bfloat16, faster where the hardware has it")
    return parser


def run(args: argparse.Namespace) -> None:
    """Translate."""
    from ..corpora.reading import read_lines
    from ..generation.translator import load_translator
    from .text import check_text, write_lines

    check_text([args.input], args.output)
    try:
        translator = load_translator(args.model, "bfloat16" if args.bf16 else "auto")
    except (OSError, ValueError) as error:
        raise CommandError(error) from error
    beams = args.beams or translator.model.generation_config.num_beams or 4
    if args.nbest > beams:
        raise CommandError(f"--nbest {args.nbest} needs at least as many --beams, got {beams}")
    given = {"length_penalty": args.length_penalty, "max_new_tokens": args.max_new_tokens}
    settings = {name: value for name, value in given.items() if value is not None}
    settings |= {"num_beams": beams, "num_return_sequences": args.nbest}
    settings |= {"max_tokens": args.batch_tokens, "return_scores": args.scores}
    try:
        translations = translator(read_lines(args.input), **settings)
        write_lines(_formatted(translations, args.nbest > 1, args.scores), args.output)
    except (OSError, ValueError) as error:
        raise CommandError(error) from error


def _formatted(
    translations: Iterable[list[dict[str, Any]]], numbered: bool, scored: bool
) -> Iterator[str]:
    """Write each translation as a line, with the number of its source and its score on request."""
    for number, hypotheses in enumerate(translations):
        for hypothesis in hypotheses:
            # A translation may contain line breaks. Replace them, so that it stays one line.
            text = " ".join(hypothesis["translation_text"].splitlines())
            fields = [str(number), text] if numbered else [text]
            if scored:
                fields.append(f"{hypothesis['score']:.4f}")
            yield " ||| ".join(fields)
