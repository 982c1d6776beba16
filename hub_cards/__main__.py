"""`python -m vaswani.hub_cards FOLDER`: write the card of a saved model.

    python -m vaswani.hub_cards runs/en-de --results benchmarks/results/en-de.json
    python -m vaswani.hub_cards runs/en-de --repo-id user/en-de --output cards/en-de

Numbers come from the results files in the folder and from those named; nothing is typed in.
"""

import argparse
import sys

from .card import write_model_card


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vaswani.hub_cards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="a saved model")
    add("--results", nargs="+", metavar="FILE", help="more results files than lie in the folder")
    add("--repo-id", metavar="HUB_ID", help="where the model is to be loaded from")
    add(
        "--output", metavar="FOLDER", help="of the card and what it links to (default: the model's)"
    )
    add("--overwrite", action="store_true", help="replace a card that was changed by hand")
    add(
        "--language",
        "--languages",
        nargs="+",
        metavar="CODE",
        help="ISO 639 codes, the source's first",
    )
    add("--license", metavar="ID", help="of the weights, by the Hub's name: cc-by-4.0")
    add("--datasets", nargs="+", metavar="HUB_ID", help="data sets that were trained on")
    add("--tags", nargs="+", metavar="TAG", help="more tags")
    add("--base-model", metavar="HUB_ID", help="the model that was fine-tuned")
    try:
        card = write_model_card(**vars(parser.parse_args(argv)))
    except (OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(card)  # noqa: T201  a command says what it wrote


if __name__ == "__main__":
    main()
