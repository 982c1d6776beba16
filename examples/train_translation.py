r"""Train a Transformer on your own sentence pairs, or fine-tune a saved one.

The data are pairs of a source and a target line, in any of these forms:

    --train train.en train.de              two parallel text files, plain or .gz
    --train pairs.tsv                      one TSV file: source, tab, target (first two columns)
    --train pairs.jsonl                    one JSONL file
    --train ID[@CONFIG][:SPLIT]            a data set of the Hub, or a local folder of one

JSONL records and data sets name their two columns by --columns, for example --columns en de.

Train from scratch, with the paper's schedule, loss and decoding (sections 5.3, 5.4, 6.1):

    python examples/train_translation.py --train train.en train.de --valid val.en val.de \
        --test test.en test.de --output runs/en-de

Fine-tune a saved checkpoint, a folder or a Hub id; its sizes, tokenizer and generation settings
are kept:

    python examples/train_translation.py --model runs/en-de --train more.tsv \
        --valid val.en val.de --learning-rate 1e-4 --output runs/en-de-more

Repeat a published result: a recipe is a file of these arguments, and those of the command line come
after them:

    python examples/train_translation.py --recipe examples/recipes/multi30k-tiny.yaml --seed 2

A run that was killed goes on from its last complete checkpoint with --resume, and ends with the
same weights; with --resume auto, the command that goes on is the one that begins. Several processes
or GPUs: put `accelerate launch` in place of `python`. The output
folder holds the model, its tokenizer, TensorBoard logs, learning_curve.png, results.json with the
scores, recipe.yaml, which repeats the run, and README.md, the model card.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import upload_folder
from huggingface_hub.errors import StrictDataclassError
from sentence_pairs import Pair, read_pairs
from torch.utils.data import DataLoader, SequentialSampler
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)
from vaswani.configuration.extras import needs
from vaswani.configuration.names_vaswani import complaints
from vaswani.configuration.places_vaswani import check_path
from vaswani.hub_cards.card import write_model_card
from vaswani.hub_cards.results import is_language, weights_sha256
from vaswani.training.atomic_folder import replaced_file, replaced_files
from vaswani.training.averaging import average_checkpoints
from vaswani.training.bpe_dropout import BpeDropout
from vaswani.training.checkpoints import flaw_of, last_complete_checkpoint, run_checkpoints
from vaswani.training.circumstances import circumstances

from vaswani import (
    VaswaniConfig,
    VaswaniForConditionalGeneration,
    VaswaniGenerationConfig,
    VaswaniTokenizer,
    VaswaniTranslationPipeline,
)

with needs("vaswani[train]", SystemExit):
    import yaml
    from accelerate import PartialState
    from datasets import Dataset
    from vaswani.training.curves import LearningCurve
    from vaswani.training.metrics import TranslationMetric, evaluate_perplexity, nbest_accuracy
    from vaswani.training.processes import (
        describe_processes,
        device_settings,
        forget_sharding,
        join_processes,
        of_main_process,
    )
    from vaswani.training.trainer import VaswaniTrainer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe",
        metavar="FILE",
        help="YAML file of arguments, without their dashes; examples/recipes/ has published ones",
    )
    add = parser.add_argument_group("data").add_argument
    add(
        "--train",
        nargs="+",
        required=True,
        metavar="DATA",
        help="training pairs, in a form shown above",
    )
    add(
        "--valid", nargs="+", metavar="DATA", help="pairs for the loss and BLEU at every evaluation"
    )
    add(
        "--test",
        nargs="+",
        metavar="DATA",
        help="pairs that are translated and scored once, at the end",
    )
    add(
        "--columns",
        nargs=2,
        default=("source", "target"),
        metavar=("SOURCE", "TARGET"),
        help="keys of JSONL records or of a data set's rows (default: source target)",
    )
    add(
        "--max-length",
        type=int,
        default=256,
        help="drop longer training pairs, in tokens (default: 256)",
    )

    add = parser.add_argument_group("vocabulary").add_argument
    add(
        "--tokenizer", metavar="FOLDER_OR_HUB_ID", help="use this tokenizer instead of training one"
    )
    add(
        "--tokenizer-kind",
        default="bpe",
        choices=("bpe", "wordpiece", "unigram", "word", "char", "regex"),
        help="what the shared vocabulary is made of (default: bpe, as in section 5.1)",
    )
    add(
        "--space-after",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="of bpe, wordpiece and unigram: words carry the space after them, not the one before; "
        "for text whose punctuation stands apart",
    )
    add(
        "--split-punctuation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of bpe, wordpiece and unigram: no token joins a word and punctuation (default)",
    )
    add(
        "--bpe-dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="of bpe: leave out merges of the training data with this probability (default: 0; "
        "the authors take 0.1)",
    )
    add(
        "--segmentations",
        type=int,
        default=10,
        help="with --bpe-dropout, so many copies of the training data, each cut into other tokens, "
        "make an epoch (default: 10)",
    )
    add("--pattern", help="of --tokenizer-kind regex: what its tokens match (default: SMILES)")
    add(
        "--vocab-size",
        type=int,
        default=37000,
        help="its largest size (default: 37000, section 5.1)",
    )

    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        metavar="FOLDER_OR_HUB_ID",
        help="fine-tune this checkpoint instead of a fresh model",
    )
    add("--preset", default="base", help="row of the paper's Table 3 to start from (default: base)")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of VaswaniConfig that differ from the preset: --set d_model=128 dropout=0.3",
    )

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=100_000, help="updates (default: 100000, section 5.2)")
    add("--minutes", type=float, help="stop earlier, after this many minutes of training")
    add(
        "--batch-size",
        type=int,
        default=128,
        help="sentence pairs per device and batch (default: 128)",
    )
    add(
        "--max-source-tokens",
        type=int,
        help="padded source tokens per device and batch, instead of --batch-size (section 5.1)",
    )
    add("--max-target-tokens", type=int, help="likewise (default: as many)")
    add(
        "--r-drop",
        type=float,
        default=0.0,
        metavar="ALPHA",
        help="train on every batch twice at once and let the two passes agree; for small data "
        "(default: 0)",
    )
    add("--accumulate", type=int, default=1, help="batches per update (default: 1)")
    add("--warmup", type=int, default=4000, help="updates of rising learning rate (default: 4000)")
    add(
        "--learning-rate",
        type=float,
        help="its peak (default: the paper's, 1 / sqrt(d_model * warmup), section 5.3)",
    )
    add(
        "--scheduler",
        default="noam",
        help="noam, or any of transformers' (default: noam, which is equation 3, section 5.3)",
    )
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute in bfloat16 where it is safe, faster where supported",
    )
    add("--eval-steps", type=int, default=1000, help="updates between evaluations (default: 1000)")
    add("--save-steps", type=int, help="updates between checkpoints (default: --eval-steps)")
    add(
        "--average",
        type=int,
        default=1,
        help="the model is the mean of so many last checkpoints (default: 1; section 6.1: 5 or 20)",
    )
    add("--patience", type=int, help="stop after so many evaluations without a better --score")
    add(
        "--seed",
        type=int,
        default=42,
        help="of initialisation, shuffling and dropout (default: 42)",
    )
    add(
        "--resume",
        nargs="?",
        const="must",
        choices=("must", "auto"),
        help="go on from the last complete checkpoint in the output folder, which must be there; "
        "auto begins a new run where there is none, for launchers that restart it",
    )
    add(
        "--trainer",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any other Seq2SeqTrainingArguments: --trainer max_grad_norm=25 save_total_limit=2",
    )

    add = parser.add_argument_group("scores and output").add_argument
    add(
        "--beams",
        type=int,
        default=4,
        help="beam size of the test set, saved as default (default: 4)",
    )
    add(
        "--generation",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="other generation settings, saved as default: --generation length_penalty=1.0",
    )
    add("--nbest", type=int, default=1, help="also count references among so many best ones")
    add(
        "--score",
        default="bleu",
        choices=("bleu", "chrf", "compound_split_bleu", "exact_match"),
        help="what the learning curve shows and --patience watches (default: bleu)",
    )
    add(
        "--bleu-tokenize",
        default="13a",
        help="sacreBLEU's tokenization; 'none' for text that is tokenized already (default: 13a)",
    )
    add(
        "--output",
        required=True,
        metavar="FOLDER",
        help="where the model and everything else is written",
    )
    add("--results", metavar="FILE", help="write results.json here too")
    add(
        "--languages",
        nargs="+",
        metavar="CODE",
        help="ISO 639 codes for the model card, the source's first (default: the names of the "
        "columns or the endings of the files, if these have two letters)",
    )
    add("--license", metavar="ID", help="of the weights, for the model card: --license cc-by-4.0")
    add("--push-to-hub", metavar="HUB_ID", help="upload the finished model to this repository")
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe")
    recipe = first.parse_known_args(argv)[0].recipe
    args = parser.parse_args([*recipe_arguments(recipe), *argv] if recipe else argv)
    if args.model and (args.set or args.tokenizer):
        parser.error("--model keeps its own sizes and tokenizer: leave out --set and --tokenizer")
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= args.r_drop < math.inf:
        parser.error(f"--r-drop must be 0 or more, got {args.r_drop}")
    for needed, name in (("max_source_tokens", "max_target_tokens"), ("valid", "patience")):
        if getattr(args, name) and not getattr(args, needed):
            parser.error(f"--{name} needs --{needed}".replace("_", "-"))
    for code in args.languages or ():
        if not is_language(code):
            parser.error(f"--languages takes ISO 639 codes, such as de, not {code!r}")
    if args.nbest > args.beams:
        parser.error(f"--nbest {args.nbest} needs as many --beams, got {args.beams}")
    refuse_wrong_settings(args)
    for warning in [*swapped_sides(args), *without_effect(args, argv)]:
        print(f"train_translation.py: warning: {warning}", file=sys.stderr)
    return args


def refuse_wrong_settings(args: argparse.Namespace) -> None:
    """Refuse unknown names, and values without meaning, before the data are read."""
    known = {
        "trainer": [
            field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init
        ],
        "generation": [name for name in vars(VaswaniGenerationConfig()) if name[0] != "_"],
    }
    for option, names in known.items():
        if wrong := complaints(settings(getattr(args, option)), names):
            sys.exit(f"train_translation.py: --{option}: {wrong}")
    try:
        VaswaniConfig.preset(args.preset, **settings(args.set))
        VaswaniGenerationConfig(**{"num_beams": args.beams, **settings(args.generation)})
    except (TypeError, ValueError, StrictDataclassError) as error:
        sys.exit(f"train_translation.py: {error}")


def swapped_sides(args: argparse.Namespace) -> list[str]:
    """Say which data have the endings of the training data's two files the other way round."""

    def endings(files: list[str]) -> list[str]:
        return [Path(file.removesuffix(".gz")).suffix for file in files]

    source, *target = endings(args.train)
    if not target or source == target[0]:
        return []
    return [
        f"--{name} {' '.join(files)} has {target[0]} as its source, but --train has {source}: "
        "swap the two files"
        for name, files in (("valid", args.valid), ("test", args.test))
        if files and endings(files) == [*target, source]
    ]


