"""Checkpoint averaging (section 6.1): the mean of a run's last checkpoints becomes one model.

The paper averages the last 5 checkpoints of its base models and the last 20 of its big models. The
result is a saved model like any other. It is written completely or not at all. A kill can leave a
hidden folder ".NAME.*.partial" beside it.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..corpora.atomic_folder import new_folder, refuse_existing
from ..modeling.loading_vaswani import is_finite
from .checkpoints import TRAINER_STATE, checkpoints_to_average, run_checkpoints, run_folder

logger = logging.get_logger(__name__)

PathLike = str | os.PathLike

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Files that a model needs besides its weights: configurations, code and tokenizer. The Trainer's
# state and scores are not copied, because they belong to another model.
_COPIED = (
    *("*config.json", "*.py", "*.jinja"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("*vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.spm"),
)
_TARGET_TOKENIZER = "target_tokenizer"
# Configuration fields that depend on the software or the path that saved them, not on the model.
_FREE_FIELDS = ("transformers_version", "_name_or_path")


def average_checkpoints(
    checkpoints: PathLike | Sequence[PathLike], output: PathLike, last: int | None = None
) -> Path:
    """Save the mean of several checkpoints of one run as a new model (section 6.1).

    Tensors are summed in float32 and saved in the checkpoints' dtype. Memory holds the sums and one
    checkpoint at a time. A tied matrix is stored, and so averaged, once. Configuration, code,
    generation config and tokenizer are copied from the last checkpoint.

    Args:
        checkpoints: folders of saved models, oldest first. Or the output folder of a Trainer, from
            which the `last` checkpoint-N folders with the highest numbers are averaged.
        output: the folder to make. It must be empty or not exist.
        last: number of checkpoints of a Trainer's folder. The paper has 5 for base, 20 for big.

    Returns:
        The path of the new folder.

    Raises:
        FileExistsError: output exists and is not an empty folder.
        FileNotFoundError: a folder does not exist.
        ValueError: a checkpoint is incomplete or damaged, differs from the last one in its tensors,
            shapes, types or configuration, or has numbers that are not finite; there are fewer than
            `last` checkpoints. The message names the folder.
    """
    output = Path(output).resolve()
    refuse_existing(output)
    folders = _selected(checkpoints, last)
    models = [_Checkpoint.read(folder) for folder in folders]
    newest = models[-1]
    for model in models[:-1]:
        _refuse_different(model, newest)
    with new_folder(output) as partial:
        for name in sorted(set(newest.files.values())):
            tensors = _mean(models, [key for key, file in newest.files.items() if file == name])
            with safe_open(newest.folder / name, framework="pt") as weights:
                metadata = weights.metadata()
            save_file(tensors, partial / name, metadata=metadata)
        for path in sorted(newest.folder.iterdir()):
            if path.is_file() and any(map(path.match, _COPIED)):
                shutil.copyfile(path, partial / path.name)
        if newest.sharded:
            shutil.copyfile(newest.folder / _INDEX, partial / _INDEX)
        # A run saves the tokenizer of the target beside its checkpoints.
        for place in (newest.folder, newest.folder.parent):
            if (place / _TARGET_TOKENIZER).is_dir():
                shutil.copytree(place / _TARGET_TOKENIZER, partial / _TARGET_TOKENIZER)
                break
    return output


def _selected(checkpoints: PathLike | Sequence[PathLike], last: int | None) -> list[Path]:
    """Return the folders to average, oldest first."""
    if last is not None and last < 1:
        raise ValueError(f"last must be at least 1, got {last}.")
    if isinstance(checkpoints, str | os.PathLike):
        if last is None:
            raise ValueError(
                f"{checkpoints} is one folder: say how many of its checkpoint-N folders to average "
                "(last=5, or --last 5), or list the checkpoints."
            )
        return _last_of_run(Path(checkpoints), last)
    folders = [Path(folder) for folder in checkpoints]
    if not folders:
        raise ValueError("There is nothing to average: the list of checkpoints is empty.")
    if last is not None:
        raise ValueError(
            f"last ({last}) selects checkpoints in the output folder of a Trainer, but "
            f"{len(folders)} checkpoints are listed: leave last out."
        )
    seen = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise ValueError(f"{folder} is listed twice and would count twice: list it once.")
        seen.add(folder.resolve())
    return folders


def _last_of_run(run: Path, last: int) -> list[Path]:
    if not run.is_dir():
        raise FileNotFoundError(f"There is no folder {run}.")
    found = run_checkpoints(run)
    if len(found) < last:
        raise ValueError(
            f"{run} holds {len(found)} checkpoint-N folders, fewer than the {last} to average: "
            "pass a smaller last (--last), or train with a larger save_total_limit."
        )
    _refuse_incomplete(found[-last:])
    return found[-last:]


def _refuse_incomplete(folders: Sequence[Path]) -> None:
    # Optimizer files may be missing, because an average needs only the weights.
    if incomplete := [str(path) for path in folders if not (path / TRAINER_STATE).is_file()]:
        raise ValueError(
            f"Incomplete, because {TRAINER_STATE}, which is saved last, is missing: "
            f"{', '.join(incomplete)}. Remove these folders, or list the checkpoints to average."
        )


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """A saved model of which only the configuration and the headers of the weights are read.

    Args:
        folder: the folder of the model.
        config: the configuration.
        files: the file name of each tensor.
        layout: dtype and shape of each tensor.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, str]
    layout: dict[str, tuple[str, list[int]]]

    @property
    def sharded(self) -> bool:
        return set(self.files.values()) != {_WEIGHTS}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder. A folder that is incomplete or damaged raises an error."""
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no checkpoint folder {folder}.")
        config = _read_json(folder, "config.json")
        if (folder / _WEIGHTS).is_file():
            expected = None
            names = [_WEIGHTS]
        elif (folder / _INDEX).is_file():
            expected = _read_json(folder, _INDEX).get("weight_map", {})
            names = sorted(set(expected.values()))
        else:
            raise ValueError(
                f"{folder} is incomplete: it has neither {_WEIGHTS} nor {_INDEX}. If the weights "
                "have another format, load the model and save it again."
            )
        files, layout = {}, {}
        for name in names:
            with _opened(folder, name) as weights:
                for key in weights.keys():  # noqa: SIM118  (not a dictionary: no iterator)
                    view = weights.get_slice(key)
                    files[key] = name
                    layout[key] = (view.get_dtype(), list(view.get_shape()))
        if expected is not None and files != expected:
            wrong = sorted(
                key for key in files.keys() | expected if files.get(key) != expected.get(key)
            )
            raise ValueError(
                f"{folder} is damaged: {_INDEX} and its weight files disagree about {wrong[0]!r}."
            )
        if any(dtype == "I8" for dtype, _ in layout.values()):
            raise ValueError(
                f"{folder} has int8 weights, which cannot be averaged: average the models that "
                "they were rounded from."
            )
        return cls(folder, config, files, layout)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: it has no {name}.") from None
    except ValueError as error:
        raise ValueError(f"{folder} is damaged: {name} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder} is damaged: {name} holds no JSON object.")
    return content


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[Any]:
    """Open a file of weights. A file that is shorter than its header says raises an error."""
    try:
        weights = safe_open(folder / name, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: it has no {name}.") from None
    except SafetensorError as error:
        raise ValueError(f"{folder} is damaged: {name} is cut off or broken ({error}).") from error
    with weights as opened:
        yield opened


def _refuse_different(model: _Checkpoint, newest: _Checkpoint) -> None:
    """Refuse a checkpoint whose configuration or tensors differ from those of the newest."""
    fields = sorted(
        field
        for field in model.config.keys() | newest.config.keys()
        if model.config.get(field) != newest.config.get(field) and field not in _FREE_FIELDS
    )
    if fields:
        shown = ", ".join(
            f"{field} ({model.config.get(field)!r} and {newest.config.get(field)!r})"
            for field in fields
        )
        raise ValueError(f"{model.folder} and {newest.folder} differ in config.json: {shown}.")
    for first, second in ((model, newest), (newest, model)):
        if missing := sorted(first.layout.keys() - second.layout.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"{second.folder} has no tensor {missing[0]!r}{more}, but {first.folder} has."
            )
    for key, (dtype, shape) in newest.layout.items():
        found_dtype, found_shape = model.layout[key]
        if (found_dtype, found_shape) != (dtype, shape):
            raise ValueError(
                f"{key!r} is {found_dtype} {found_shape} in {model.folder}, but {dtype} {shape} in "
                f"{newest.folder}."
            )


def _mean(models: Sequence[_Checkpoint], keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the mean of the tensors named `keys`, in their own dtype.

    The files of a checkpoint are closed before the next is opened, so that memory holds only the
    sums and the pages of one checkpoint.
    """
    sums: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for model in models:
        for name in sorted({model.files[key] for key in keys}):
            with _opened(model.folder, name) as weights:
                for key in keys:
                    if model.files[key] == name:
                        # No variable may keep a tensor: it would keep its whole file in memory.
                        dtypes[key] = _add(sums, key, weights.get_tensor(key), model.folder)
    for key, dtype in dtypes.items():
        if dtype.is_floating_point:
            sums[key] = sums[key].div_(len(models)).to(dtype)
    return sums


