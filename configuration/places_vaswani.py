"""Checks of the place that a model is loaded from: missing paths, and models of other toolkits.

The checks run before anything is loaded. transformers would ask the Hub for a missing path, and
repeat this for a minute without a network. It would not name the converter of another toolkit.
"""

import difflib
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

# Words in the pickles of a toolkit's checkpoints. One of them is enough to tell the toolkit.
_FAIRSEQ = (b"encoder_embed_dim", b"optimizer_history")
_OPENNMT = (b"transformer_ff", b"decoder_type")
_JOEYNMT = (b"best_ckpt_score", b"best_ckpt_iteration")
# The model in a folder of each type, and the Auto class that loads it.
_KINDS = {
    "vaswani": (
        "a translation model",
        "AutoModelForSeq2SeqLM, then call split_halves for its encoder or decoder",
    ),
    "vaswani_encoder": ("an encoder alone", "AutoModel or AutoModelForMaskedLM"),
    "vaswani_decoder": ("a decoder alone", "AutoModelForCausalLM"),
}
_CHECKPOINTS = (".pt", ".pth", ".ckpt")
_BYTES_READ = 2**26  # of a pickle; a vocabulary of 100,000 words takes a few million bytes


def check_place(
    place: str | os.PathLike | None, subfolder: str | None = None, **kwargs: Any
) -> None:
    """Refuse places without a model; the arguments are those of `from_pretrained`.

    Raises:
        OSError: the path does not exist, or holds a model of another toolkit.
    """
    if place is not None:
        check_path(place, kwargs.get("cache_dir"), kwargs.get("revision"))
        if not subfolder:
            check_toolkit(place)


def check_folder(place: str | os.PathLike) -> None:
    """Refuse a file where a folder of a model is needed.

    Raises:
        OSError: the place is a file. The error names its folder, or the command that converts a
            file of another toolkit.
    """
    check_toolkit(place)
    if Path(place).is_file():
        raise NotADirectoryError(
            f"{place} is a file: name the folder of the model, such as {Path(place).parent}"
        )


def check_path(
    place: str | os.PathLike,
    cache_dir: str | os.PathLike | None = None,
    revision: str | None = None,
) -> None:
    """Refuse a local path that does not exist; accept names that may be on the Hub.

    NAME may be a path or a repository, and so may USER/NAME if USER is a local folder. Such names
    are accepted if the repository is in the cache or the Hub answers.

    Args:
        place: the path or name.
        cache_dir: cache of the Hub's repositories; None means the default.
        revision: revision of the repository.

    Raises:
        FileNotFoundError: the path does not exist. The error names the most similar path, if any.
    """
    path = Path(place)
    if path.exists():
        return
    missing = f"There is no file or folder {place}"
    if not _can_only_be_a_path(str(place)):
        if not path.parent.is_dir() or _may_be_on_hub(str(place), cache_dir, revision):
            return
        missing += ", and the Hub does not answer"
    neighbours = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, neighbours, n=1)
    hint = f"; did you mean {path.parent / similar[0]}?" if similar else "."
    raise FileNotFoundError(missing + hint)


def _can_only_be_a_path(place: str) -> bool:
    """Tell whether the Hub allows no repository of this name."""
    parts = Path(place).parts or ("",)
    return (
        len(parts) > 2
        or parts[0] in (os.sep, "..")
        or place.startswith((f".{os.sep}", "~"))
        or place.endswith((os.sep, *_CHECKPOINTS, ".npz"))
    )


def _may_be_on_hub(name: str, cache_dir: str | os.PathLike | None, revision: str | None) -> bool:
    """Tell whether a repository is in the cache, or the Hub can be reached.

    The Hub is asked once. transformers would repeat the request for a minute.
    """
    try:
        cache = None if cache_dir is None else Path(cache_dir)
        if isinstance(try_to_load_from_cache(name, "config.json", cache, revision), str):
            return True
        HfApi().model_info(name, timeout=5)
    except HfHubHTTPError:
        return True  # The Hub answers. Whether the repository exists may depend on a token.
    except Exception:  # There is no network; the class depends on the HTTP library.
        return False
    return True


