"""Files in and out: strangers' pickles are opened without running them, folders appear whole."""

import argparse
import contextlib
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.places_vaswani import check_path
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from ..training.checkpoints import new_folder
from .rules import ConversionError, Tensors

TARGET_TOKENIZER = "target_tokenizer"  # subfolder, where source and target have one each
_GLOBAL = re.compile(r"GLOBAL (\S+)")
# What torch adds to its errors: how to load the file with all that is in it.
_ADVICE = re.compile(
    r"Weights only load failed\.|In PyTorch 2\.6.*?trusted source\.|Please file an issue.*?error:"
    r"|Check the documentation.*",
    re.DOTALL,
)


class Inert:
    """Stands in for a toolkit's class in a pickle: keeps what was stored and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args
        vars(self).update(kwargs)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


@dataclass
class Converted:
    """What a converter returns: a model with its generation config, and a tokenizer if any.

    Args:
        model: in evaluation mode.
        tokenizer: of the source, and of the target too unless it has its own.
        target_tokenizer: is saved in the folder's subfolder target_tokenizer.
    """

    model: VaswaniForConditionalGeneration
    tokenizer: VaswaniTokenizer | None = None
    target_tokenizer: VaswaniTokenizer | None = None

    def save(self, output: Path) -> None:
        """Write a folder that `from_pretrained` reads; it appears when it is complete.

        Raises:
            FileExistsError: something is there already.
        """
        with new_folder(output) as folder:
            self.model.save_pretrained(folder)
            save_tokenizers(folder, self.tokenizer, self.target_tokenizer)


def read_checkpoint(path: Path, harmless: Sequence[str] = ()) -> Any:
    """Load a file that torch.save wrote, on the CPU, without running any code in it.

    Args:
        path: the file.
        harmless: full names of classes, as in the pickle, for which `Inert` stands in.

    Raises:
        ConversionError: the file is missing, damaged, or holds anything but tensors, plain data and
            these classes; names it.
    """
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.glob("*.pt"))) or "no .pt file"
        raise ConversionError(f"{path} is a folder: name a checkpoint in it ({files}).")
    allowed: list[Any] = [(type(name, (Inert,), {}), name) for name in harmless]
    try:
        if zipfile.is_zipfile(path):
            # torch.load does not look at the check sums.
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(f"{damaged} is damaged")
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConversionError(f"There is no file {path}.") from error
    except Exception as error:  # what a damaged pickle can raise has no end
        raise _refused(path, error) from error


def _refused(path: Path, error: Exception) -> ConversionError:
    """Say why a pickle was not loaded, without torch's advice to load it unprotected."""
    if found := _GLOBAL.search(str(error)):
        return ConversionError(
            f"{path} holds {found[1]}, which is neither a tensor nor plain data and is not loaded: "
            "it could run code."
        )
    reason = " ".join(_ADVICE.sub("", str(error)).split())
    return ConversionError(f"{path} is no complete checkpoint of torch.save: {reason}")


@contextlib.contextmanager
def reading_options(path: Path) -> Iterator[None]:
    """Turn what options of the wrong kind raise where they are used into a ConversionError."""
    try:
        yield
    except ConversionError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        # Strict dataclasses wrap what a validator raises in a line about the validator.
        reason = error.__cause__ if isinstance(error, StrictDataclassError) else None
        raise ConversionError(f"The options in {path} make no model: {reason or error}") from error


def build_model(config: VaswaniConfig, tensors: Tensors) -> VaswaniForConditionalGeneration:
    """Make a model of `config` and give it `tensors`, which have our names.

    A tied tensor may come under several of its names, if they agree.

    Raises:
        ConversionError: names are missing or left over, tensors have other shapes or no floating
            point, or tied ones disagree; names all of them.
    """
    layers = config.encoder_layers + config.decoder_layers
    problems = [f"{len(tensors)} tensors are too few for {layers} layers"]
    if layers <= len(tensors):
        problems = _misfits(config, tensors)
    if problems:
        raise ConversionError(f"The weights do not fit: {'; '.join(problems)}.")
    model = _fresh(config, "cpu")
    if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
        model = model.double()  # narrower types are held by float32 without rounding
    places = model.state_dict()
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    return model.eval()


def _fresh(config: VaswaniConfig, device: str) -> VaswaniForConditionalGeneration:
    try:
        with torch.device(device):
            return VaswaniForConditionalGeneration(config)
    except RuntimeError as error:
        raise ConversionError(f"There is no room for a model of these sizes: {error}") from error


