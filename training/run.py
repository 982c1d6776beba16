"""A complete run of `vaswani train`: data, model, training, the saved model and its scores.

The options of a run are those of the command, as an `argparse.Namespace`.
"""

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from huggingface_hub import upload_folder
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)

from ..configuration.extras import needs
from ..corpora.atomic_folder import replaced_file, replaced_files
from ..corpora.reading import Pair
from ..corpora.text_stream import TextStream
from ..corpora.tokenising import tokenised
from ..generation.pipeline_vaswani import VaswaniTranslationPipeline
from .averaging import average_checkpoints
from .checkpoints import checkpoints_to_average, last_complete_checkpoint, run_checkpoints
from .circumstances import circumstances, weights_sha256
from .objective import Objective
from .objectives import make_objective
from .processes import (
    describe_processes,
    forget_sharding,
    join_processes,
    of_main_process,
    patient_barrier,
    uses_deepspeed,
)
from .progress import EvaluateAtEnd, ProgressLine, StopAfter, StopWithoutProgress, in_terminal
from .rewards import bleu_of
from .run_arguments import RunError, training_arguments
from .run_data import RunData, TrainingPairs, local_places
from .run_model import check_positions, model_of, set_search
from .run_trainer import RunTrainer

with needs("vaswani[train]"):
    import datasets

    from .curves import LearningCurve
    from .metrics import TranslationMetric, evaluate_perplexity
    from .scores import translate_and_score


_ROWS_COUNTED = 1000  # of the validation set, for the share of unknown tokens
_MANY_UNKNOWN = 0.05


