"""Write the model card of a saved model, from the files in its folder.

    vaswani card runs/en-de --language en de --license cc-by-4.0
    vaswani card runs/en-de --results benchmarks/results/en-de.json

Numbers come from results files in the folder and from --results. A card that was edited by hand is
kept, unless you pass --overwrite.
"""

import argparse

from .parser import CommandError, CommandParser


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser("card", __doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="a saved model")
    add("--results", nargs="+", metavar="FILE", help="results files from outside the folder")
    add("--repo-id", metavar="HUB_ID", help="repository that the model is loaded from")
    add("--output", metavar="FOLDER", help="folder of the card (default: the model's folder)")
    add("--overwrite", action="store_true", help="replace a card that was edited by hand")
    add(
        "--language",
        "--languages",
        nargs="+",
        metavar="CODE",
        help="ISO 639 codes of source and target",
    )
    add("--license", metavar="ID", help="the Hub's name for the licence of the weights: cc-by-4.0")
    add("--datasets", nargs="+", metavar="HUB_ID", help="training data sets")
    add("--tags", nargs="+", metavar="TAG", help="further tags")
    add("--base-model", metavar="HUB_ID", help="the model that was fine-tuned")
    return parser


def run(args: argparse.Namespace) -> None:
    """Write the card."""
    from huggingface_hub.utils import validate_repo_id
    from safetensors import SafetensorError

    from ..hub_cards.card import write_model_card

    try:
        if args.repo_id:
            validate_repo_id(args.repo_id)
        print(write_model_card(**vars(args)))
    except (OSError, ValueError) as error:
        raise CommandError(error) from error
    except SafetensorError as error:
        raise CommandError(f"the weights in {args.folder} are damaged: {error}") from error
