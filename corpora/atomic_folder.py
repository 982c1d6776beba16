"""Folders and files that are written whole or not at all.

Each context manager yields a temporary path. The result takes its name at the end of the block. An
error or a kill inside the block changes nothing.
"""

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

# Prefix of temporary folders of an unfinished save. Trainers do not push such folders.
_UNFINISHED = "_saving-"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def refuse_existing(output: Path) -> None:
    """Refuse an output that exists already, unless it is an empty folder.

    Raises:
        FileExistsError: `output` exists, or is the current folder.
        NotADirectoryError: `output` lies below a file.
    """
    if not output.name:
        raise FileExistsError(f"{output} is the current folder: name a new folder.")
    above = next(path for path in output.absolute().parents if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{output} cannot be made, because {above} is a file.")
    if output.exists() and not (output.is_dir() and _is_empty(output)):
        raise FileExistsError(
            f"{output} exists and is not an empty folder: choose another output folder, or remove "
            "it."
        )


def _is_empty(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    if os.path.ismount(folder):
        # A new disk has lost+found. Folders with the prefix are left from a killed call.
        names = [name for name in names if name != "lost+found" and _UNFINISHED not in name]
    return not names


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `output`, or is removed after an error.

    A link to an empty folder stays a link. If `output` is a mount point, the files move into it.

    Raises:
        FileExistsError: `output` exists already and is not an empty folder.
        OSError: a file could not be written. The message says how much space is free.
    """
    refuse_existing(output)
    output = Path(os.path.realpath(output))
    if output.is_dir() and os.path.ismount(output):
        with replaced_files(output) as partial:
            yield partial
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        yield partial
        _replace_empty(output, partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise failed_save(output, error) from error
        raise


def _replace_empty(output: Path, partial: Path) -> None:
    """Give a folder the name of another that is empty or missing."""
    try:
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a bind mount from the same disk cannot be replaced
            raise
        for path in partial.iterdir():
            shutil.move(path, output / path.name)
        partial.rmdir()


@contextlib.contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files then replace those of the same name in `folder`.

    `folder` does not change until all new files are on the disk. A kill can leave the temporary
    folder inside `folder`. The next call removes it.

    Raises:
        OSError: a file could not be written. The message says how much space is free.
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
        flush(path)
    names = [path.relative_to(source) for path in files]
    for name in names:
        (target / name.parent).mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    if any(_WEIGHTS.fullmatch(str(name)) for name in names):
        # Remove the weight files of an earlier save that had more or fewer files. Otherwise they
        # would be loaded instead of the new ones.
        for path in target.iterdir():
            if _WEIGHTS.fullmatch(path.name) and Path(path.name) not in names:
                path.unlink()
    flush(target)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file then replaces the one at `path`.

    A link stays a link. Devices and pipes cannot be replaced, so `path` itself is yielded for them.

    Raises:
        OSError: the file could not be written. The message says how much space is free.
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
        flush(partial)
        partial.replace(target)
    except OSError as error:
        raise failed_save(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def is_failed_write(error: Exception) -> bool:
    """Tell whether a full disk can have raised this error."""
    # For a full disk, torch raises a RuntimeError and tokenizers a bare Exception.
    return isinstance(error, OSError | RuntimeError | SafetensorError) or type(error) is Exception


def failed_save(output: Path, error: BaseException) -> OSError:
    """Make an error that says what could not be saved, why, and how much space is free."""
    place = next(path for path in (output, *output.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free / 2**20
    return OSError(f"{output} could not be saved: {error} ({free:.0f} MiB are free there).")


def flush(path: Path) -> None:
    """Wait until the content of a file, or the file names of a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder, but it writes file names in order.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "failed_save",
    "flush",
    "is_failed_write",
    "new_folder",
    "refuse_existing",
    "replaced_file",
    "replaced_files",
]
