r"""Train a Transformer on your own sentence pairs, or fine-tune a saved one.

Train on a CPU, or on little data:

    vaswani train --train train.en train.de --valid val.en val.de --test test.en test.de \
        --preset tiny --output runs/en-de

Without --preset the model is the paper's base, with its schedule, loss and decoding (sections 5.3,
5.4, 6.1), which needs a GPU. Fine-tune a saved model, and keep its sizes, tokenizer and settings:

    vaswani train --model runs/en-de --train more.tsv --output runs/more \
        --learning-rate 1e-4 --warmup 100 --steps 1000

Repeat a published result. A recipe is a file of these options, and the command line overrides it:

    vaswani train --recipe examples/recipes/multi30k-muon.yaml --seed 2

The same command with --resume auto continues a run that was killed, and ends with the same weights.
For several processes or GPUs, use: accelerate launch -m vaswani train ... The output folder gets
the model, its tokenizer, TensorBoard logs, learning_curve.png, results.json with the scores,
recipe.yaml to repeat the run, and README.md, the model card.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from ..configuration.errors import InputError
from .data_options import FORMS, add_data_options
from .output_options import add_output_options
from .parser import CommandError, CommandParser
from .recipes import settings
from .train_parser import TrainParser
from .training_options import add_model_options, add_training_options
from .vocabulary_options import add_vocabulary_options

# Errors whose message says what to change.
_EXPECTED_ERRORS = (InputError, ModuleNotFoundError, OSError)
_NOT_IN_RECIPE = ("recipe", "resume", "results", "push_to_hub")


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = TrainParser("train", f"{__doc__}\n{FORMS}")
    parser.add_argument("--recipe", metavar="FILE", help="YAML file of options without dashes")
    add_data_options(parser)
    add_vocabulary_options(parser)
    add_model_options(parser)
    add_training_options(parser)
    add_output_options(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Train, save, score, and write the card."""
    from .settings_check import check_settings

    try:
        check_settings(args)
        from ..training.run import TrainingRun

        training = TrainingRun(args)
        results = training.train()
        if training.processes.is_main_process:
            training.finish(results)
            _write_recipe_and_card(args)
            _print_summary(args, results)
            if args.push_to_hub:
                training.push(args.push_to_hub)
        training.trainer.accelerator.end_training()
    except (FloatingPointError, *_EXPECTED_ERRORS) as error:
        raise CommandError(error) from error


def recipe_of(args: argparse.Namespace) -> str:
    """Return a YAML recipe that repeats a run, including all defaults."""
    import yaml

    recipe = {
        name.replace("_", "-"): _as_written(value)
        for name, value in vars(args).items()
        if name not in _NOT_IN_RECIPE and value not in (None, [], {})
    }
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _as_written(value: Any) -> Any:
    """Write an option so that a recipe gives it back, such as the text "2024"."""
    if isinstance(value, dict):
        return {
            name: json.dumps(item)
            if isinstance(item, str) and settings([f"x={item}"])["x"] != item
            else item
            for name, item in value.items()
        }
    return list(value) if isinstance(value, tuple) else value


def _write_recipe_and_card(args: argparse.Namespace) -> None:
    from ..hub_cards.card import write_model_card
    from ..training.run import write

    write(Path(args.output) / "recipe.yaml", recipe_of(args))
    write_model_card(args.output)


def _print_summary(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the scores, the folder, and the next two commands."""
    from ..hub_cards.results import MIN_EXACT_MATCH_PERCENT

    test: dict[str, Any] = results.get("test") or {}
    sets = [("Validation", results.get("valid")), ("Test", test)]
    if corpora := test.get("corpora"):
        sets[1:] = [(f"Test {corpus['data']}", corpus) for corpus in corpora]
    for name, scores in sets:
        if scores:
            line = f"{name}: BLEU {scores['bleu']}, chrF {scores['chrf']}"
            if args.score == "exact_match" or scores["exact_match"] >= MIN_EXACT_MATCH_PERCENT:
                line += f", exactly right {scores['exact_match']}%"
            print(f"{line}  ({scores['signature']})")
    print(f"The model is in {args.output}. Next:")
    folder = shlex.quote(str(args.output))
    print(f"  vaswani translate {folder} FILE\n  vaswani demo {folder}")