def without_effect(args: argparse.Namespace, argv: list[str]) -> list[str]:
    """Say which arguments of the command line are given in vain: a vocabulary is there already."""
    given = {word.partition("=")[0] for word in argv}
    names = {"--vocab-size", "--tokenizer-kind", "--space-after", "--pattern"}
    vain = sorted(given & names) if args.model or args.tokenizer else []
    if args.model:
        vain += sorted(given & {"--preset"})
    bringer = f"--model {args.model}" if args.model else f"--tokenizer {args.tokenizer}"
    return [f"{name} has no effect: {bringer} brings its own" for name in vain]


def check_places(args: argparse.Namespace) -> None:
    """Say at once what cannot be loaded: a wrong path, or another toolkit's model."""
    try:
        if args.model:
            VaswaniConfig.from_pretrained(args.model)
        if args.tokenizer:
            check_path(args.tokenizer)
    except (OSError, ValueError, StrictDataclassError) as error:
        sys.exit(f"train_translation.py: {error}")


def recipe_arguments(path: str) -> list[str]:
    """Read a recipe as the command line that it stands for."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        sys.exit(f"train_translation.py: recipe {path}: {error}")
    if not isinstance(recipe, dict):
        sys.exit(f"train_translation.py: recipe {path} holds no settings of the form NAME: VALUE")
    arguments = []
    for name, value in recipe.items():
        if isinstance(value, dict):
            fields = (
                f"{field}={item if isinstance(item, str) else json.dumps(item)}"
                for field, item in value.items()
            )
            arguments += [f"--{name}", *fields]
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments.append(f"--{name}={value}")
    return arguments


def recipe_of(args: argparse.Namespace) -> str:
    """Write the recipe that repeats a run: every argument, the defaults included."""
    not_repeated = {"recipe", "resume", "results", "push_to_hub"}
    fields = {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in vars(args).items()
        if name not in not_repeated and value not in (None, [])
    }
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def settings(assignments: list[str]) -> dict[str, Any]:
    """Read NAME=VALUE arguments; a value that is no literal (0.1, true, null) is a string."""
    values = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            sys.exit(f"train_translation.py: expected NAME=VALUE, got {assignment!r}")
        try:
            values[name] = json.loads({"True": "true", "False": "false"}.get(value, value))
        except json.JSONDecodeError:
            values[name] = value
    return values


# Turns texts into token ids.
Encoder = Callable[[list[str]], list[list[int]]]


def encoders(
    tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase
) -> tuple[Encoder, Encoder]:
    """The encoders of sources and of targets."""
    return (
        lambda sources: tokenizer(sources)["input_ids"],
        lambda targets: target_tokenizer(text_target=targets)["input_ids"],
    )


def tokenized(
    pairs: list[Pair], encoders: tuple[Encoder, Encoder], max_length: int | None = None
) -> Dataset:
    """Turn pairs into token ids; by `length` the Trainer puts similar pairs in a batch."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        sources, labels = encoders[0](batch["source"]), encoders[1](batch["target"])
        lengths = [max(map(len, pair)) for pair in zip(sources, labels, strict=True)]
        return {"input_ids": sources, "labels": labels, "length": lengths}

    sources, targets = zip(*pairs, strict=True)
    data = Dataset.from_dict({"source": sources, "target": targets})
    data = data.map(encode, batched=True, remove_columns=["source", "target"], desc="Tokenizing")
    if max_length is None:
        return data
    kept = data.filter(
        lambda lengths: [n <= max_length for n in lengths], input_columns="length", batched=True
    )
    if len(kept) < len(data) and PartialState().is_main_process:
        print(
            f"Dropped {len(data) - len(kept)} of {len(data)} pairs longer than {max_length} tokens."
        )
    if not len(kept):
        sys.exit(f"All {len(data)} training pairs are longer than --max-length {max_length}.")
    return kept


