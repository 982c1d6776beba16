"""Checkpoints with a manifest, so that an incomplete checkpoint can be recognised.

transformers writes the dozen files of a checkpoint one by one. This module adds a manifest, which
is empty during the save. When all other files are on the disk, their names and sizes are written to
it.
"""

import contextlib
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.utils import logging

from ..corpora.atomic_folder import flush

logger = logging.get_logger(__name__)

_MANIFEST = "checkpoint_files.json"
# transformers writes this file last. A checkpoint without it is incomplete.
TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
# Files that users may edit in a finished checkpoint, and files that an average needs as saved.
_EDITABLE = re.compile(r"(.*config|tokenizer.*)\.json|.*\.(md|py|jinja|txt)")
_AVERAGED = re.compile(r"model.*\.safetensors|model\.safetensors\.index\.json|config\.json")


def run_folder(args: TrainingArguments) -> Path:
    """Return the folder of a run."""
    # output_dir is None in its type only, because transformers sets "trainer_output".
    return Path(args.output_dir or "trainer_output")


def run_checkpoints(run: Path) -> list[Path]:
    """List the checkpoint-N folders of a Trainer's output folder, in the order of their numbers."""
    folders = [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=update_of)


def update_of(checkpoint: Path) -> int:
    """Return N of a checkpoint-N folder, the number of its last update."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_to_average(run: Path, updates: int) -> list[Path]:
    """List the checkpoints of a run with this number of updates that an average can read.

    An earlier run may have left checkpoints of later updates in the same folder.
    """
    return [
        folder
        for folder in run_checkpoints(run)
        if update_of(folder) <= updates and flaw_of(folder, _AVERAGED) is None
    ]


def last_complete_checkpoint(run: str | os.PathLike) -> Path | None:
    """Return the last complete checkpoint. A warning names later checkpoints that are incomplete.

    Args:
        run: the output folder of a Trainer.
    """
    run = Path(run)
    for folder in reversed(run_checkpoints(run) if run.is_dir() else []):
        flaw = flaw_of(folder)
        if flaw is None:
            return folder
        logger.warning(f"{folder} is incomplete and ignored: {flaw}.")
    return None


def flaw_of(folder: Path, needed: re.Pattern[str] | None = None) -> str | None:
    """Return why a checkpoint is incomplete, or None if it is complete.

    Args:
        folder: folder of the checkpoint.
        needed: pattern of the files that must be as saved; None means all files, except that some
            may be edited.
    """
    sizes, flaw = _sizes_in(folder)
    for name, size in sizes.items():
        if needed is not None and not needed.fullmatch(name):
            continue
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size and (needed is not None or not _is_edited(path)):
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return flaw


def _sizes_in(folder: Path) -> tuple[dict[str, int], str | None]:
    """Read the sizes of a checkpoint's files, and tell why its save did not finish, if so."""
    try:
        manifest = (folder / _MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}, _unreadable_in(folder)
    if not manifest:
        return {}, "it was being saved when its run ended"
    try:
        return dict(json.loads(manifest)), None
    except (TypeError, ValueError) as error:
        return {}, f"{_MANIFEST} is damaged ({error})"


def _is_edited(path: Path) -> bool:
    """Tell whether a file of another size may have been edited, and is not cut off."""
    if not _EDITABLE.fullmatch(path.name):
        return False
    if path.suffix != ".json":
        return True
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _unreadable_in(folder: Path) -> str | None:
    """Return the damage of a checkpoint without a manifest, as other trainers save it, or None."""
    try:
        json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{TRAINER_STATE}, which is saved last, is missing"
    except ValueError as error:
        return f"{TRAINER_STATE} is cut off or broken ({error})"
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as error:
                return f"{path.name} is cut off or broken ({error})"
        elif path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
            return f"{path.name} is cut off or broken"
    return None


def has_optimizer(folder: Path) -> bool:
    """Tell whether a checkpoint has the state of an optimizer.

    Its file or folder is called `optimizer*`, and in DeepSpeed `global_step*`.
    """
    return any(any(folder.glob(pattern)) for pattern in ("optimizer*", "global_step*"))


def begin_checkpoint(folder: Path) -> None:
    """Make the folder of a checkpoint, with an empty manifest."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(".checkpoint-*.removed"):
        shutil.rmtree(left_over, ignore_errors=True)
    if folder.exists():
        # Remove the files of an earlier run, which must not mix with the new ones.
        discard_checkpoint(folder)
    folder.mkdir()
    (folder / _MANIFEST).touch()


def finish_checkpoint(folder: Path) -> None:
    """Write the manifest, after all other files are on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        flush(path)
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in files
        if path.name != _MANIFEST
    }
    partial = folder / f"{_MANIFEST}.partial"
    partial.write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    flush(partial)
    partial.replace(folder / _MANIFEST)
    for changed in (folder, folder.parent):
        flush(changed)


def is_being_saved(folder: Path) -> bool:
    """Tell whether a folder is a checkpoint with an empty manifest."""
    manifest = folder / _MANIFEST
    return manifest.is_file() and not manifest.stat().st_size


def discard_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill leaves no incomplete checkpoint."""
    removed = folder.with_name(f".{folder.name}.removed")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(removed)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def limit_checkpoints(newest: Path, limit: int, best: str | None = None) -> None:
    """Keep the last `limit` checkpoints of a run up to `newest`, and remove the others.

    `newest` and the checkpoint at the path `best` are always kept and count towards the limit.
    Checkpoints whose save was cut off are removed. If a user has removed or changed files of a
    finished checkpoint, the checkpoint counts as before.
    """
    before = run_checkpoints(newest.parent)
    before = before[: before.index(newest)]
    room = max(limit - 1, 0)
    if best is not None and Path(best).resolve() in [folder.resolve() for folder in before]:
        room -= 1
    for folder in reversed(before):
        if best is not None and folder.resolve() == Path(best).resolve():
            continue
        if room > 0 and _sizes_in(folder)[1] is None:
            room -= 1
        else:
            discard_checkpoint(folder)


__all__ = ["last_complete_checkpoint"]