class TrainingRun:
    """One run of `vaswani train`.

    Args:
        options: options of the command line, with NAME=VALUE settings as dictionaries.

    Raises:
        DataError, RunError: the data or the options are wrong. The message says how.
        FloatingPointError, OSError: see VaswaniTrainer.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        if not in_terminal(sys.stderr):
            datasets.disable_progress_bars()
        self.options, self.output = options, Path(options.output)
        self.processes = join_processes()
        self.say(describe_processes(self.processes))
        self.checkpoint = of_main_process(self._checkpoint_to_resume())
        try:
            self.metric = TranslationMetric(options.bleu_tokenize)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise RunError(f"--bleu-tokenize {options.bleu_tokenize}: {error}") from error
        if not uses_deepspeed():  # DeepSpeed's arguments would shard models made later
            training_arguments(options, d_model=512)  # refuses wrong values before data are read
        self.circumstances = circumstances()
        set_seed(options.seed)
        self.data = RunData(options, self._say_of_machine)
        if self.data.is_mixed and not options.max_source_tokens:
            raise RunError(
                "Weights (=WEIGHT) and --temperature need token batches: pass --max-source-tokens."
            )
        self.valid_pairs = self._pairs("valid", "validation")
        self.test_parts = self.data.evaluation_pairs("test", "test")
        # One process prepares the data, and that may take longer than the usual timeout.
        wait_for_all = patient_barrier()
        self.model, tokenizers = model_of(options, self.data, self.checkpoint)
        self.beams = set_search(self.model, options)
        limit = self.model.config.position_limit
        check_positions(limit, options.max_length, self.valid_pairs, self.test_pairs, tokenizers)
        self.tokenizer, self.target_tokenizer = tokenizers
        self.train_pairs: TrainingPairs | TextStream
        if options.stream:
            self.train_pairs = self.data.stream(self.tokenizer, self.target_tokenizer)
        else:
            self.train_pairs = self.data.prepare(self.tokenizer, self.target_tokenizer)
        wait_for_all()
        self.parameters = self.model.num_parameters()
        self._describe()

    def say(self, text: str) -> None:
        """Print in the main process."""
        if self.processes.is_main_process:
            print(text, flush=True)  # noqa: T201  a command may print

    def _describe(self) -> None:
        pairs = self.train_pairs
        read = "a stream of" if isinstance(pairs, TextStream) else f"{pairs.read:,}"
        self.say(
            f"{read} pairs, {len(self.tokenizer):,} tokens in the vocabulary, "
            f"{self.parameters:,} parameters"
        )
        if isinstance(pairs, TrainingPairs) and pairs.dropped:
            self.say(pairs.describe_dropped())

    def _say_of_machine(self, text: str) -> None:
        """Print in any process, because each machine prepares its own data."""
        print(text, flush=True)  # noqa: T201

    def _pairs(self, option: str, split: str) -> list[Pair]:
        return [pair for part in self.data.evaluation_pairs(option, split) for pair in part]

    @property
    def test_pairs(self) -> list[Pair]:
        """Pairs of all test sets."""
        return [pair for part in self.test_parts for pair in part]

    def _checkpoint_to_resume(self) -> Path | None:
        """Return the checkpoint to continue from, or None for a new run."""
        resume, output = self.options.resume, self.output
        if resume == "must" and not output.is_dir():
            raise RunError(
                f"--resume: there is no folder {output}, so it has no checkpoint (--resume auto "
                "starts a new run there)"
            )
        if resume and (checkpoint := last_complete_checkpoint(output)):
            return checkpoint
        if resume:
            self.say(f"There is no complete checkpoint in {output}: training from the start.")
        elif output.is_dir() and (earlier := run_checkpoints(output)):
            raise RunError(
                f"{earlier[-1]} is from an earlier run: pass --resume or another --output"
            )
        if models := sorted(output.glob("model*.safetensors")):
            raise RunError(f"{models[0]} would be replaced: pass another --output, or remove it")
        # Make the folder now, so that --resume finds it even after a kill in the first seconds.
        output.mkdir(parents=True, exist_ok=True)
        return None

    @cached_property
    def trainer(self) -> RunTrainer:
        """The trainer, with data and callbacks."""
        options, model = self.options, self.model
        pairs, valid_data = self.train_pairs, None
        if self.valid_pairs:
            valid_data = tokenised(self.valid_pairs, self.tokenizer, self.target_tokenizer)
            self._warn_of_unknown_tokens(valid_data)
        noam = {}
        if options.scheduler == "noam":
            scale = math.sqrt(model.config.d_model * options.warmup)
            factor = options.learning_rate * scale if options.learning_rate else 1.0
            noam = {"noam_warmup_steps": options.warmup, "noam_factor": factor}
        trainer = RunTrainer(
            model=model,
            args=training_arguments(options, model.config.d_model),
            train_dataset=pairs if isinstance(pairs, TextStream) else pairs.dataset,
            eval_dataset=valid_data,
            data_collator=DataCollatorForSeq2Seq(self.tokenizer, model=model),
            processing_class=self.tokenizer,
            compute_metrics=self._score_validation,
            callbacks=self._callbacks(),
            max_source_tokens=options.max_source_tokens,
            max_target_tokens=options.max_target_tokens,
            batching=options.batching,
            lengths=None if isinstance(pairs, TextStream) else pairs.lengths,
            mixture=None if isinstance(pairs, TextStream) else pairs.mixture,
            stream_buffer=options.stream_buffer,
            muon=options.muon or 0.0,
            objective=self._objective(),
            r_drop=options.r_drop,
            **noam,
        )
        if self.target_tokenizer is not self.tokenizer:
            trainer.target_tokenizer = self.target_tokenizer
        trainer.remove_callback(PrinterCallback)  # ProgressLine prints
        return trainer

    def _warn_of_unknown_tokens(self, valid_data: Any) -> None:
        """Warn if the vocabulary does not fit the data: a loss over unknown tokens looks good."""
        rows = valid_data[:_ROWS_COUNTED]
        shares = {
            side: _share_of_unknown(tokenizer, rows[column])
            for side, column, tokenizer in (
                ("source", "input_ids", self.tokenizer),
                ("target", "labels", self.target_tokenizer),
            )
        }
        if max(shares.values()) > _MANY_UNKNOWN:
            listed = " and ".join(
                f"{share:.0%} of the {side} tokens" for side, share in shares.items()
            )
            self.say(
                f"Warning: {listed} of the validation set are unknown to the vocabulary. Choose "
                "another --tokenizer-kind, a larger --vocab-size, or a --model or --tokenizer that "
                "belongs to these data."
            )

    def _objective(self) -> Objective | None:
        options = self.options
        if options.objective is None:
            return None
        settings = dict(options.objective_settings)
        if options.objective in ("risk", "reinforce") and settings.get("reward", "bleu") == "bleu":
            settings["reward"] = bleu_of(options.bleu_tokenize)
        return make_objective(options.objective, **settings)

    def _callbacks(self) -> list[TrainerCallback]:
        options = self.options
        callbacks: list[TrainerCallback] = [
            ProgressLine(options.score, options.minutes),
            LearningCurve(options.score),
        ]
        if options.minutes:
            callbacks.append(StopAfter(options.minutes))
        if options.patience:
            callbacks.append(StopWithoutProgress(options.patience))
        return [*callbacks, EvaluateAtEnd()]

    def _score_validation(self, prediction: EvalPrediction) -> dict[str, float]:
        references = [target for _, target in self.valid_pairs]
        # Several processes repeat sentences at the end, so that all have the same number of
        # batches.
        rows = np.asarray(prediction.predictions)[: len(references)].tolist()
        hypotheses = self.target_tokenizer.batch_decode(
            [[token for token in row if token >= 0] for row in rows], skip_special_tokens=True
        )
        scores = self.metric.compute(predictions=hypotheses, references=references)
        return {name: scores[name] for name in {"bleu", "chrf", self.options.score}}

    def train(self) -> dict[str, Any]:
        """Train and save the model, and return the training part of the results file."""
        started = time.monotonic()
        trainer = self.trainer
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        step, warmup = trainer.state.global_step, self.options.warmup
        if step < warmup:
            self.say(
                f"Warning: the run ended at update {step}, inside the warm-up of {warmup} updates. "
                "The learning rate did not reach its peak: train longer, or pass "
                f"--warmup {max(step // 10, 1)}."
            )
        pairs = self.train_pairs
        data = None if isinstance(pairs, TextStream) else pairs.report()
        results = {
            **self.circumstances,
            "training_minutes": round((time.monotonic() - started) / 60, 1),
            "resumed": self.checkpoint is not None,
            "steps": step,
            "parameters": self.parameters,
            "pairs": {
                "train": data and data["read"],
                "valid": len(self.valid_pairs),
                "test": len(self.test_pairs),
            },
            "data": data,
            "settings": vars(self.options),
            "local": local_places(self.options),
            "arguments": trainer.settings(),
        }
        trainer.save_model()
        return results

    def finish(self, results: dict[str, Any]) -> None:
        """Average and score the saved model, and write results.json, in the main process."""
        # Score the saved model, not the wrapped model of the trainer.
        forget_sharding()
        model = AutoModelForSeq2SeqLM.from_pretrained(self.output)
        if self.options.average > 1:
            results["averaged"] = self._average(model)
        model.to(self.trainer.args.device).eval()
        self.model = model
        translator = VaswaniTranslationPipeline(
            model, self.tokenizer, self.target_tokenizer, device=model.device
        )
        if self.valid_pairs:
            results["valid"] = self._scores_of_validation(translator)
        if self.test_pairs:
            results["test"] = self._scores_of_test(translator)
        results["weights_sha256"] = weights_sha256(self.output)
        results["log"] = self.trainer.state.log_history
        for path in filter(None, (self.output / "results.json", self.options.results)):
            write(Path(path), json.dumps(results, indent=1) + "\n")

    def _average(self, model: PreTrainedModel) -> list[str]:
        """Replace the saved model by the mean of the last checkpoints (6.1). Return their names."""
        found = checkpoints_to_average(self.output, self.trainer.state.global_step)
        checkpoints = found[-self.options.average :]
        if not checkpoints:
            return []
        with replaced_files(self.output) as folder:
            mean = average_checkpoints(checkpoints, folder / "mean")
            averaged = AutoModelForSeq2SeqLM.from_pretrained(mean, dtype=model.dtype)
            model.load_state_dict(averaged.state_dict())
            shutil.rmtree(mean)
            model.save_pretrained(folder)
        if len(checkpoints) > 1:
            self.say(f"The model is the mean of the last {len(checkpoints)} checkpoints.")
        elif self.options.average > 1:
            self.say("The model is not averaged, because the run has only one checkpoint.")
        return [path.name for path in checkpoints]

    def _scores_of_validation(self, translator: VaswaniTranslationPipeline) -> dict[str, Any]:
        """Return perplexity and the scores of greedy and beam search on the validation set."""
        batches = DataLoader(
            cast(Any, self.trainer.eval_dataset).remove_columns("length"),
            batch_size=self.options.batch_size,
            collate_fn=self.trainer.data_collator,
        )
        perplexity = evaluate_perplexity(translator.model, batches)
        scores = []
        for beams, search in ((1, "greedy search"), (self.beams, "beam search")):
            self.say(f"Translating the validation set with {search} ...")
            scores.append(translate_and_score(translator, self.metric, self.valid_pairs, beams)[0])
        return {**perplexity, "greedy_bleu": scores[0]["bleu"], **scores[1]}

    def _scores_of_test(self, translator: VaswaniTranslationPipeline) -> dict[str, Any]:
        """Return the scores of the test sets, and write their translations to test.txt.

        With several test sets, `corpora` has the scores of each test set in their order.
        """
        self.say("Translating the test set with beam search ...")
        parts, lines = [], []
        for pairs in self.test_parts:
            scores, candidates = translate_and_score(
                translator, self.metric, pairs, self.beams, self.options.nbest
            )
            # A translation may contain line breaks. Replace them, so that it stays one line.
            lines += [" ".join(best.splitlines()) for best, *_ in candidates]
            scores["samples"] = [
                {"source": source, "translation": best, "reference": reference}
                for (source, reference), (best, *_) in list(zip(pairs, candidates, strict=True))[:3]
            ]
            parts.append(scores)
        write(self.output / "test.txt", "".join(f"{line}\n" for line in lines))
        if len(parts) == 1:
            return parts[0]
        corpora = self.data.corpora_of("test", "test")
        named = [
            {"data": corpus.name, "tag": corpus.tag, **scores}
            for corpus, scores in zip(corpora, parts, strict=True)
        ]
        # The card and tables show the scores of the first test set.
        return {**parts[0], "corpora": named}

    def push(self, repo_id: str) -> None:
        """Upload the finished model and its tokenizers.

        Raises:
            RunError: the upload failed. The message says where the model is.
        """
        try:
            cast(Any, self.model).push_to_hub(repo_id)
            self.tokenizer.push_to_hub(repo_id)
            if self.target_tokenizer is not self.tokenizer:
                folder = self.output / "target_tokenizer"
                upload_folder(repo_id=repo_id, folder_path=folder, path_in_repo=folder.name)
        except Exception as error:  # the libraries below have many kinds of errors
            raise RunError(
                f"The model is complete in {self.output}, but its upload to {repo_id} failed: "
                f"{error}. Upload it with: hf upload {repo_id} {shlex.quote(str(self.output))} "
                "--exclude 'checkpoint-*'"
            ) from error


def _share_of_unknown(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> float:
    """Return the share of unknown tokens in rows; 0 if the end token is the unknown token too."""
    unknown: Any = tokenizer.unk_token_id
    if unknown in (None, tokenizer.eos_token_id):
        return 0.0
    return sum(row.count(unknown) for row in rows) / max(sum(map(len, rows)), 1)


def write(path: Path, text: str) -> None:
    """Write a file completely, or leave it unchanged if writing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


__all__ = ["RunError", "TrainingRun", "write"]