def training_data(
    args: argparse.Namespace,
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
) -> Dataset:
    """Turn the training pairs into token ids, with --bpe-dropout several times."""
    if not args.bpe_dropout:
        return tokenized(pairs, encoders(tokenizer, target_tokenizer), args.max_length)
    dropout, seed = args.bpe_dropout, args.seed
    try:
        sides = (
            BpeDropout(tokenizer, dropout, 2 * seed),
            BpeDropout(target_tokenizer, dropout, 2 * seed + 1, target=True),
        )
    except ValueError as error:
        sys.exit(f"train_translation.py: --bpe-dropout: {error}")
    return tokenized(pairs * args.segmentations, sides, args.max_length)


def build(
    args: argparse.Namespace, pairs: list[Pair], checkpoint: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the checkpoint to fine-tune, or train a vocabulary and make a fresh model."""
    if args.model:
        # Whatever type its weights were saved in: an update, and the epsilon of Adam, are too small
        # for 16 bits.
        return (
            AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype=torch.float32),
            AutoTokenizer.from_pretrained(args.model),
        )
    if checkpoint or args.tokenizer:
        # The checkpoint's tokenizer, not one trained again: the data may have changed since.
        tokenizer = AutoTokenizer.from_pretrained(checkpoint or args.tokenizer)
    else:
        lines = (text for pair in pairs for text in pair)
        try:
            tokenizer = VaswaniTokenizer.train_from_iterator(
                lines,
                args.tokenizer_kind,
                args.vocab_size,
                pattern=args.pattern,
                space_after=args.space_after,
                split_punctuation=args.split_punctuation,
            )
        except ValueError as error:
            sys.exit(f"train_translation.py: {error}")
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
        **settings(args.set),
    }
    try:
        config = VaswaniConfig.preset(args.preset, **fields)
    except (ValueError, StrictDataclassError) as error:
        sys.exit(f"train_translation.py: {error}")
    return VaswaniForConditionalGeneration(config), tokenizer


def training_arguments(args: argparse.Namespace, d_model: int) -> Seq2SeqTrainingArguments:
    """The paper's optimizer and schedule (5.3) in transformers' words."""
    evaluation = "steps" if args.valid else "no"
    fields = {
        "output_dir": args.output,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "train_sampling_strategy": "group_by_length",
        "learning_rate": args.learning_rate or (d_model * args.warmup) ** -0.5,
        # transformers' nearest to "noam", which VaswaniTrainer makes itself.
        "lr_scheduler_type": "inverse_sqrt" if args.scheduler == "noam" else args.scheduler,
        "warmup_steps": args.warmup,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "bf16": args.bf16,
        **device_settings(),
        "seed": args.seed,
        "logging_steps": 100,
        "eval_strategy": evaluation,
        "eval_steps": args.eval_steps,
        "save_steps": args.save_steps or args.eval_steps,
        # The best one may be older than those to average.
        "save_total_limit": max(args.average, 5) + bool(args.patience),
        "metric_for_best_model": args.score if args.patience else None,
        "greater_is_better": True if args.patience else None,
        "predict_with_generate": True,
        "generation_num_beams": 1,
        "report_to": "tensorboard",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    try:
        return Seq2SeqTrainingArguments(**{**fields, **settings(args.trainer)})
    except (TypeError, ValueError) as error:
        sys.exit(f"train_translation.py: {error}")


class OrderedEvaluation(VaswaniTrainer):
    """VaswaniTrainer that evaluates in file order, where each prediction meets its reference.

    transformers' "group_by_length" shuffles the evaluation set, too.
    """

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)


class StopAfter(TrainerCallback):
    """Stop training once its time is up."""

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the clock."""
        late = torch.tensor(float(time.monotonic() - self.start > self.seconds), device=args.device)
        if args.world_size > 1:
            # Clocks differ: a process that stopped alone would leave the others waiting for it.
            torch.distributed.all_reduce(late)
        if late > 0:
            control.should_training_stop = True
            # For --average and --resume, as transformers does after the last of the steps.
            control.should_save = args.save_strategy != "no"


class StopWithoutProgress(TrainerCallback):
    """Stop training after so many evaluations without a better score than before.

    It counts in the log, which checkpoints hold: transformers' EarlyStoppingCallback starts anew in
    a resumed run.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the evaluations since the best."""
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        sign = 1 if args.greater_is_better else -1
        scores = [sign * entry[name] for entry in state.log_history if name in entry]
        if scores and len(scores) - 1 - scores.index(max(scores)) >= self.patience:
            control.should_training_stop = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End at once a run that was killed after it had stopped."""
        self.on_evaluate(args, state, control)


def checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    """The checkpoint to go on from; none for a new run, or one killed before its first."""
    output = Path(args.output)
    if args.resume == "must" and not output.is_dir():
        sys.exit(
            f"--resume: no checkpoint in {args.output}: there is no such folder (--resume auto "
            "begins a new run there)"
        )
    if args.resume and (checkpoint := last_complete_checkpoint(output)):
        return checkpoint
    if args.resume and PartialState().is_main_process:
        print(f"There is no complete checkpoint in {output}: training from the start.")
    if not args.resume and output.is_dir() and (earlier := run_checkpoints(output)):
        sys.exit(f"{earlier[-1]} is from an earlier run: pass --resume or another --output")
    if models := sorted(output.glob("model*.safetensors")):
        sys.exit(f"{models[0]} would be replaced: pass another --output, or remove the model")
    # Before all else, so that --resume finds it after a kill in the first seconds.
    output.mkdir(parents=True, exist_ok=True)
    return None


def average(args: argparse.Namespace, model: PreTrainedModel) -> list[str]:
    """Make the saved model the mean of the last checkpoints (6.1); return their names."""
    complete = [path for path in run_checkpoints(Path(args.output)) if flaw_of(path) is None]
    checkpoints = complete[-args.average :]
    with replaced_files(Path(args.output)) as folder:
        mean = average_checkpoints(checkpoints, folder / "mean")
        averaged = AutoModelForSeq2SeqLM.from_pretrained(mean, dtype=model.dtype)
        model.load_state_dict(averaged.state_dict())
        shutil.rmtree(mean)
        model.save_pretrained(folder)
    return [path.name for path in checkpoints]


class Scores:
    """The figures of a finished model, decoding as it is saved (6.1)."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        metric: TranslationMetric,
    ) -> None:
        self.args, self.model, self.metric = args, model, metric
        self.translator = VaswaniTranslationPipeline(
            model, tokenizer, target_tokenizer, device=model.device
        )

    def __call__(self, pairs: list[Pair], beams: int, nbest: int = 1) -> dict[str, Any]:
        """Translate; return the translations, best first, beside their scores."""
        started = time.monotonic()
        sources, references = zip(*pairs, strict=True)
        outputs = self.translator(
            iter(sources), num_beams=beams, num_return_sequences=nbest, progress=True
        )
        # One translation a line: the model may write a line break as any other character.
        candidates = [
            [" ".join(output["translation_text"].splitlines()) for output in best]
            for best in outputs
        ]
        figures = self.metric.compute(
            predictions=[best for best, *_ in candidates], references=references
        )
        names = ("chrf", "compound_split_bleu", "exact_match")
        signatures = ("chrf_signature", "compound_split_bleu_signature")
        scores = {
            "bleu": round(figures["bleu"], 2),
            "brevity_penalty": round(figures["brevity_penalty"], 4),
            "signature": figures["bleu_signature"],
            **{name: round(figures[name], 2) for name in names},
            **{name: figures[name] for name in signatures},
            "beams": beams,
            "seconds": round(time.monotonic() - started, 1),
        }
        if nbest > 1:
            accuracy = nbest_accuracy(candidates, references)
            scores["nbest_accuracy"] = [round(figure, 2) for figure in accuracy]
        return {"candidates": candidates, "scores": scores}

    def validation(self, pairs: list[Pair], batches: DataLoader) -> dict[str, Any]:
        """Perplexity, and the scores of greedy and of beam search."""
        perplexity = evaluate_perplexity(self.model, batches)
        greedy, beam = (self(pairs, beams)["scores"] for beams in (1, self.args.beams))
        return {**perplexity, "greedy_bleu": greedy["bleu"], **beam}

    def test(self, pairs: list[Pair]) -> dict[str, Any]:
        """Translate the test set, write test.txt and show some of it."""
        results = self(pairs, self.args.beams, self.args.nbest)
        candidates, scores = results["candidates"], results["scores"]
        lines = "".join(f"{best}\n" for best, *_ in candidates)
        write(Path(self.args.output) / "test.txt", lines)
        print(f"Test BLEU {scores['bleu']}  ({scores['signature']})")
        print(f"Exactly right {scores['exact_match']}%")
        scores["samples"] = [
            {"source": source, "translation": best, "reference": reference}
            for (source, reference), (best, *_) in list(zip(pairs, candidates, strict=True))[:3]
        ]
        for sample in scores["samples"]:
            print("".join(f"  {name:11} {text}\n" for name, text in sample.items()))
        return scores


