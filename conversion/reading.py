"""Reading files of other toolkits safely: text, JSON, YAML, pickles of torch, files on the Hub.

A file that cannot be read is a ConversionError that names the file. No code in a pickle ever runs.
"""

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from ..configuration.places_vaswani import check_path
from .errors import ConversionError

_GLOBAL = re.compile(r"GLOBAL (\S+)")
# torch's errors recommend to load the file without protection.
_ADVICE = re.compile(
    r"Weights only load failed\.|In PyTorch 2\.6.*?trusted source\.|Please file an issue.*?error:"
    r"|Check the documentation.*",
    re.DOTALL,
)


def read_text(path: Path) -> str:
    """Read a UTF-8 file without changing its line ends.

    Raises:
        ConversionError: the file is missing or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConversionError: the file is missing or holds something else.
    """
    try:
        found = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConversionError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} is not a JSON object.")
    return found


def parse_yaml(text: str | bytes, place: str) -> Any:
    """Parse YAML that holds only plain values.

    Args:
        text: the YAML.
        place: name of the file, for errors.

    Raises:
        ConversionError: the text is something else.
    """
    try:
        return yaml.safe_load(text)
    except Exception as error:  # malformed numbers and dates raise arbitrary errors
        raise ConversionError(f"{place} is not YAML: {' '.join(str(error).split())}") from error


def is_text(tokens: Iterable[str]) -> bool:
    """Tell whether all tokens are valid Unicode, without lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for token in tokens for character in token)


# Checkpoints of torch.save


class Inert:
    """A stand-in for a toolkit's class in a pickle. It keeps what was stored and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args
        vars(self).update(kwargs)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


def read_checkpoint(path: Path, harmless: Sequence[str] = ()) -> Any:
    """Load a file of torch.save on the CPU, without running any code in it.

    Args:
        path: the file.
        harmless: full names of classes, as in the pickle, that `Inert` replaces.

    Raises:
        ConversionError: the file is missing, is damaged, or holds anything but tensors, plain data
            and the harmless classes.
    """
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.glob("*.pt"))) or "no .pt file"
        raise ConversionError(f"{path} is a folder: name a checkpoint in it ({files}).")
    allowed: list[Any] = [(type(name, (Inert,), {}), name) for name in harmless]
    try:
        if zipfile.is_zipfile(path):
            # torch.load does not compare the checksums.
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(f"{damaged} is damaged")
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConversionError(f"There is no file {path}.") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise pickle_error(path, error) from error


def pickle_error(path: str | Path, error: Exception) -> ConversionError:
    """Say why a pickle was refused, without torch's advice to load it unprotected."""
    if found := _GLOBAL.search(str(error)):
        return ConversionError(
            f"{path} holds {found[1]}, which is neither a tensor nor plain data and is not loaded: "
            "it could run code."
        )
    reason = " ".join(_ADVICE.sub("", str(error)).split())
    return ConversionError(f"{path} is not a complete checkpoint of torch.save: {reason}")


def is_state_dict(loaded: Any) -> TypeGuard[Mapping[str, torch.Tensor]]:
    """Tell whether an object is a mapping from names to tensors."""
    return isinstance(loaded, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in loaded.items()
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is dense and floating-point: not sparse, meta, nested or integer."""
    stored = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    return stored and tensor.is_floating_point()


# The Hub


def local_path(place: str | Path, files: Sequence[str], weights: Sequence[str]) -> Path:
    """Return a local path as it is, or download the model that a Hub id names to the cache.

    Args:
        place: a file, a folder, or a Hub id such as "Helsinki-NLP/opus-mt-en-de".
        files: patterns of the files to download.
        weights: patterns of further files, the preferred format first. Only the first format that
            the repository has is downloaded.

    Raises:
        ConversionError: there is no such path, and no such model on the Hub.
    """
    if Path(place).exists():
        return Path(place)
    try:
        check_path(place)
    except FileNotFoundError as error:
        raise ConversionError(str(error)) from error
    try:
        for pattern in weights:
            folder = Path(snapshot_download(str(place), allow_patterns=[*files, pattern]))
            if any(folder.glob(pattern)):
                break
        return folder
    except RepositoryNotFoundError as error:
        raise ConversionError(
            f"{place} is neither a path here nor a model on the Hub that you can read."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConversionError(
            f"{place} is not a path here, and the Hub cannot be reached."
        ) from error
    except Exception as error:  # the Hub's client passes on the errors of its HTTP library
        raise ConversionError(
            f"{place} cannot be downloaded: {' '.join(str(error).split())}"
        ) from error


__all__ = [
    "Inert",
    "is_dense",
    "is_state_dict",
    "is_text",
    "local_path",
    "parse_yaml",
    "pickle_error",
    "read_checkpoint",
    "read_json",
    "read_text",
]