def _add(
    sums: dict[str, torch.Tensor], key: str, tensor: torch.Tensor, folder: Path
) -> torch.dtype:
    """Add a tensor to its sum, in float32 at least, and return its dtype.

    Integers and flags have no mean, so they must be equal in all checkpoints.
    """
    if not tensor.is_floating_point():
        if not torch.equal(sums.setdefault(key, tensor.clone()), tensor):
            raise ValueError(
                f"{key!r} of {folder} differs from the first checkpoint, and {tensor.dtype} "
                "cannot be averaged."
            )
        return tensor.dtype
    if not is_finite(tensor):
        raise ValueError(f"{key!r} of {folder} holds numbers that are not finite.")
    if key in sums:
        sums[key] += tensor
    else:
        sums[key] = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    return tensor.dtype


def checkpoints_to_keep(args: TrainingArguments, last: int) -> int:
    """Return how many checkpoints a run has to keep, so that it has its last ones at its end.

    transformers always keeps the best checkpoint, which may be older than the last ones.
    """
    return last + (args.metric_for_best_model is not None)


class AverageCheckpoints(TrainerCallback):
    """Average the last checkpoints of a Trainer's run when its training ends (section 6.1).

    `Trainer(..., callbacks=[AverageCheckpoints(last=5)])` writes the mean to
    "<output_dir>-averaged" or to `output`. If the run has fewer checkpoints, all are averaged, with
    a warning. The trained model itself is not changed.

    Raises:
        FileExistsError: before training, output exists and is not an empty folder.
        ValueError: before training, the settings would not keep `last` checkpoints.
    """

    def __init__(self, last: int, output: PathLike | None = None) -> None:
        if last < 1:
            raise ValueError(f"last must be at least 1, got {last}.")
        self.last = last
        self.output = output

    def _output(self, args: TrainingArguments) -> Path:
        if self.output is not None:
            return Path(self.output).resolve()
        run = run_folder(args).resolve()
        return run.with_name(f"{run.name}-averaged")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check before training what would fail at its end."""
        if args.save_strategy == "no":
            raise ValueError(
                "save_strategy='no' saves no checkpoints to average: set it to 'steps' or 'epoch'."
            )
        needed = checkpoints_to_keep(args, self.last)
        if 0 < (args.save_total_limit or 0) < needed:
            raise ValueError(
                f"save_total_limit={args.save_total_limit} keeps too few checkpoints to average "
                f"the last {self.last}: set it to {needed}, or leave it out."
            )
        if hasattr(kwargs.get("model"), "peft_config"):
            raise ValueError(
                "Checkpoints of an adapter cannot be averaged: leave AverageCheckpoints out."
            )
        if state.is_world_process_zero:
            refuse_existing(self._output(args))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average the checkpoints, in the main process only."""
        if not state.is_world_process_zero:
            return
        run = run_folder(args).resolve()
        folders = checkpoints_to_average(run, state.global_step)
        if len(folders) < self.last:
            logger.warning(
                f"{run} has only {len(folders)} of the {self.last} checkpoints to average, so "
                f"{'fewer are averaged' if folders else 'no average is saved'}."
            )
        if folders:
            average_checkpoints(folders[-self.last :], self._output(args))


__all__ = ["AverageCheckpoints", "average_checkpoints", "checkpoints_to_keep"]
