"""The parser of `vaswani train`: recipes, presets, and options that contradict each other."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..training.presets import PRESETS
from .parser import CommandParser
from .recipes import settings
from .train_warnings import all_warm_up, swapped_sides, untrained, without_effect

_DEFAULT_STEPS = 100_000  # of a run without a given length


class TrainParser(CommandParser):
    """The parser of a run. The command line overrides recipes, and recipes override presets."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse a command line with its recipe and preset, check it, and print warnings."""
        words = self.with_recipe(args)
        early_parser = self.early_parser()
        early_parser.add_argument("--preset")
        early_parser.add_argument("--model")
        found = early_parser.parse_known_args(words)[0]
        # A model has its sizes, and the learning rate of a preset is far too high for fine-tuning.
        preset = {} if found.model else PRESETS.get(found.preset or "", {})
        self.set_defaults(**{name: value for name, value in preset.items() if name != "epochs"})
        parsed = super().parse_args(words, namespace)
        given = sys.argv[1:] if args is None else args
        self.refuse_repeated(given, "--train", "--valid", "--test")
        self._override_recipe(parsed, given)
        open_end = parsed.steps is None and parsed.epochs is None and "epochs" not in preset
        if parsed.steps is None and parsed.epochs is None:
            parsed.epochs = preset.get("epochs")
            parsed.steps = None if parsed.epochs else _DEFAULT_STEPS
        self._check(parsed)
        chosen = parsed.objective_settings
        fixed_by = "c" if chosen.get("schedule") == "linear" else "k"
        needs_length = parsed.objective == "scheduled_sampling" and fixed_by not in chosen
        if needs_length and open_end and (parsed.minutes or parsed.patience):
            self.error(
                "the schedule of --objective scheduled_sampling depends on the length of the run: "
                "pass --steps or --epochs beside --minutes or --patience"
            )
        warnings = [*swapped_sides(parsed), *without_effect(parsed, given), *all_warm_up(parsed)]
        warnings += untrained(parsed)
        for warning in warnings:
            print(f"{self.prog}: warning: {warning}", file=sys.stderr)
        return parsed

    def _override_recipe(self, args: argparse.Namespace, given: Sequence[str]) -> None:
        """Let length, beams and data of the command line override what a recipe says about them."""
        early_parser = self.early_parser()
        early_parser.add_argument("--train", nargs="+")
        early_parser.add_argument("--languages", nargs="+")
        early_parser.add_argument("--steps")
        early_parser.add_argument("--epochs")
        early_parser.add_argument("--beams")
        early_parser.add_argument("--generation", nargs="+", action="extend", default=[])
        own = early_parser.parse_known_args(list(given))[0]
        if own.train and args.recipe and not own.languages:
            args.languages = None  # the recipe states the languages of its own data
        if own.beams:
            kept = [word for word in args.generation if not word.startswith("num_beams=")]
            own_beams = [word for word in own.generation if word.startswith("num_beams=")]
            args.generation = [*kept, *own_beams]
        if own.epochs and not own.steps:
            args.steps = None
        elif own.steps and not own.epochs:
            args.epochs = None

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
        if not args.model:
            args.beams = args.beams or 4
        given_as_setting = any(word.startswith("num_beams=") for word in args.generation)
        if args.beams and args.nbest > args.beams and not given_as_setting:
            self.error(f"--nbest {args.nbest} needs at least as many --beams, got {args.beams}")
        if args.segmentations > 1 and not args.bpe_dropout:
            self.error("--segmentations needs --bpe-dropout, which splits pairs differently")
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
        if args.beams:
            args.generation = {"num_beams": args.beams, **args.generation}

    def _check_stream(self, args: argparse.Namespace) -> None:
        if not args.stream:
            if args.stream_buffer != self.get_default("stream_buffer"):
                self.error("--stream-buffer needs --stream: leave out --stream-buffer")
            return
        needed = {"--max-source-tokens": args.max_source_tokens, "--steps": args.steps}
        needed["--tokenizer or --model"] = args.tokenizer or args.model
        for name, value in needed.items():
            if not value:
                self.error(f"--stream needs {name}, because a stream is not read before the run")
        for name in ("bpe_dropout", "drop_duplicates", "temperature"):
            if getattr(args, name):
                self.error(f"--{name} needs prepared data: leave out --stream".replace("_", "-"))


__all__ = ["TrainParser"]
