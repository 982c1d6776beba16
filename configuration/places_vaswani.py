"""Where a model is loaded from: local paths that do not exist, and models of other toolkits.

Both are found before anything is loaded. transformers would ask the Hub for a path that does not
exist, and try again for a minute where there is no network. Nor would it name the converter of
another toolkit's model.
"""

import difflib
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

# Words in the pickle of a toolkit's checkpoint: one of each group is enough.
_FAIRSEQ = (b"encoder_embed_dim", b"optimizer_history")
_OPENNMT = (b"transformer_ff", b"decoder_type")
_JOEYNMT = (b"best_ckpt_score", b"best_ckpt_iteration")
# What a folder of each type holds, and which Auto class loads it.
_KINDS = {
    "vaswani": ("a translation model", "AutoModelForSeq2SeqLM, whose halves split_halves gives"),
    "vaswani_encoder": ("an encoder alone", "AutoModel or AutoModelForMaskedLM"),
    "vaswani_decoder": ("a decoder alone", "AutoModelForCausalLM"),
}
_CHECKPOINTS = (".pt", ".pth", ".ckpt")
_BYTES_READ = 2**26  # of a pickle: a vocabulary of 100,000 words is a few million bytes


def check_place(
    place: str | os.PathLike | None, subfolder: str | None = None, **kwargs: Any
) -> None:
    """Refuse what nothing can be loaded from; arguments are those of `from_pretrained`.

    Raises:
        OSError: there is no such path, or it holds another toolkit's model.
    """
    if place is not None:
        check_path(place, kwargs.get("cache_dir"), kwargs.get("revision"))
        if not subfolder:
            check_toolkit(place)


def check_path(
    place: str | os.PathLike,
    cache_dir: str | os.PathLike | None = None,
    revision: str | None = None,
) -> None:
    """Refuse a local path that does not exist; names that may be on the Hub pass.

    NAME, and USER/NAME where USER is a folder here, may be either. They pass if the Hub answers.

    Args:
        place: the path or name.
        cache_dir: where repositories of the Hub are cached, if not in the usual place.
        revision: of the repository.

    Raises:
        FileNotFoundError: names the most similar path, if there is one.
    """
    path = Path(place)
    if path.exists():
        return
    missing = f"There is no file or folder {place}"
    if not _can_only_be_a_path(str(place)):
        if not path.parent.is_dir() or _may_be_on_hub(str(place), cache_dir, revision):
            return
        missing += ", and the Hub does not answer"
    beside = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"; did you mean {path.parent / similar[0]}?" if similar else "."
    raise FileNotFoundError(missing + hint)


def _can_only_be_a_path(place: str) -> bool:
    """Whether no repository of the Hub can have this name."""
    parts = Path(place).parts or ("",)
    return (
        len(parts) > 2
        or parts[0] in (os.sep, "..")
        or place.startswith((f".{os.sep}", "~"))
        or place.endswith((os.sep, *_CHECKPOINTS, ".npz"))
    )


def _may_be_on_hub(name: str, cache_dir: str | os.PathLike | None, revision: str | None) -> bool:
    """Whether a repository was downloaded before, or the Hub can be reached.

    The Hub is asked once. transformers would try again for a minute.
    """
    try:
        cache = None if cache_dir is None else Path(cache_dir)
        if isinstance(try_to_load_from_cache(name, "config.json", cache, revision), str):
            return True
        HfApi().model_info(name, timeout=5)
    except HfHubHTTPError:
        return True  # The Hub answers. What it says of the repository may depend on a token.
    except Exception:  # There is no network, in the words of whatever HTTP library is used.
        return False
    return True


def check_toolkit(place: str | os.PathLike) -> None:
    """Refuse a local file or folder of another toolkit.

    Raises:
        OSError: names the toolkit, and the command that converts its models.
    """
    path = Path(place)
    found = None
    if path.is_dir() and not (path / "config.json").is_file():
        found = _of_folder(path)
    elif path.is_file():
        found = _of_file(path)
    if found is not None:
        toolkit, arguments = found
        command = f"vaswani convert {arguments} OUTPUT"
        raise OSError(
            f"{place} holds a model of {toolkit}. Convert it, and load OUTPUT instead: {command}"
        )


def check_model_type(place: str | os.PathLike, model_type: str | None, *ours: str) -> None:
    """Refuse a config.json of another architecture; `ours` are the types that can be read.

    Raises:
        OSError: names the architecture, and for Marian the command that converts it.
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


def _of_folder(folder: Path) -> tuple[str, str] | None:
    """The toolkit of a folder without config.json, and the converter's arguments."""
    if (folder / "decoder.yml").is_file() or any(folder.glob("*.npz")):
        return "Marian", f"marian {shlex.quote(str(folder))}"
    if (folder / "config.yaml").is_file() and any(folder.glob("*.ckpt")):
        return "JoeyNMT", f"joeynmt {shlex.quote(str(folder))}"
    files = sorted(folder.glob("*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    preferred = [path for path in files if path.name in ("checkpoint_best.pt", "model.pt")]
    return next((found for path in preferred + files if (found := _of_file(path))), None)


def _of_file(path: Path) -> tuple[str, str] | None:
    """The toolkit of a file, and the converter's arguments."""
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
    """The pickle of a file of torch.save, which is searched for words and not run."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            with archive.open(names[0]) if names else path.open("rb") as file:
                return file.read(_BYTES_READ)
    except zipfile.BadZipFile:  # the format before torch 1.6
        with path.open("rb") as file:
            return file.read(_BYTES_READ)


__all__ = ["check_model_type", "check_path", "check_place", "check_toolkit"]