def check_toolkit(place: str | os.PathLike) -> None:
    """Refuse a local file or folder of another toolkit.

    Raises:
        OSError: the place holds a model of another toolkit. The error has the command that converts
            it.
    """
    path = Path(place)
    found = None
    if path.is_dir() and not (path / "config.json").is_file():
        found = _toolkit_of_folder(path)
    elif path.is_file():
        found = _toolkit_of_file(path)
    if found is not None:
        toolkit, arguments = found
        command = f"vaswani convert {arguments} OUTPUT"
        raise OSError(
            f"{place} holds a model of {toolkit}. Convert it, and load OUTPUT instead: {command}"
        )


def check_model_type(place: str | os.PathLike, model_type: str | None, *ours: str) -> None:
    """Refuse a config.json of another architecture; `ours` are the types that can be read.

    Raises:
        OSError: names the architecture, and the command that converts it if it is Marian.
    """
    if model_type in (None, *ours):
        return
    if model_type in _KINDS:
        kind, auto_class = _KINDS[model_type]
        raise OSError(
            f"{place} holds {kind} (model_type {model_type!r}), but this class needs "
            f"{_KINDS[ours[0]][0]} ({ours[0]!r}): load the folder with {auto_class}."
        )
    if model_type != "marian":
        raise OSError(
            f"{place} holds a model of type {model_type!r}. This class loads models of type "
            f"{ours[0]!r}; {_KINDS[ours[0]][1].partition(',')[0]} loads others."
        )
    raise OSError(
        f"{place} holds a model of Marian. Convert it, and load OUTPUT instead: "
        f"vaswani convert marian {shlex.quote(str(place))} OUTPUT"
    )


def _toolkit_of_folder(folder: Path) -> tuple[str, str] | None:
    """Return the toolkit of a folder without config.json, and the converter's arguments."""
    if (folder / "decoder.yml").is_file() or any(folder.glob("*.npz")):
        return "Marian", f"marian {shlex.quote(str(folder))}"
    if (folder / "config.yaml").is_file() and any(folder.glob("*.ckpt")):
        return "JoeyNMT", f"joeynmt {shlex.quote(str(folder))}"
    files = sorted(folder.glob("*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    preferred = [path for path in files if path.name in ("checkpoint_best.pt", "model.pt")]
    return next((found for path in preferred + files if (found := _toolkit_of_file(path))), None)


def _toolkit_of_file(path: Path) -> tuple[str, str] | None:
    """Return the toolkit of a file, and the converter's arguments."""
    quoted = shlex.quote(str(path))
    if path.suffix == ".npz":
        return "Marian", f"marian {shlex.quote(str(path.parent))}"
    if path.suffix not in _CHECKPOINTS:
        return None
    words = _pickled(path)
    if any(word in words for word in _FAIRSEQ):
        dictionaries = " ".join(
            f"--{side}-dict {shlex.quote(str(path.with_name(f'dict.{side.upper()}.txt')))}"
            for side in ("source", "target")
        )
        return "fairseq", f"fairseq {quoted} {dictionaries}"
    if any(word in words for word in _OPENNMT):
        return "OpenNMT-py", f"opennmt {quoted}"
    if any(word in words for word in _JOEYNMT):
        return "JoeyNMT", f"joeynmt {quoted}"
    return None


def _pickled(path: Path) -> bytes:
    """Return the pickle of a file of torch.save, to search it for words without running it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            with archive.open(names[0]) if names else path.open("rb") as file:
                return file.read(_BYTES_READ)
    except zipfile.BadZipFile:  # the format before torch 1.6
        with path.open("rb") as file:
            return file.read(_BYTES_READ)


__all__ = ["check_folder", "check_model_type", "check_path", "check_place", "check_toolkit"]
