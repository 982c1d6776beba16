"""The trainer's saves: complete or not at all, with a model card, and pushed when complete."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Seq2SeqTrainer
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ..corpora.atomic_folder import failed_save, is_failed_write, replaced_file, replaced_files
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from .checkpoints import (
    begin_checkpoint,
    discard_checkpoint,
    finish_checkpoint,
    is_being_saved,
    last_complete_checkpoint,
    limit_checkpoints,
    run_folder,
)
from .circumstances import circumstances, weights_sha256
from .processes import whole_weights

logger = logging.get_logger(__name__)

_CARD = "README.md"


class SafeSaving(Seq2SeqTrainer):
    """Seq2SeqTrainer whose checkpoints, models and pushes are complete or missing, never partial.

    Raises:
        OSError: a checkpoint could not be saved, for example because the disk is full. The message
            names it and the last complete checkpoint.
    """

    _limit_of_run: int | None = None

    def _last_saved(self) -> str:
        checkpoint = last_complete_checkpoint(self._get_output_dir(trial=None))
        if checkpoint is None:
            return "There is no complete checkpoint."
        return f"The last complete checkpoint is {checkpoint}."

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        # transformers would remove old checkpoints before the new one is complete.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._limit_of_run = limit
        try:
            if self.args.should_save:
                begin_checkpoint(folder)
            self.accelerator.wait_for_everyone()
            self._add_states_of_new_callbacks()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                finish_checkpoint(folder)
        except Exception as error:
            # The disk may be full, so remove the incomplete checkpoint.
            with contextlib.suppress(OSError):
                discard_checkpoint(folder)
            if not is_failed_write(error):
                raise
            raise OSError(
                f"{failed_save(folder, error)} {self._last_saved()} Resume from there when the "
                "cause is fixed."
            ) from error
        finally:
            self.args.save_total_limit, self._limit_of_run = limit, None
        if self.args.should_save and limit is not None and limit > 0:
            limit_checkpoints(folder, limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._report_failed_pushes()
            if self._has_whole_model(folder):
                self._write_card(folder, output=run, repo_id=self.hub_model_id)
            super()._push_from_checkpoint(str(folder))

    def _add_states_of_new_callbacks(self) -> None:
        """Add entries for callbacks that the resumed checkpoint does not know.

        Otherwise, transformers would fail to save the states of these callbacks.
        """
        states: Any = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, callback.state())

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir or run_folder(self.args))
        if not self.args.should_save or is_being_saved(folder):
            with self._limit_as_given():
                super()._save(output_dir, state_dict)
            return
        try:
            with replaced_files(folder) as partial:
                if (folder / _CARD).exists():
                    shutil.copyfile(folder / _CARD, partial / _CARD)  # PEFT extends the card
                with self._limit_as_given():
                    super()._save(str(partial), state_dict)
        except OSError as error:
            raise OSError(
                f"{error} Earlier files in the folder are unchanged. {self._last_saved()}"
            ) from error

    @contextlib.contextmanager
    def _limit_as_given(self) -> Iterator[None]:
        """Restore the user's limit of checkpoints while transformers saves the arguments."""
        limit = self.args.save_total_limit
        self.args.save_total_limit = limit if limit is not None else self._limit_of_run
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model. Weights of FSDP and DeepSpeed are gathered first, in float32."""
        weights = whole_weights(self.accelerator, self.model_wrapped)
        if weights is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: transformers calls this method before the checkpoint is complete."""

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_failed_pushes()

    def _report_failed_pushes(self) -> None:
        """Warn about background pushes that failed, because transformers does not."""
        current: Any = getattr(self, "push_in_progress", None)
        for job in [job for job in current.jobs if job.done()] if current else []:
            current.jobs.remove(job)
            if error := job.exception():
                logger.warning(
                    f"A push to {self.hub_model_id} failed: {error} The repository is unchanged. "
                    "The next push will include these files, or call trainer.push_to_hub()."
                )

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write training.json and the card made from it into the output folder.

        A card that was edited is kept. An adapter or a model of another class gets transformers'
        card, which alone has `model_name`, `tasks` and `dataset_args`.
        """
        output = run_folder(self.args)
        if not self._has_whole_model(output):
            super().create_model_card(
                language,
                license,
                tags,
                model_name,
                finetuned_from,
                tasks,
                dataset_tags,
                dataset,
                dataset_args,
            )
            return
        log = self.state.log_history
        seconds = sum(entry.get("train_runtime", 0.0) for entry in log)
        report = {
            **circumstances(),
            "training_minutes": round(seconds / 60, 1),
            "steps": self.state.global_step,
            "weights_sha256": weights_sha256(output),
            "arguments": self.settings(),
            "log": log,
        }
        with replaced_file(output / "training.json") as path:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        self._write_card(
            output,
            repo_id=self.hub_model_id,
            language=language,
            license=license,
            tags=tags,
            base_model=finetuned_from,
            datasets=dataset_tags or dataset,
        )

    def _write_card(self, folder: Path, **options: Any) -> None:
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model.write_card(folder, **options)

    def _has_whole_model(self, folder: Path) -> bool:
        """Tell the main process whether a folder holds a whole model. Adapters do not count."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        translator = isinstance(model, VaswaniForConditionalGeneration)
        weights = any(folder.glob("model*.safetensors"))
        return translator and weights and self.is_world_process_zero()

    def settings(self) -> dict[str, Any]:
        """Return all hyperparameters of the run in JSON types, without access tokens."""
        return self.args.to_dict()


__all__ = ["SafeSaving"]