def write(path: Path, text: str) -> None:
    """Write a file that is whole or, if that fails, as it was before."""
    with replaced_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command line."""
    args = parse_args()
    check_places(args)
    try:
        train_and_score(args)
    except (FloatingPointError, OSError) as error:
        sys.exit(f"train_translation.py: {error}")


def train_and_score(args: argparse.Namespace) -> None:
    """Train a model, save it and score what was saved."""
    processes = join_processes()
    if processes.is_main_process:
        print(describe_processes(processes), flush=True)
    checkpoint = of_main_process(checkpoint_to_resume(args))
    results = circumstances()
    set_seed(args.seed)
    train_pairs = read_pairs(args.train, args.columns, "train")
    valid_pairs = read_pairs(args.valid, args.columns, "validation") if args.valid else []
    test_pairs = read_pairs(args.test, args.columns, "test") if args.test else []
    model, tokenizer = build(args, train_pairs, checkpoint)
    target_tokenizer = model.target_tokenizer(tokenizer)  # another where vocabularies are separate
    parameters = model.num_parameters()
    if processes.is_main_process:
        print(f"{len(train_pairs)} pairs, {len(tokenizer)} tokens, {parameters:,} parameters.")

    try:
        model.generation_config.update(**{"num_beams": args.beams, **settings(args.generation)})
    except ValueError as error:  # beside what the checkpoint of --model says
        sys.exit(f"train_translation.py: --generation: {error}")
    metric = TranslationMetric(args.bleu_tokenize)
    references = [target for _, target in valid_pairs]

    def score_validation(prediction: EvalPrediction) -> dict[str, float]:
        # Several processes repeat sentences at the end, so that each has as many batches.
        rows = prediction.predictions[: len(references)].tolist()
        hypotheses = target_tokenizer.batch_decode(
            [[token for token in row if token >= 0] for row in rows], skip_special_tokens=True
        )
        scores = metric.compute(predictions=hypotheses, references=references)
        return {name: scores[name] for name in {"bleu", "chrf", args.score}}

    callbacks: list[TrainerCallback] = [LearningCurve(args.score)]
    if args.minutes:
        callbacks.append(StopAfter(args.minutes))
    if args.patience:
        callbacks.append(StopWithoutProgress(args.patience))
    noam = {}
    if args.scheduler == "noam":
        scale = math.sqrt(model.config.d_model * args.warmup)
        factor = args.learning_rate * scale if args.learning_rate else 1.0
        noam = {"noam_warmup_steps": args.warmup, "noam_factor": factor}
    plain = encoders(tokenizer, target_tokenizer)
    trainer = OrderedEvaluation(
        model=model,
        args=training_arguments(args, model.config.d_model),
        train_dataset=training_data(args, train_pairs, tokenizer, target_tokenizer),
        eval_dataset=tokenized(valid_pairs, plain) if valid_pairs else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=score_validation,
        callbacks=callbacks,
        max_source_tokens=args.max_source_tokens,
        max_target_tokens=args.max_target_tokens,
        r_drop=args.r_drop,
        **noam,
    )
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    results |= {
        "training_minutes": round((time.monotonic() - started) / 60, 1),
        "resumed": checkpoint is not None,
        "steps": trainer.state.global_step,
        "parameters": parameters,
        "pairs": {"train": len(train_pairs), "valid": len(valid_pairs), "test": len(test_pairs)},
        "settings": vars(args),
        "arguments": trainer.settings(),
    }
    trainer.save_model()
    if target_tokenizer is not tokenizer and trainer.is_world_process_zero():
        with replaced_files(Path(args.output) / "target_tokenizer") as folder:
            target_tokenizer.save_pretrained(folder)
    if trainer.is_world_process_zero():
        # What is scored is what was saved, whatever wrapped the model while it was trained.
        forget_sharding()
        model = AutoModelForSeq2SeqLM.from_pretrained(args.output)
        if args.average > 1:
            results["averaged"] = average(args, model)
        model.to(trainer.args.device).eval()
        score = Scores(args, model, tokenizer, target_tokenizer, metric)
        if valid_pairs:
            batches = DataLoader(
                trainer.eval_dataset.remove_columns("length"),
                batch_size=args.batch_size,
                collate_fn=trainer.data_collator,
            )
            results["valid"] = score.validation(valid_pairs, batches)
        if test_pairs:
            results["test"] = score.test(test_pairs)
        results["weights_sha256"] = weights_sha256(args.output)
        results["log"] = trainer.state.log_history
        for path in filter(None, (Path(args.output) / "results.json", args.results)):
            write(Path(path), json.dumps(results, indent=1) + "\n")
        write(Path(args.output) / "recipe.yaml", recipe_of(args))
        write_model_card(args.output)
        if args.push_to_hub:
            model.push_to_hub(args.push_to_hub)
            tokenizer.push_to_hub(args.push_to_hub)
            if target_tokenizer is not tokenizer:
                folder = Path(args.output) / "target_tokenizer"
                upload_folder(
                    repo_id=args.push_to_hub, folder_path=folder, path_in_repo=folder.name
                )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
