r"""Train a Transformer on your own sentence pairs, or fine-tune a saved one.

Train on a CPU, or on little data:

    vaswani train --train train.en train.de --valid val.en val.de --test test.en test.de \
        --preset tiny --output runs/en-de

Without --preset the model is the paper's base, with its schedule, loss and decoding (sections 5.3,
5.4, 6.1), which needs a GPU. Fine-tune a saved model, and keep its sizes, tokenizer and settings:

    vaswani train --model runs/en-de --train more.tsv --learning-rate 1e-4 --output runs/more

Repeat a published result. A recipe is a file of these options, and the command line overrides it:

    vaswani train --recipe examples/recipes/multi30k-tiny.yaml --seed 2

The same command with --resume auto continues a run that was killed, and ends with the same weights.
For several processes or GPUs, use: accelerate launch -m vaswani train ... The output folder gets
the model, its tokenizer, TensorBoard logs, learning_curve.png, results.json with the scores,
recipe.yaml to repeat the run, and README.md, the model card.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..training.presets import PRESETS
from .data_options import FORMS, add_data_options, add_vocabulary_options
from .output_options import add_output_options
from .parser import CommandError, CommandParser, settings
from .train_warnings import swapped_sides, without_effect
from .training_options import add_model_options, add_training_options

_NOT_REPEATED = ("recipe", "resume", "results", "push_to_hub")


class _Parser(CommandParser):
    """The parser of a run. The command line overrides recipes, and recipes override presets."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = self.with_recipe(args)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--preset")
        preset = PRESETS.get(finder.parse_known_args(words)[0].preset or "", {})
        self.set_defaults(**{name: value for name, value in preset.items() if name != "epochs"})
        parsed = super().parse_args(words, namespace)
        if parsed.steps is None and parsed.epochs is None:
            parsed.epochs = preset.get("epochs")
            parsed.steps = None if parsed.epochs else 100_000
        self._check(parsed)
        given = sys.argv[1:] if args is None else args
        for warning in [*swapped_sides(parsed), *without_effect(parsed, given)]:
            print(f"{self.prog}: warning: {warning}", file=sys.stderr)
        return parsed

    def _check(self, args: argparse.Namespace) -> None:
        """Refuse options that contradict each other, and read NAME=VALUE settings."""
        if args.model and (args.tokenizer or args.set != self.get_default("set")):
            self.error("--model keeps its own sizes and tokenizer: leave out --set and --tokenizer")
        if args.steps and args.epochs:
            self.error("--steps and --epochs both set the length of the run: leave one out")
        for name, needed in (("max_target_tokens", "max_source_tokens"), ("patience", "valid")):
            if getattr(args, name) and not getattr(args, needed):
                self.error(f"--{name} needs --{needed}".replace("_", "-"))
        if args.batching == "packed" and not args.max_source_tokens:
            self.error("--batching packed needs --max-source-tokens, the size of a batch")
        if args.nbest > args.beams:
            self.error(f"--nbest {args.nbest} needs at least as many --beams, got {args.beams}")
        if args.objective and args.r_drop:
            self.error("--r-drop is an objective too: leave out --r-drop or --objective")
        if args.objective_settings and not args.objective:
            self.error("--objective-settings needs --objective")
        self._check_stream(args)
        for option in ("set", "trainer", "generation", "objective_settings"):
            try:
                setattr(args, option, settings(getattr(args, option)))
            except ValueError as error:
                self.error(f"--{option.replace('_', '-')}: {error}")
        args.generation = {"num_beams": args.beams, **args.generation}

    def _check_stream(self, args: argparse.Namespace) -> None:
        if not args.stream:
            return
        needed = {"--max-source-tokens": args.max_source_tokens, "--steps": args.steps}
        needed["--tokenizer or --model"] = args.tokenizer or args.model
        for name, value in needed.items():
            if not value:
                self.error(f"--stream needs {name}, because a stream is not read before the run")
        for name in ("bpe_dropout", "drop_duplicates", "temperature"):
            if getattr(args, name):
                self.error(f"--{name} needs prepared data: leave out --stream".replace("_", "-"))


def make_parser() -> CommandParser:
    """Describe the command line."""
    parser = _Parser("train", f"{__doc__}\n{FORMS}")
    parser.add_argument("--recipe", metavar="FILE", help="YAML file of options without dashes")
    add_data_options(parser)
    add_vocabulary_options(parser)
    add_model_options(parser)
    add_training_options(parser)
    add_output_options(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Train, save, score, and write the card."""
    from huggingface_hub.errors import StrictDataclassError

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
    except (FloatingPointError, ModuleNotFoundError, OSError, StrictDataclassError) as error:
        raise CommandError(error) from error
    except ValueError as error:
        if type(error).__name__ not in ("DataError", "ObjectiveError", "RunError", "SettingsError"):
            raise
        raise CommandError(error) from error


def recipe_of(args: argparse.Namespace) -> str:
    """Return a YAML recipe that repeats a run, including all defaults."""
    import yaml

    recipe = {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in vars(args).items()
        if name not in _NOT_REPEATED and value not in (None, [], {})
    }
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _write_recipe_and_card(args: argparse.Namespace) -> None:
    from ..hub_cards.card import write_model_card
    from ..training.run import write

    write(Path(args.output) / "recipe.yaml", recipe_of(args))
    write_model_card(args.output)


def _print_summary(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the scores, the folder, and the next two commands."""
    for name, scores in (("Validation", results.get("valid")), ("Test", results.get("test"))):
        if scores:
            line = f"{name}: BLEU {scores['bleu']}, chrF {scores['chrf']}"
            if args.score == "exact_match" or scores["exact_match"] >= 10:
                line += f", exactly right {scores['exact_match']}%"
            print(f"{line}  ({scores['signature']})")
    print(f"The model is in {args.output}. Next:")
    print(f"  vaswani translate {args.output} FILE\n  vaswani demo {args.output}")
