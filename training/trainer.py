"""Seq2SeqTrainer with the paper's batches and schedule (sections 5.1, 5.3), safe from kills."""

import copy
import inspect
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.errors import InputError
from ..corpora.mixing import Mixture
from ..corpora.on_the_fly import OnTheFlyPairs
from ..corpora.streaming import BUFFER
from ..modeling.quantization_vaswani import refuse_int8
from .checkpoints import TRAINER_STATE, flaw_of, has_optimizer, last_complete_checkpoint
from .muon import muon_of
from .objective import Loss, Objective, ObjectiveError, Update, labels_of, name_of, sentences_of
from .objectives import objective_of
from .r_drop import RDrop
from .saving import SafeSaving
from .schedule import noam_schedule
from .sequence_objectives import SequenceObjective
from .stream_states import StreamStates, stream_processes
from .token_batch_trainer import TokenBatchTrainer

logger = logging.get_logger(__name__)


class VaswaniTrainer(TokenBatchTrainer, SafeSaving):
    """Seq2SeqTrainer with token batches (5.1), the paper's schedule (5.3), and safe saves.

    With `max_source_tokens=None`, the batches are those of Seq2SeqTrainer. Otherwise training
    ignores `per_device_train_batch_size`, `train_sampling_strategy` and `dataloader_drop_last`. The
    budgets apply to each batch of each process. An update consists of
    `gradient_accumulation_steps` batches of every process.

    A run may be killed at any time, even during a save. `train(resume_from_checkpoint=True)`
    continues from the last complete checkpoint, and names incomplete checkpoints in a warning. The
    rest of the epoch has the same batches. The final weights are therefore those of a run that was
    never killed, bit for bit. This holds for one and for several processes, but not with
    `dataloader_persistent_workers=True`. A stream continues at its saved position even with
    `ignore_data_skip`, because that costs no time.

    `save_total_limit` removes a checkpoint only after a newer one is complete. A loss or gradient
    that is not finite ends training before it changes the weights. DeepSpeed and some optimizers
    change the weights in the backward pass. The error then says that the weights may have changed.

    Args:
        *args, **kwargs: arguments of Seq2SeqTrainer. `data_seed`, or `seed`, shuffles the batches.
        max_source_tokens, max_target_tokens, drop_oversize: as for TokenBatchSampler.
        batching: "sorted" makes padded batches of similar lengths. "packed" makes batches of random
            sentences without padding, with budgets of real tokens (PackedBatchSampler). Pass a data
            collator for padded batches in both cases, because evaluation uses padded batches.
        lengths: (source, target) tokens of every training pair, of shape (N, 2). None counts them
            in the columns `input_ids` and `labels`. For a collator that pads to a multiple, round
            these lengths up to the multiple. Otherwise batches may exceed the budgets.
        mixture: draws the pairs of every epoch when the training data are several corpora.
        stream_buffer: number of rows from which batches are made at a time, for training data that
            are an iterable without a length. Such a run needs `max_steps`.
        noam_warmup_steps: sets the learning rate to equation 3 (5.3), with step 1 as first update:
            d_model^-0.5 * min(step^-0.5, step * noam_warmup_steps^-1.5). The arguments
            `learning_rate`, `warmup_steps` and `lr_scheduler_type` are then ignored.
        noam_factor: factor of that learning rate. The paper has 1.
        muon: train the matrices of layers with Muon, and everything else with AdamW. This number is
            the factor of the learning rate for the matrices. 0 is off.
        objective: the training loss: a name ("risk", "reinforce", "scheduled_sampling", "r_drop"),
            an Objective with its settings, or a function (model, inputs, update) -> loss, which
            returns the share of a batch in the mean loss of its update: for example
            model(**inputs, num_items_in_batch=update.tokens).loss. None means the model's own loss
            (5.4). Evaluation always uses the model's own loss.
        r_drop: `r_drop=alpha` is short for `objective=RDrop(alpha)` (Liang et al., 2021). 0 is off.

    Raises:
        FloatingPointError: in `train`, a loss or gradient is not finite. The message names the
            update.
        OSError: in `train`, a checkpoint could not be saved, for example because the disk is full.
            The message names it and the last complete checkpoint.
        ValueError: arguments have no effect, are out of range, contradict each other, or do not fit
            the data or the model. In `train`, no complete checkpoint exists to resume from, or it
            has another learning rate or optimizer. The message names the argument.
        ObjectiveError: an objective has wrong settings or, in `train`, cannot be computed.
    """

    def __init__(
        self,
        *args: Any,
        max_source_tokens: int | None = None,
        max_target_tokens: int | None = None,
        lengths: np.ndarray | None = None,
        drop_oversize: bool = False,
        batching: Literal["sorted", "packed"] = "sorted",
        noam_warmup_steps: int | None = None,
        noam_factor: float = 1.0,
        muon: float = 0.0,
        objective: str | Loss | None = None,
        r_drop: float = 0.0,
        mixture: Mixture | None = None,
        stream_buffer: int = BUFFER,
        **kwargs: Any,
    ) -> None:
        _check_numbers(r_drop=r_drop, muon=muon)
        if r_drop and objective is not None:
            raise InputError("r_drop is an objective too: give only one of r_drop and objective.")
        if batching not in ("sorted", "packed"):
            raise InputError(f"batching must be 'sorted' or 'packed', got {batching!r}.")
        if max_source_tokens is None:
            needing = {
                "max_target_tokens": max_target_tokens is not None,
                "batching='packed'": batching == "packed",
                "drop_oversize": drop_oversize,
                "mixture": mixture is not None,
            }
            _refuse_without_budget(name for name, given in needing.items() if given)
        if noam_factor != 1 and noam_warmup_steps is None:
            raise InputError(
                f"noam_factor={noam_factor} needs noam_warmup_steps: give both, or set "
                "learning_rate instead."
            )
        # transformers' hyperparameter search has a number of its own in `self.objective`.
        self.training_objective: Loss | None = RDrop(r_drop) if r_drop else objective_of(objective)
        refuse_int8(kwargs.get("model", args[0] if args else None), "Training")
        super().__init__(*args, **kwargs)
        self.max_source_tokens = _python_number(max_source_tokens)
        self.max_target_tokens = _python_number(max_target_tokens)
        self.lengths = lengths
        self.drop_oversize = drop_oversize
        self.batching = batching
        self.noam_warmup_steps = _python_number(noam_warmup_steps)
        self.noam_factor = _python_number(noam_factor)
        self.muon = float(muon)
        self.r_drop = 0.0
        if isinstance(self.training_objective, RDrop):
            self.r_drop = float(self.training_objective.alpha)
        self.mixture = mixture
        self._sentences_in_update: torch.Tensor | None = None
        self.stream_buffer = _python_number(stream_buffer)
        self._streams = StreamStates()
        self._had_batch = False  # whether there was a batch
        self._own_special_tokens = _special_tokens(self.model)
        self._refuse_options_of_other_data()
        self._check_options("r_drop" if r_drop else "objective")

    def _check_options(self, setting: str) -> None:
        """Refuse what does not fit the model or transformers' arguments, or warn of it.

        Args:
            setting: the argument that set the objective.
        """
        if self.noam_warmup_steps is not None and self.lr_scheduler is not None:
            raise InputError(
                "noam_warmup_steps is a schedule too: leave out `noam_warmup_steps`, or the "
                "scheduler in `optimizers`."
            )
        if self.training_objective is not None:
            self._require_own_loss(setting, getattr(self.training_objective, "translates", False))
            if isinstance(self.training_objective, SequenceObjective):
                self._refuse_virtual_tokens(setting)
        if self.batching == "packed":
            self._require_own_loss("batching='packed'", translates=True)
            self._refuse_virtual_tokens("batching='packed'")
        if self.muon:
            self._require_whole_matrices()
        if self.args.dataloader_persistent_workers:
            logger.warning(
                "dataloader_persistent_workers=True draws random numbers at other times after a "
                "resume, so a resumed run will not have the same weights."
            )
        if self.max_source_tokens is not None and self.args.auto_find_batch_size:
            raise InputError(
                "auto_find_batch_size would try the same batches again, because max_source_tokens "
                "sets their size: leave one of them out."
            )

    def _require_own_loss(self, setting: str, translates: bool) -> None:
        """Refuse a setting that needs a model of this package, or one that translates."""
        config = self.accelerator.unwrap_model(self.model).config
        fits = config.model_type == VaswaniConfig.model_type
        if not fits and (translates or not hasattr(config, "label_smoothing")):
            kind = "translation models" if translates else "models"
            raise InputError(
                f"{setting} works with {kind} of vaswani only, not with "
                f"{type(self.model).__name__}: leave {setting} out."
            )
        if self.compute_loss_func is not None or self.args.label_smoothing_factor:
            raise InputError(
                f"{setting} needs the model's own loss, smoothed by the configuration's "
                "label_smoothing: leave out compute_loss_func and label_smoothing_factor."
            )
        if self.args.n_gpu > 1:
            raise InputError(
                f"{setting} needs a process for each of the {self.args.n_gpu} GPUs: start the run "
                "with `accelerate launch`."
            )

    def _refuse_virtual_tokens(self, setting: str) -> None:
        """Refuse a setting whose batches are packed beside PEFT's prompts."""
        adapters = getattr(self.accelerator.unwrap_model(self.model), "peft_config", {})
        for adapter in adapters.values():
            if adapter.is_prompt_learning:
                raise InputError(
                    f"{setting} packs batches, but {type(adapter).__name__} adds virtual tokens to "
                    f"each sentence: leave {setting} out, or use another adapter, such as LoRA."
                )

    def _require_whole_matrices(self) -> None:
        """Refuse Muon together with another optimizer, or with divided weights."""
        optimizer: Any = self.args.optim
        adam = ("adamw_torch", "adamw_torch_fused")
        if self.optimizer is not None or optimizer.value not in adam:
            raise InputError(
                "Muon is an optimizer too: leave out `muon`, or `optimizers` and `optim` (here "
                f"{optimizer.value})."
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InputError(
                "Muon needs the whole weights in each process: train with DDP instead of FSDP or "
                "DeepSpeed, or leave out `muon`."
            )

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create Muon if `muon` is set, otherwise the optimizer of `args.optim`."""
        if self.muon and self.optimizer is None:
            trained: Any = self.model if model is None else model
            decaying = self.get_decay_parameter_names(trained)
            self.optimizer = muon_of(trained, self.args, self.muon, decaying)
        created: Optimizer = super().create_optimizer(model)
        return created

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Set the learning rate to equation 3 (5.3) if `noam_warmup_steps` is given."""
        if self.noam_warmup_steps is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        model: Any = self.model
        adam: Any = optimizer or self.optimizer
        self.lr_scheduler = noam_schedule(
            adam, model.config.d_model, self.noam_warmup_steps, self.noam_factor
        )
        # Otherwise a second call of `train` would continue where this schedule ends.
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as Seq2SeqTrainer does, but resume only from a complete checkpoint."""
        if resume_from_checkpoint is True:
            run = Path(self._get_output_dir(trial=None))
            checkpoint = last_complete_checkpoint(run)
            if checkpoint is None:
                raise InputError(
                    f"There is no complete checkpoint in {run} to resume from: leave out "
                    "resume_from_checkpoint to train from the start."
                )
            resume_from_checkpoint = str(checkpoint)
        elif resume_from_checkpoint and not Path(resume_from_checkpoint).is_dir():
            raise InputError(
                f"There is no folder {resume_from_checkpoint}: resume_from_checkpoint=True finds "
                "the last complete checkpoint of output_dir."
            )
        elif resume_from_checkpoint and (flaw := flaw_of(Path(resume_from_checkpoint))):
            raise InputError(
                f"{resume_from_checkpoint} is incomplete: {flaw}. resume_from_checkpoint=True "
                "finds the last complete one."
            )
        self._streams.reset()
        self._had_batch = False
        self._own_special_tokens = _special_tokens(self.model)
        if resume_from_checkpoint:
            self._check_checkpoint(Path(resume_from_checkpoint))
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self._has_stream and not self._had_batch:
            raise InputError(
                "The training data gave no batch, so the model is untrained: check that each "
                "process and loader worker has rows."
            )
        return output

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model by `model_init`, and note its special tokens."""
        model = super().call_model_init(trial)
        self._own_special_tokens = _special_tokens(model)
        return model

    def _hp_search_setup(self, trial: Any) -> None:
        """Prepare the objective too: `train` calls this method when the model is there."""
        # transformers has just given the model the special tokens of `processing_class`. If source
        # and target have separate vocabularies, these are tokens of the source.
        for holder, tokens in self._own_special_tokens:
            vars(holder).update(tokens)
        super()._hp_search_setup(trial)
        if isinstance(self.training_objective, Objective):
            try:
                self.training_objective.prepare(self)
            except ObjectiveError:
                self.is_in_train = False  # `train` has set it
                raise

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        model: Any = self.model
        if not self._own_special_tokens:
            return super()._pad_tensors_to_max_len(tensor, max_length)
        missing = max_length - tensor.shape[-1]
        return F.pad(tensor, (0, missing), value=model.config.pad_token_id)

    def _check_checkpoint(self, checkpoint: Path) -> None:
        """Refuse a checkpoint that cannot continue this run, and read the position of a stream."""
        if not has_optimizer(checkpoint):
            raise InputError(
                f"{checkpoint} has no state of an optimizer (save_only_model=True?), so a run "
                "cannot continue from it: start a new run with its weights."
            )
        self._warn_of_other_processes(checkpoint)
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        if self.max_source_tokens and self._has_stream:
            settings = self._settings_of_batches()
            self._streams.load(str(checkpoint), self.args, state.global_step, settings)
        elif stream_processes(checkpoint):
            raise InputError(
                f"{checkpoint} was saved by a run on a stream: resume with that stream and "
                "max_source_tokens, or start a new run with its weights."
            )
        elif self.train_dataset is not None:
            self._warn_of_other_batches(checkpoint, state)

    def _warn_of_other_processes(self, checkpoint: Path) -> None:
        saved = len(list(checkpoint.glob("rng_state*.pth")))  # each process saves its own
        if saved not in (0, self.accelerator.num_processes) and self.is_world_process_zero():
            logger.warning(
                f"{checkpoint} was saved by {saved} process(es), but this run has "
                f"{self.accelerator.num_processes}. Its final weights will differ in their last "
                "bits from those of an uninterrupted run. Keep the product of processes and "
                "gradient_accumulation_steps, so that an update has the same sentences."
            )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Name no tied weights, because a checkpoint holds them once."""
        model: Any = self.model
        tied = getattr(model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        untied = type(load_result)(missing, load_result.unexpected_keys)
        super()._issue_warnings_after_load(untied)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        given = getattr(self.lr_scheduler, "base_lrs", None)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            if "parameter group" not in str(error):
                raise
            raise InputError(
                f"{checkpoint} was trained with another optimizer, or by training other "
                f"parameters (muon={self.muon} here). Resume with the settings of the checkpoint, "
                "or start a new run with its weights."
            ) from error
        optimizer: Any = self.optimizer
        factor = optimizer.param_groups[0].get("factor") if self.muon else 0.0
        if factor != self.muon:
            raise InputError(
                f"{checkpoint} was trained with muon={factor}, but this run has muon={self.muon}. "
                "Resume with the settings of the checkpoint, or start a new run with its weights."
            )
        saved = getattr(self.lr_scheduler, "base_lrs", None)
        if given != saved:
            # One schedule times the base rate of another would diverge.
            raise InputError(
                f"{checkpoint} was trained with the base learning rates {saved}, but this run has "
                f"{given} (`learning_rate`, or `noam_factor`). Resume with the settings of the "
                "checkpoint, or start a new run with its weights."
            )
        if self.noam_warmup_steps is not None and isinstance(self.lr_scheduler, LambdaLR):
            self._require_saved_warm_up(self.lr_scheduler, checkpoint)

    def _require_saved_warm_up(self, schedule: LambdaLR, checkpoint: str | None) -> None:
        """Refuse a loaded schedule if its learning rate is not that of `noam_warmup_steps`."""
        update = schedule.last_epoch
        rate = schedule.base_lrs[0] * schedule.lr_lambdas[0](update)
        saved = schedule.get_last_lr()[0]
        if not math.isclose(rate, saved, rel_tol=1e-9):
            raise InputError(
                f"{checkpoint} was trained with another schedule: its learning rate for update "
                f"{update + 1} is {saved:.4g}, but noam_warmup_steps={self.noam_warmup_steps} "
                f"gives {rate:.4g}. Resume with the settings of the checkpoint, or start a new run "
                "with its weights."
            )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.train_dataset, OnTheFlyPairs):
            # With several processes, Accelerate does not pass the epoch on to the data set.
            self.train_dataset.set_epoch(kwargs["epoch"])
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            # This run was complete when it was resumed. transformers would check that only after
            # one more update.
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the loss and gradients of a batch, and require that the loss is finite."""
        loss = super().training_step(*args, **kwargs)
        self._require_finite("loss", loss, self._early_updater())
        return loss

    def _early_updater(self) -> str | None:
        """Return the name of a backend or optimizer that updates in the backward pass, or None."""
        if self.is_deepspeed_enabled:
            return "DeepSpeed"
        optimizer: Any = self.args.optim
        early = "lomo" in optimizer.value or "layerwise" in optimizer.value
        return f"The optimizer {optimizer.value}" if early else None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the model's own loss (5.4), or the loss of the objective during training."""
        if self.training_objective is None or not model.training:
            found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss = found[0] if return_outputs else found
        else:
            loss = self._loss_of_objective(
                self.training_objective, model, inputs, num_items_in_batch
            )
            found = (loss, None) if return_outputs else loss
        if model.training and (updater := self._early_updater()):
            # Check the loss now, because these backends change the weights in the backward pass.
            # Otherwise, `training_step` checks it later, so that the device need not wait.
            # DeepSpeed changes the weights after the last batch of an update, and such an
            # optimizer after each batch.
            unchanged = self.is_deepspeed_enabled or self.args.gradient_accumulation_steps == 1
            self._require_finite("loss", loss.detach().mean(), None if unchanged else updater)
        return found

    def _loss_of_objective(
        self,
        objective: Loss,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        tokens: Any = num_items_in_batch
        sentences: Any = self._sentences_in_update
        if tokens is None:
            tokens = (labels_of(inputs) != -100).sum()
        if num_items_in_batch is None or sentences is None:
            sentences = sentences_of(inputs)
        update = Update(self.state.global_step, tokens, sentences, self.state.max_steps)
        loss = objective(model, inputs, update)
        if not torch.is_tensor(loss) or loss.dim():
            found = f"a tensor {tuple(loss.shape)}" if torch.is_tensor(loss) else repr(loss)
            raise ObjectiveError(
                f"The objective {name_of(objective)} returned {found}. An objective must return "
                "the loss as a tensor of one number, without dimensions."
            )
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # Gradients are averaged over processes. Processes that share a tensor-parallel model
            # have the same batch.
            loss = loss * self._data_parallel_rank()[1]
        return loss

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Collect the batches of an update, and count tokens and sentences over all processes."""
        if self.max_source_tokens and self._has_stream:
            self._streams.begin_update(self.state.global_step)
            epoch_iterator = self._streams.batches(epoch_iterator)
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._had_batch |= bool(batches)
        self._sentences_in_update = None
        if self.training_objective is not None and tokens is not None:
            sentences = torch.tensor(sum(map(sentences_of, batches)), device=device)
            if self.args.average_tokens_across_devices and self.args.world_size > 1:
                sentences = self.accelerator.gather(sentences).sum() / self.get_tp_size()
            self._sentences_in_update = sentences
        return batches, tokens

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        # The Trainer calls this method after the gradients are averaged and before the update.
        norm = super()._get_grad_norm(*args, **kwargs)
        if norm is not None and getattr(self.accelerator, "scaler", None) is None:
            self._require_finite("norm of the gradient", norm, self._early_updater())
        return norm

    def _require_finite(
        self, what: str, value: torch.Tensor | float, updater: str | None = None
    ) -> None:
        """Require a finite number. `updater` names what may have changed the weights already."""
        number = float(value)
        if not math.isfinite(number):
            weights = "The weights were not changed by this update."
            if updater is not None:
                weights = f"{updater} may already have changed the weights in this update."
            raise FloatingPointError(
                f"The {what} is {number} in update {self.state.global_step + 1}. {weights} "
                f"{self._last_saved()} A lower learning rate, more warm-up steps, max_grad_norm=1 "
                "or float32 usually help."
            )

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch without changing the generation config, which is saved with the model."""
        if not getattr(self.args, "predict_with_generate", False):
            return super().prediction_step(*args, **kwargs)
        model: Any = self.model
        settings = vars(model.generation_config)
        kept = copy.deepcopy(settings)
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            # transformers writes defaults such as max_length=20 into the generation config.
            settings.clear()
            settings.update(kept)

    def settings(self) -> dict[str, Any]:
        """Return all hyperparameters of the run in JSON types, without access tokens."""
        own = (
            "max_source_tokens",
            "max_target_tokens",
            "drop_oversize",
            "batching",
            "stream_buffer",
            "noam_warmup_steps",
            "noam_factor",
            "muon",
            "r_drop",
        )
        objective = self.training_objective
        return {
            **super().settings(),
            **{name: getattr(self, name) for name in own},
            "mixture": None if self.mixture is None else self.mixture.settings(),
            "objective": None if objective is None else name_of(objective),
            "objective_settings": _settings_of(objective),
        }


def _special_tokens(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the configurations of a model with two vocabularies, each with its special tokens."""
    config = getattr(model, "config", None)
    if getattr(config, "share_encoder_decoder_embeddings", True):
        return []
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return [
        (holder, {name: getattr(holder, name) for name in names})
        for holder in (config, getattr(model, "generation_config", None))
        if holder is not None
    ]


def _settings_of(objective: Loss | None) -> dict[str, Any]:
    """Return the settings of an objective in JSON types. Functions are given by their names."""
    if not isinstance(objective, Objective):
        return {}
    names = inspect.signature(type(objective)).parameters
    values = {name: getattr(objective, name) for name in names if hasattr(objective, name)}
    values = {name: _python_number(value) for name, value in values.items()}
    return {
        name: value if isinstance(value, str | int | float | None) else name_of(value)
        for name, value in values.items()
    }


def _check_numbers(**numbers: float) -> None:
    """Refuse numbers that are negative or not finite."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise InputError(f"{name} must be 0 or more, got {number}.")


def _refuse_without_budget(settings: Iterable[str]) -> None:
    """Refuse settings that have no effect without a budget of tokens."""
    for name in settings:
        raise InputError(
            f"{name} needs max_source_tokens, the number of source tokens per batch: give both, or "
            f"leave {name} out."
        )


def _python_number(value: Any) -> Any:
    """Turn a number of NumPy or PyTorch into one of Python, which JSON takes."""
    return value.item() if isinstance(value, np.generic | torch.Tensor) else value


__all__ = ["VaswaniTrainer"]
