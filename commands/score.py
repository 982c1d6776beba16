"""Score given translations: the log-probability of each target line after its source line.

    vaswani score runs/en-de source.txt target.txt > scores.txt
    vaswani score runs/en-de source.txt target.txt --penalised --output scores.txt

Each line of the output is log P(target | source), including the end of the sentence. --penalised
divides it by the length penalty (section 6.1), as beam search does for its ranking. The last line
on standard error is the perplexity of all target tokens.
"""

import argparse

from .parser import CommandError, CommandParser, positive


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("score", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub id of a saved model with its tokenizer")
    add("source", metavar="SOURCE", help="text file, one sentence per line, plain, .gz or .zst")
    add("target", metavar="TARGET", help="translations of the source, line by line")
    add("--output", "-o", default="-", metavar="FILE", help="default: standard output")
    add("--penalised", action="store_true", help="divide by the length penalty")
    add(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="largest number of padded tokens per batch and side (default: 4096)",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Score."""
    import sys

    from ..corpora.reading import read_parallel
    from ..generation.translator import load_translator
    from ..training.perplexity import perplexity_of
    from .text import check_text, lines_without_tokens, write_lines

    check_text([args.source, args.target], args.output)
    try:
        translator = load_translator(args.model)
        sources, targets = read_parallel(args.source, args.target)
        for index in lines_without_tokens(translator.tokenizer, sources):
            raise ValueError(
                f"Line {index + 1} of {args.source} has no tokens, so its translation has no "
                "score: leave the line out of both files."
            )
        scores = translator.model.score(
            sources, targets, translator.tokenizer, max_tokens=args.batch_tokens
        )
        values = scores.sequences_scores if args.penalised else scores.sums
        write_lines((f"{value:.4f}" for value in values.tolist()), args.output)
    except (OSError, TypeError, ValueError) as error:
        raise CommandError(error) from error
    tokens = sum(map(len, scores.log_probs))
    if tokens:
        perplexity = perplexity_of(-scores.sums.double().sum().item() / tokens)
        print(f"perplexity {perplexity:.4f} over {tokens} target tokens", file=sys.stderr)
