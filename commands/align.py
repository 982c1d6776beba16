"""Link the words of given translations by the decoder's attention (section 3.2.3).

    vaswani align runs/en-de source.txt target.txt > links.txt

Each line of the output holds links such as "0-0 1-2" in Pharaoh format: source word and target
word, counted from 0. Words are separated by white space. --level token links tokens instead.
"""

import argparse

from .parser import CommandError, CommandParser, positive


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("align", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub id of a saved model with its tokenizer")
    add("source", metavar="SOURCE", help="text file, one sentence per line, plain, .gz or .zst")
    add("target", metavar="TARGET", help="translations of the source, line by line")
    add("--output", "-o", default="-", metavar="FILE", help="default: standard output")
    add("--level", choices=("word", "token"), default="word", help="default: word")
    add(
        "--layer",
        type=int,
        nargs="+",
        metavar="N",
        help="decoder layers to average; negative numbers count from the last (default: all)",
    )
    add("--heads", type=int, nargs="+", metavar="N", help="heads to average (default: all)")
    add(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="largest number of padded tokens per batch and side (default: 4096)",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Write the links of every line."""
    from ..corpora.reading import read_parallel
    from ..generation.translator import load_translator
    from .text import check_text, lines_without_tokens, write_lines

    check_text([args.source, args.target], args.output)
    try:
        translator = load_translator(args.model)
        sources, targets = read_parallel(args.source, args.target)
        empty = set(lines_without_tokens(translator.tokenizer, sources))
        kept = [index for index in range(len(sources)) if index not in empty]
        found = translator.model.align(
            [sources[index] for index in kept],
            [targets[index] for index in kept],
            translator.tokenizer,
            level=args.level,
            layer=args.layer,
            heads=args.heads,
            max_tokens=args.batch_tokens,
        )
        links = dict(zip(kept, found, strict=True))
        write_lines((links.get(index, "") for index in range(len(sources))), args.output)
    except (OSError, TypeError, ValueError) as error:
        raise CommandError(error) from error
