"""Files in and out: strangers' pickles are opened without running them, folders appear whole."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .rules import ConversionError, Tensors

_GLOBAL = re.compile(r"GLOBAL (\S+)")


class Inert:
    """Stands in for a toolkit's class in a pickle: keeps what was stored and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args
        vars(self).update(kwargs)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


@dataclass
class Converted:
    """What a converter returns: a model with its generation config, and a tokenizer if any."""

    model: VaswaniForConditionalGeneration
    tokenizer: VaswaniTokenizer | None = None

    def save(self, output: Path) -> None:
        """Write a folder that `from_pretrained` reads; it appears when it is complete.

        Raises:
            FileExistsError: something is there already.
        """
        with new_folder(output) as folder:
            self.model.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)


def read_checkpoint(path: Path, harmless: Sequence[str] = ()) -> Any:
    """Load a file that torch.save wrote, on the CPU, without running any code in it.

    Args:
        path: the file.
        harmless: full names of classes, as in the pickle, for which `Inert` stands in.

    Raises:
        ConversionError: the file is missing, damaged, or holds anything but tensors, plain data and
            these classes; names it.
    """
    allowed: list[Any] = [(type(name, (Inert,), {}), name) for name in harmless]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConversionError(f"There is no file {path}.") from error
    except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        found = _GLOBAL.search(str(error))
        if found:
            raise ConversionError(
                f"{path} holds {found[1]}, which is neither a tensor nor plain data and is not "
                "loaded: it could run code."
            ) from error
        raise ConversionError(f"{path} is no complete checkpoint of torch.save: {error}") from error


def build_model(config: VaswaniConfig, tensors: Tensors) -> VaswaniForConditionalGeneration:
    """Make a model of `config` and give it `tensors`, which have our names.

    A tied tensor may come under several of its names, if they agree.

    Raises:
        ConversionError: names are missing or left over, shapes differ, or tied tensors disagree;
            names all of them.
    """
    model = VaswaniForConditionalGeneration(config)
    places = model.state_dict()
    same_place: dict[int, list[str]] = {}
    for name, place in places.items():
        same_place.setdefault(place.data_ptr(), []).append(name)
    problems = [f"{name} has no place in the model" for name in tensors if name not in places]
    for names in same_place.values():
        given = [name for name in names if name in tensors]
        if not given:
            problems.append(f"{names[0]} is missing")
            continue
        expected = tuple(places[given[0]].shape)
        wrong = [name for name in given if tuple(tensors[name].shape) != expected]
        problems += [
            f"{name} has the shape {tuple(tensors[name].shape)}, not {expected}" for name in wrong
        ]
        if not wrong and any(not torch.equal(tensors[given[0]], tensors[n]) for n in given[1:]):
            problems.append(f"{' and '.join(given)} differ, but are tied in this configuration")
        if not wrong:
            places[given[0]].copy_(tensors[given[0]])
    if problems:
        raise ConversionError(f"The weights do not fit: {'; '.join(problems)}.")
    return model.eval()


def refuse(problems: Sequence[str], what: str) -> None:
    """Refuse once for all `problems` (options that this model does not have).

    Raises:
        ConversionError: there are any.
    """
    if problems:
        raise ConversionError(f"{what} cannot be converted exactly: {'; '.join(problems)}.")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `output` if all goes well and vanishes otherwise.

    Raises:
        FileExistsError: `output` is there and not an empty folder.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists: choose another output folder, or remove it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        if output.exists():
            output.rmdir()
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
