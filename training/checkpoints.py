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
# How the name of a folder begins whose files will replace others. Trainers push no such folder.
_UNFINISHED = "_saving-"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


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


def is_being_saved(folder: Path) -> bool:
    """Tell whether a folder is a checkpoint that is not declared complete yet."""
    manifest = folder / _MANIFEST
    return manifest.is_file() and not manifest.stat().st_size


def is_failed_write(error: Exception) -> bool:
    """Tell whether an error is one that a full disk can raise."""
    # tokenizers and torch have no class of their own for it.
    return isinstance(error, OSError | RuntimeError | SafetensorError) or type(error) is Exception


def failed_save(output: Path, error: BaseException) -> OSError:
    """Say which file or folder could not be saved, why, and how much room there is."""
    place = next(path for path in (output, *output.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free / 2**20
    return OSError(f"{output} could not be saved: {error} ({free:.0f} MiB are free there).")


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
        OSError: a file could not be written; says how much room there is.
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
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise failed_save(output, error) from error
        raise


@contextlib.contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files take the places of those in `folder` if all goes well.

    Until all of them are on the disk, `folder` stays as it is. A kill can leave a hidden folder
    there, which the next call removes.

    Raises:
        OSError: a file could not be written; says how much room there is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = folder / f"{_UNFINISHED}{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir()
        yield partial
        _move_files(partial, folder)
    except Exception as error:
        if is_failed_write(error):
            raise failed_save(folder, error) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_files(source: Path, target: Path) -> None:
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    names = [path.relative_to(source) for path in files]
    for name in names:
        (target / name.parent).mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    if any(_WEIGHTS.fullmatch(str(name)) for name in names):
        # Weights of an earlier save, in more or fewer files, would be loaded in place of these.
        for path in target.iterdir():
            if _WEIGHTS.fullmatch(path.name) and Path(path.name) not in names:
                path.unlink()
    _flush(target)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a path whose file takes the place of the one at `path` if all goes well.

    A link stays a link. A device or a pipe is yielded itself.

    Raises:
        OSError: the file could not be written; says how much room there is.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if target.exists():
            shutil.copymode(target, partial)
        _flush(partial)
        partial.replace(target)
    except OSError as error:
        raise failed_save(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


__all__ = ["last_complete_checkpoint"]
