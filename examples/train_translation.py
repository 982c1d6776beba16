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

Several processes or GPUs: put `accelerate launch` in place of `python`. The output folder holds the
model, its tokenizer, TensorBoard logs and results.json with the scores.
"""

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from datasets import Dataset, load_dataset
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from translate import read_lines, translate

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

Pair = tuple[str, str]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    add("--accumulate", type=int, default=1, help="batches per update (default: 1)")
    add("--warmup", type=int, default=4000, help="updates of rising learning rate (default: 4000)")
    add(
        "--learning-rate",
        type=float,
        help="its peak (default: the paper's, 1 / sqrt(d_model * warmup), section 5.3)",
    )
    add(
        "--scheduler",
        default="inverse_sqrt",
        help="any of transformers' (default: inverse_sqrt, section 5.3)",
    )
    add(
        "--bf16",
        action="store_true",
        help="compute in bfloat16 where it is safe, faster where supported",
    )
    add(
        "--eval-steps",
        type=int,
        default=1000,
        help="updates between evaluations and saves (default: 1000)",
    )
    add(
        "--seed",
        type=int,
        default=42,
        help="of initialisation, shuffling and dropout (default: 42)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the output folder",
    )
    add(
        "--trainer",
        nargs="+",
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
    add("--push-to-hub", metavar="HUB_ID", help="upload the finished model to this repository")
    args = parser.parse_args(argv)
    if args.model and (args.set or args.tokenizer):
        parser.error("--model keeps its own sizes and tokenizer: leave out --set and --tokenizer")
    for name in ("steps", "batch_size", "accumulate", "warmup", "eval_steps", "beams"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    return args


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


def read_pairs(data: list[str], columns: tuple[str, str], default_split: str) -> list[Pair]:
    """Load source and target lines from any of the forms in the module docstring.

    Exits with the file and line where something is wrong: a file is missing or empty, parallel
    files differ in length, a record lacks a column.
    """
    name = data[0]
    if len(data) == 2:
        sources, targets = ([text for _, text in read_lines(existing(path))] for path in data)
        if len(sources) != len(targets):
            sys.exit(
                f"{data[0]} has {len(sources)} lines, {data[1]} has {len(targets)}: parallel files "
                f"must match; line {min(len(sources), len(targets)) + 1} has no partner."
            )
        pairs = list(zip(sources, targets, strict=True))
    elif len(data) > 2:
        sys.exit(f"Expected one file, two parallel files or a data set, got {len(data)}: {data}")
    elif name.removesuffix(".gz").endswith(".tsv"):
        pairs = [
            tsv_pair(line, name, number)
            for number, line in read_lines(existing(name))
            if line.strip()
        ]
    elif name.removesuffix(".gz").endswith((".jsonl", ".json")):
        pairs = [
            json_pair(line, columns, name, number)
            for number, line in read_lines(existing(name))
            if line.strip()
        ]
    else:
        data_set, _, split = name.partition(":")
        hub_id, _, configuration = data_set.partition("@")
        try:
            rows = load_dataset(hub_id, configuration or None, split=split or default_split)
        except (ConnectionError, OSError, ValueError) as error:
            sys.exit(f"{name} is neither a file here nor a data set that can be loaded: {error}")
        pairs = [row_pair(row, columns, name, number) for number, row in enumerate(rows, start=1)]
    if not pairs:
        sys.exit(f"{' '.join(data)} is empty: no sentence pairs.")
    return pairs


def existing(path: str) -> str:
    """Return `path`; exit if there is no such file."""
    if not Path(path).is_file():
        sys.exit(f"No such file: {path}")
    return path


def tsv_pair(line: str, name: str, number: int) -> Pair:
    """Split a TSV line; further columns are ignored."""
    fields = line.split("\t")
    if len(fields) < 2:
        sys.exit(f"{name}, line {number}: no tab between source and target: {line!r}")
    return fields[0], fields[1]


def json_pair(line: str, columns: tuple[str, str], name: str, number: int) -> Pair:
    """Read a JSON line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        sys.exit(f"{name}, line {number}: not JSON ({error})")
    return row_pair(row, columns, name, number)


