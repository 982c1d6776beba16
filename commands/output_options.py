"""Options about scores and the output folder."""

import argparse
import os

from .parser import positive


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scores and of the output folder."""
    add = parser.add_argument_group("scores and output").add_argument
    add(
        "--beams",
        type=positive,
        metavar="N",
        help="beam size of the scores, saved as the model's default (default: that of --model, "
        "else 4)",
    )
    add(
        "--generation",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="other generation settings, saved as defaults: --generation length_penalty=1.0",
    )
    add(
        "--nbest",
        type=positive,
        default=1,
        metavar="N",
        help="also report how often the reference is among the N best translations",
    )
    add(
        "--score",
        default="bleu",
        choices=("bleu", "chrf", "compound_split_bleu", "exact_match"),
        help="score of the learning curve and of --patience (default: bleu)",
    )
    add(
        "--bleu-tokenize",
        default="13a",
        metavar="NAME",
        help="sacreBLEU's tokenizer; none for tokenised text (default: 13a)",
    )
    add(
        "--output",
        type=os.path.expanduser,
        required=True,
        metavar="FOLDER",
        help="folder of the model and its results",
    )
    add("--results", type=os.path.expanduser, metavar="FILE", help="write results.json here too")
    add(
        "--languages",
        nargs="+",
        metavar="CODE",
        help="ISO 639 codes of source and target for the model card (default: the names of the "
        "columns or the endings of the files, if these have two letters)",
    )
    add("--license", metavar="ID", help="licence of the weights for the model card: cc-by-4.0")
    add("--push-to-hub", metavar="HUB_ID", help="upload the finished model to this repository")
