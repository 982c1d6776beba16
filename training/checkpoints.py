"""Checkpoints that a kill at any moment leaves whole, or recognisable as incomplete.

A checkpoint is a folder of a dozen files that transformers writes one after the other. Here it gets
one more, written twice: empty before the others, and when they are all on the disk, with their
names and sizes. So it says at any time whether a checkpoint is complete.
"""

import contextlib
import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

logger = logging.get_logger(__name__)

_MANIFEST = "checkpoint_files.json"
# transformers writes it last: a checkpoint without it was cut off while it was saved.
TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def run_checkpoints(run: Path) -> list[Path]:
    """The checkpoint-N folders of a Trainer's output folder, by number."""
    numbered = []
    for folder in run.iterdir():
        match = _NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            numbered.append((int(match[1]), folder))
    return [folder for _, folder in sorted(numbered)]


def last_complete_checkpoint(run: str | os.PathLike) -> Path | None:
    """The checkpoint to resume from; later ones that are incomplete are named in a warning.

    Args:
        run: the folder that a Trainer writes its checkpoint-N folders to.
    """
    run = Path(run)
    for folder in reversed(run_checkpoints(run) if run.is_dir() else []):
        flaw = flaw_of(folder)
        if flaw is None:
            return folder
        logger.warning(f"{folder} is incomplete and passed over: {flaw}.")
    return None


def flaw_of(folder: Path) -> str | None:
    """Say why a checkpoint cannot be resumed from; None if it is complete."""
    try:
        manifest = (folder / _MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return _unreadable_in(folder)
    if not manifest:
        return "it was being saved when its run ended"
    try:
        sizes = dict(json.loads(manifest))
    except (TypeError, ValueError) as error:
        return f"{_MANIFEST} is damaged ({error})"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return None


def _unreadable_in(folder: Path) -> str | None:
    """What is wrong with a checkpoint without a list of its files, which another Trainer saved."""
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


def begin_checkpoint(folder: Path) -> None:
    """Make the folder of a checkpoint, known as incomplete from its first file on."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(".checkpoint-*.removed"):
        shutil.rmtree(left_over, ignore_errors=True)
    if folder.exists():
        # Of an earlier run: its files must not be taken for those of this one.
        discard_checkpoint(folder)
    folder.mkdir()
    (folder / _MANIFEST).touch()


def finish_checkpoint(folder: Path) -> None:
    """Declare a checkpoint complete, once all its files are on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in files
        if path.name != _MANIFEST
    }
    partial = folder / f"{_MANIFEST}.partial"
    partial.write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    _flush(partial)
    partial.replace(folder / _MANIFEST)
    for changed in (folder, folder.parent):
        _flush(changed)


def _flush(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and writes their names in order.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: its name goes at once, so that none is left half removed."""
    removed = folder.with_name(f".{folder.name}.removed")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(removed)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def limit_checkpoints(newest: Path, limit: int, best: str | None = None) -> None:
    """Keep the last `limit` complete checkpoints of a run, of which `newest` was just finished.

    The one at the path `best` counts but stays, and so does `newest`, whatever the limit.
    Incomplete ones before `newest` are of no more use.
    """
    before = run_checkpoints(newest.parent)
    before = before[: before.index(newest)]
    room = max(limit - 1, 0)
    if best is not None and Path(best).resolve() != newest.resolve():
        room -= 1
    for folder in reversed(before):
        if best is not None and folder.resolve() == Path(best).resolve():
            continue
        if room > 0 and flaw_of(folder) is None:
            room -= 1
        else:
            discard_checkpoint(folder)


def refuse_existing(output: Path) -> None:
    """Refuse to write where something is.

    Raises:
        FileExistsError: `output` is there and not an empty folder, or the current one.
    """
    if not output.name:
        raise FileExistsError(f"{output} is where you are: name a new folder.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(
            f"{output} exists and is not an empty folder: choose another output folder, or remove "
            "it."
        )


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder beside `output` that takes its name if all goes well, and vanishes otherwise.

    Raises:
        FileExistsError: `output` is there and not an empty folder, or the current one.
    """
    refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        yield partial
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


__all__ = ["last_complete_checkpoint"]