def _misfits(config: VaswaniConfig, tensors: Tensors) -> list[str]:
    """Say why `tensors` are not those of a model of `config`, which need not have room here."""
    places = _fresh(config, "meta").state_dict(keep_vars=True)
    same_place: dict[int, list[str]] = {}
    for name, place in places.items():
        same_place.setdefault(id(place), []).append(name)
    problems = [f"{name} has no place in the model" for name in tensors if name not in places]
    for names in same_place.values():
        given = [name for name in names if name in tensors]
        if not given:
            problems.append(f"{names[0]} is missing")
            continue
        misfits = [
            f"{name} {reason}" for name in given if (reason := _misfit(tensors[name], places[name]))
        ]
        problems += misfits
        if not misfits and any(not torch.equal(tensors[given[0]], tensors[n]) for n in given[1:]):
            problems.append(f"{' and '.join(given)} differ, but are tied in this configuration")
    return problems


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is what weights are: floating-point numbers, every one stored."""
    stored = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    return stored and tensor.is_floating_point()


def _misfit(tensor: torch.Tensor, place: torch.Tensor) -> str | None:
    """Say why a tensor cannot be copied to its place without loss."""
    if not is_dense(tensor):
        return f"is no dense tensor of floating-point numbers, but of {tensor.dtype}"
    if tensor.shape != place.shape:
        return f"has the shape {tuple(tensor.shape)}, not {tuple(place.shape)}"
    return None


def add_model_arguments(parser: argparse.ArgumentParser, tokenizers: bool = False) -> None:
    """Describe what all outgoing converters take: a model and, with `tokenizers`, its tokenizers.

    They are the arguments of `open_model` and `open_tokenizers`.
    """
    parser.add_argument("model", metavar="INPUT", help="folder of ours, or its name on the Hub")
    if tokenizers:
        parser.add_argument("--tokenizer", help="folder of the tokenizer, if not INPUT")
        parser.add_argument(
            "--target-tokenizer", help="folder of the target's tokenizer, where vocabularies differ"
        )


def open_model(model: str | Path | PreTrainedModel) -> PreTrainedModel:
    """Load a folder of ours, or a name on the Hub; return a model in memory as it is.

    Raises:
        ConversionError: it is not a whole model of this package that generates.
    """
    if isinstance(model, PreTrainedModel):
        if model.config.model_type != VaswaniConfig.model_type or not hasattr(model, "lm_head"):
            raise ConversionError(
                f"{type(model).__name__} is not VaswaniForConditionalGeneration, which alone is "
                "converted."
            )
        return model
    failures = (
        *(AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
        *(SafetensorError, StrictDataclassError),
    )
    try:
        check_path(model)
        found = AutoConfig.from_pretrained(model).model_type
    except failures as error:
        raise ConversionError(f"{model} cannot be loaded: {error}") from error
    if found != VaswaniConfig.model_type:
        raise ConversionError(f"{model} holds a model of type {found!r}, not of this package.")
    try:
        found_there: Any = VaswaniForConditionalGeneration.from_pretrained(
            model, output_loading_info=True
        )
    except pickle.UnpicklingError as error:
        raise _refused(Path(model), error) from error
    except failures as error:
        raise ConversionError(f"{model} cannot be loaded: {error}") from error
    loaded, report = found_there
    problems = [
        f"{kind.replace('_', ' ')} {', '.join(map(str, sorted(names)))}"
        for kind, names in report.items()
        if names
    ]
    if problems:
        raise ConversionError(f"{model} is not a whole model: {'; '.join(problems)}.")
    return loaded.eval()


def open_tokenizers(
    model: str | Path | PreTrainedModel | None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    target_tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]:
    """Load what `save_tokenizers` wrote beside a model, or the tokenizers given in its place.

    Returns the source's, None where there is none, and the target's, None where it has none of its
    own.

    Raises:
        ConversionError: one that is given or there cannot be loaded.
    """
    folder = model if isinstance(model, str | Path) else None
    if isinstance(tokenizer, str | Path):
        folder = tokenizer
    if tokenizer is None and folder is not None and _may_hold_tokenizer(Path(folder)):
        tokenizer = folder
    if target_tokenizer is None and folder is not None:
        beside = Path(folder) / TARGET_TOKENIZER
        target_tokenizer = beside if beside.is_dir() else None
    return _open_tokenizer(tokenizer), _open_tokenizer(target_tokenizer)


def _may_hold_tokenizer(folder: Path) -> bool:
    """Tell whether there is a tokenizer; of what may be a name on the Hub one only learns later."""
    names = ("tokenizer.json", "tokenizer_config.json")
    return not folder.is_dir() or any((folder / name).exists() for name in names)


def _open_tokenizer(
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
) -> PreTrainedTokenizerBase | None:
    if tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not _may_hold_tokenizer(Path(tokenizer)):
        raise ConversionError(f"{tokenizer} holds no tokenizer.")
    try:
        check_path(tokenizer)
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConversionError(f"The tokenizer of {tokenizer} cannot be loaded: {error}") from error


def save_tokenizers(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write tokenizers to a model's folder, the target's own to a subfolder."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if target_tokenizer is not None:
        target_tokenizer.save_pretrained(folder / TARGET_TOKENIZER)


def refuse(problems: Sequence[str], what: str) -> None:
    """Refuse once for all `problems` (options that this model does not have).

    Raises:
        ConversionError: there are any.
    """
    if problems:
        raise ConversionError(f"{what} cannot be converted exactly: {'; '.join(problems)}.")