def row_pair(row: dict[str, Any], columns: tuple[str, str], name: str, number: int) -> Pair:
    """Pick the two columns of a record, or of its "translation" as many data sets have it."""
    if isinstance(row.get("translation"), dict):
        row = row["translation"]
    missing = [column for column in columns if column not in row]
    if missing:
        sys.exit(
            f"{name}, record {number} has no {missing[0]!r} but {', '.join(map(repr, row))}: "
            "name the two to use with --columns."
        )
    return row[columns[0]], row[columns[1]]


def tokenized(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> Dataset:
    """Turn pairs into token ids; by `length` the Trainer puts similar pairs in a batch."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        encoded = tokenizer(batch["source"], text_target=batch["target"])
        lengths = [
            max(map(len, pair))
            for pair in zip(encoded["input_ids"], encoded["labels"], strict=True)
        ]
        return {"input_ids": encoded["input_ids"], "labels": encoded["labels"], "length": lengths}

    sources, targets = zip(*pairs, strict=True)
    data = Dataset.from_dict({"source": sources, "target": targets})
    data = data.map(encode, batched=True, remove_columns=["source", "target"], desc="Tokenizing")
    if max_length is None:
        return data
    kept = data.filter(
        lambda lengths: [n <= max_length for n in lengths], input_columns="length", batched=True
    )
    if len(kept) < len(data):
        print(
            f"Dropped {len(data) - len(kept)} of {len(data)} pairs longer than {max_length} tokens."
        )
    if not len(kept):
        sys.exit(f"All {len(data)} training pairs are longer than --max-length {max_length}.")
    return kept


def build(
    args: argparse.Namespace, pairs: list[Pair]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the checkpoint to fine-tune, or train a vocabulary and make a fresh model."""
    if args.resume:
        # The checkpoint's tokenizer, not one trained again: the data may have changed since.
        args.tokenizer = get_last_checkpoint(args.output)
    if args.model:
        return (
            AutoModelForSeq2SeqLM.from_pretrained(args.model),
            AutoTokenizer.from_pretrained(args.model),
        )
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        lines = (text for pair in pairs for text in pair)
        tokenizer = VaswaniTokenizer.train_from_iterator(
            lines, kind=args.tokenizer_kind, vocab_size=args.vocab_size
        )
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
        "lr_scheduler_type": args.scheduler,
        "warmup_steps": args.warmup,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "bf16": args.bf16,
        # transformers believes in bfloat16 on a CPU only if told that the CPU is meant.
        "use_cpu": not torch.accelerator.is_available(),
        "seed": args.seed,
        "logging_steps": 100,
        "eval_strategy": evaluation,
        "eval_steps": args.eval_steps,
        "save_steps": args.eval_steps,
        "save_total_limit": 5,
        "predict_with_generate": True,
        "generation_num_beams": 1,
        "report_to": "tensorboard",
        "push_to_hub": args.push_to_hub is not None,
        "hub_strategy": "end",
        "hub_model_id": args.push_to_hub,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    try:
        return Seq2SeqTrainingArguments(**{**fields, **settings(args.trainer)})
    except (TypeError, ValueError) as error:
        sys.exit(f"train_translation.py: {error}")


class OrderedEvaluation(Seq2SeqTrainer):
    """Seq2SeqTrainer that evaluates in file order, where each prediction meets its reference.

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


def bleu(hypotheses: list[str], references: list[str], tokenize: str) -> dict[str, Any]:
    """Corpus BLEU by sacreBLEU, with the signature that makes the number comparable."""
    metric = sacrebleu.BLEU(tokenize=tokenize, force=True)
    score = metric.corpus_score(hypotheses, [references])
    return {
        "bleu": round(score.score, 2),
        "brevity_penalty": round(score.bp, 4),
        "signature": str(metric.get_signature()),
    }


def circumstances() -> dict[str, Any]:
    """What a reader needs to repeat a run: command, commit, machine, versions, date."""
    commit = ""
    if git := shutil.which("git"):
        describe = [git, "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
        commit = subprocess.run(
            describe, capture_output=True, text=True, check=False
        ).stdout.strip()
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    packages = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit or "unknown",
        "hardware": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    """Run the command line."""
    args = parse_args()
    finished = get_last_checkpoint(args.output) if Path(args.output).is_dir() else None
    if args.resume and finished is None:
        sys.exit(f"--resume: no checkpoint in {args.output}")
    if finished and not args.resume:
        sys.exit(f"{finished} is from an earlier run: pass --resume or another --output")
    results = circumstances()
    set_seed(args.seed)
    train_pairs = read_pairs(args.train, args.columns, "train")
    valid_pairs = read_pairs(args.valid, args.columns, "validation") if args.valid else []
    test_pairs = read_pairs(args.test, args.columns, "test") if args.test else []
    model, tokenizer = build(args, train_pairs)
    print(
        f"{len(train_pairs)} pairs, {len(tokenizer)} tokens, {model.num_parameters():,} parameters."
    )

    # Evaluation writes transformers' own defaults into the model's: keep these for the end.
    generation_config = copy.deepcopy(model.generation_config)
    generation_config.num_beams = args.beams

    def score_validation(prediction: EvalPrediction) -> dict[str, float]:
        hypotheses = tokenizer.batch_decode(
            [[token for token in row if token >= 0] for row in prediction.predictions.tolist()],
            skip_special_tokens=True,
        )
        references = [target for _, target in valid_pairs]
        return {"bleu": bleu(hypotheses, references, args.bleu_tokenize)["bleu"]}

    trainer = OrderedEvaluation(
        model=model,
        args=training_arguments(args, model.config.d_model),
        train_dataset=tokenized(train_pairs, tokenizer, args.max_length),
        eval_dataset=tokenized(valid_pairs, tokenizer) if valid_pairs else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=score_validation,
        callbacks=[StopAfter(args.minutes)] if args.minutes else None,
    )
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=args.resume or None)
    results |= {
        "training_minutes": round((time.monotonic() - started) / 60, 1),
        "resumed": args.resume,
        "steps": trainer.state.global_step,
        "parameters": model.num_parameters(),
    }
    model.generation_config = generation_config
    trainer.save_model()
    if valid_pairs:
        evaluation = trainer.evaluate()
        results["valid"] = {"loss": evaluation["eval_loss"], "greedy_bleu": evaluation["eval_bleu"]}
        model.generation_config = generation_config
    if trainer.is_world_process_zero():
        if test_pairs:
            results["test"] = score_test(args, model.eval(), tokenizer, test_pairs)
        results["log"] = trainer.state.log_history
        for path in filter(None, (Path(args.output) / "results.json", args.results)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.push_to_hub:
        trainer.push_to_hub()


def score_test(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
) -> dict[str, Any]:
    """Translate the test set (6.1), write the translations, return the scores."""
    started = time.monotonic()
    sources, references = zip(*pairs, strict=True)
    outputs = translate(model, tokenizer, sources, num_beams=args.beams)
    hypotheses = [hypothesis for ((hypothesis, _), *_) in outputs]
    (Path(args.output) / "test.txt").write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
    scores = {
        **bleu(hypotheses, list(references), args.bleu_tokenize),
        "beams": args.beams,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(f"Test BLEU {scores['bleu']}  ({scores['signature']})")
    for source, hypothesis, reference in list(zip(sources, hypotheses, references, strict=True))[
        :3
    ]:
        print(f"  source      {source}\n  translation {hypothesis}\n  reference   {reference}\n")
    return scores


if __name__ == "__main__":
    main()
