"""Strict loading: models of converted tensors, and saved models of this package.

A model is loaded completely or refused. The error names every tensor that is missing, left over or
of the wrong shape.
"""

import argparse
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.siblings_vaswani import VaswaniDecoderConfig
from ..corpora.atomic_folder import new_folder
from ..modeling.causal_lm_vaswani import VaswaniForCausalLM
from ..modeling.loading_vaswani import first_not_finite, is_finite
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from ..modeling.quantization_vaswani import refuse_int8
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .errors import ConversionError
from .reading import is_dense, local_path, pickle_error
from .rules import Tensors

TARGET_TOKENIZER = "target_tokenizer"  # subfolder for a target vocabulary of its own
# Files of a saved model or tokenizer, by which a repository on the Hub is downloaded.
_SETTINGS, _TOKENIZER = ("*.json",), ("tokenizer.json",)
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# Errors that transformers raises for damaged or foreign files.
_DAMAGE = (
    *(AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(SafetensorError, StrictDataclassError),
)


# Models of converted tensors


@dataclass
class Converted:
    """A converted model, with its tokenizers if there are any.

    Args:
        model: model in evaluation mode, with its generation config.
        tokenizer: tokenizer of the source. It also serves the target unless the target has its own.
        target_tokenizer: tokenizer of the target. It is saved in the subfolder target_tokenizer.
    """

    model: VaswaniForConditionalGeneration
    tokenizer: VaswaniTokenizer | None = None
    target_tokenizer: VaswaniTokenizer | None = None

    def save(self, output: Path) -> None:
        """Write a folder for `from_pretrained`, whole or not at all.

        Raises:
            ConversionError: transformers refuses to save the search settings.
            FileExistsError: `output` exists already.
        """
        with new_folder(output) as folder:
            try:
                self.model.save_pretrained(folder)
            except ValueError as error:
                raise ConversionError(f"The model cannot be saved: {error}") from error
            save_tokenizers(folder, self.tokenizer, self.target_tokenizer)


def build_model(config: VaswaniConfig, tensors: Tensors) -> VaswaniForConditionalGeneration:
    """Make a model of `config` with the given weights, named as in its state dict.

    A tied tensor may have several of its names, if the values agree.

    Raises:
        ConversionError: names are missing or left over, tensors have the wrong shape or no
            floating-point numbers, or tied tensors disagree.
    """
    layers = config.encoder_layers + config.decoder_layers
    problems = [f"{len(tensors)} tensors are too few for {layers} layers"]
    if layers <= len(tensors):
        problems = _misfits(config, tensors)
    if problems:
        raise ConversionError(f"The weights do not fit: {'; '.join(problems)}.")
    model = _fresh_model(config, "cpu")
    if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
        model = model.double()  # float32 holds all narrower types exactly
    places = model.state_dict()
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    return model.eval()


def _fresh_model(config: VaswaniConfig, device: str) -> VaswaniForConditionalGeneration:
    try:
        with torch.device(device):
            return VaswaniForConditionalGeneration(config)
    except RuntimeError as error:
        raise ConversionError(f"There is no room for a model of these sizes: {error}") from error


def _misfits(config: VaswaniConfig, tensors: Tensors) -> list[str]:
    """List why the tensors are not the weights of a model of `config`.

    The model is made on the meta device, because its sizes may exceed the memory.
    """
    places = _fresh_model(config, "meta").state_dict(keep_vars=True)
    tied_names: dict[int, list[str]] = {}
    for name, place in places.items():
        tied_names.setdefault(id(place), []).append(name)
    problems = [f"{name} has no place in the model" for name in tensors if name not in places]
    for names in tied_names.values():
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


def _misfit(tensor: torch.Tensor, place: torch.Tensor) -> str | None:
    """Say why a tensor cannot be copied to its place without loss."""
    if not is_dense(tensor):
        return f"is not a dense tensor of floating-point numbers, but of {tensor.dtype}"
    if tensor.shape != place.shape:
        return f"has the shape {tuple(tensor.shape)}, not {tuple(place.shape)}"
    if not is_finite(tensor):
        return "holds NaN or infinity"
    return None


# Saved models of this package


def add_model_arguments(parser: argparse.ArgumentParser, tokenizers: bool = False) -> None:
    """Declare the arguments of `open_model` and, with `tokenizers`, of `open_tokenizers`."""
    parser.add_argument(
        "model", metavar="INPUT", help="folder of a model of this package, or its id on the Hub"
    )
    if tokenizers:
        parser.add_argument(
            "--tokenizer", metavar="FOLDER", help="folder of the tokenizer; default: INPUT"
        )
        parser.add_argument(
            "--target-tokenizer",
            metavar="FOLDER",
            help="folder of the target's tokenizer, if the target has its own vocabulary",
        )


def open_model(
    model: str | Path | PreTrainedModel, language_models: bool = False
) -> VaswaniForConditionalGeneration:
    """Load a saved model from a folder or from the Hub, or return a model in memory as it is.

    With `language_models`, the result may also be a VaswaniForCausalLM.

    Raises:
        ConversionError: this is not a complete model that can be converted.
    """
    classes: dict[str, Any] = {VaswaniConfig.model_type: VaswaniForConditionalGeneration}
    if language_models:
        classes[VaswaniDecoderConfig.model_type] = VaswaniForCausalLM
    if isinstance(model, PreTrainedModel):
        if model.config.model_type not in classes or not hasattr(model, "lm_head"):
            raise ConversionError(
                f"{type(model).__name__} cannot be converted: pass a "
                f"{' or '.join(kind.__name__ for kind in classes.values())}."
            )
        require_float_weights(model)
        _refuse_adapter(model)
        if name := first_not_finite(model):
            raise ConversionError(f"{name} of the model holds NaN or infinity.")
        # The class may also be a copy of ours that a checkpoint brings along.
        return cast(VaswaniForConditionalGeneration, model)
    if not isinstance(model, str | os.PathLike):
        raise ConversionError(
            f"A {type(model).__name__} cannot be converted: pass the model inside it. For a model "
            "of PEFT, pass model.merge_and_unload()."
        )
    folder = local_path(model, _SETTINGS, _WEIGHTS)
    if (Path(folder) / "adapter_config.json").is_file() and not any(
        any(Path(folder).glob(pattern)) for pattern in _WEIGHTS
    ):
        raise ConversionError(
            f"{model} holds an adapter alone: load it with its model, and pass "
            "model.merge_and_unload()."
        )
    try:
        model_type = AutoConfig.from_pretrained(folder).model_type
        if model_type not in classes:
            kinds = " or ".join(map(repr, classes))
            raise ConversionError(
                f"{model} holds a model of type {model_type!r}, but this conversion needs {kinds}."
            )
        loaded, report = classes[model_type].from_pretrained(folder, output_loading_info=True)
    except ConversionError:
        raise
    except pickle.UnpicklingError as error:
        raise pickle_error(model, error) from error
    except _DAMAGE as error:
        raise ConversionError(f"{model} cannot be loaded: {error}") from error
    problems = [
        f"{kind.replace('_', ' ')} {', '.join(map(str, sorted(names)))}"
        for kind, names in report.items()
        if names
    ]
    if name := first_not_finite(loaded):
        problems.append(f"{name} holds NaN or infinity")
    if problems:
        raise ConversionError(f"{model} is not a complete model: {'; '.join(problems)}.")
    require_float_weights(loaded, str(model))
    _refuse_adapter(loaded)
    return loaded.eval()


def _refuse_adapter(model: PreTrainedModel) -> None:
    """Refuse a model that holds an adapter.

    Raises:
        ConversionError: names the way out.
    """
    if any(".base_layer." in name for name, _ in model.named_parameters()):
        raise ConversionError(
            "The model holds an adapter: merge it first with model.merge_and_unload(), or remove "
            "it with model.delete_adapter."
        )


def require_float_weights(model: PreTrainedModel, place: str = "The model") -> None:
    """Refuse a model with int8 weights.

    Raises:
        ConversionError: the model has int8 weights. The error names the ways out.
    """
    try:
        refuse_int8(model, "Conversion")
    except ValueError as error:
        raise ConversionError(f"{place} cannot be converted: {error}") from error


def open_tokenizers(
    model: str | Path | PreTrainedModel | None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    target_tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]:
    """Load the tokenizers of a model.

    Args:
        model: folder of the tokenizers, unless the other arguments replace them. A model in
            memory has none.
        tokenizer: tokenizer of the source.
        target_tokenizer: tokenizer of the target.

    Returns:
        The tokenizer of the source and the separate one of the target; None where there is none.

    Raises:
        ConversionError: a tokenizer cannot be loaded.
    """
    place = tokenizer if isinstance(tokenizer, str | Path) else model
    if isinstance(place, str | Path):
        folder = local_path(place, _SETTINGS, _TOKENIZER)
        if tokenizer is None and _holds_tokenizer(folder):
            tokenizer = folder
        if target_tokenizer is None and (folder / TARGET_TOKENIZER).is_dir():
            target_tokenizer = folder / TARGET_TOKENIZER
    if target_tokenizer is None and isinstance(model, str | Path):
        own = local_path(model, _SETTINGS, _TOKENIZER) / TARGET_TOKENIZER
        target_tokenizer = own if own.is_dir() else None
    return _open_tokenizer(tokenizer), _open_tokenizer(target_tokenizer)


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))


def _open_tokenizer(
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer from a folder or from the Hub, or return one in memory as it is."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    folder = local_path(tokenizer, _SETTINGS, _TOKENIZER)
    if not _holds_tokenizer(folder):
        raise ConversionError(f"{tokenizer} holds no tokenizer.")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConversionError(f"The tokenizer of {tokenizer} cannot be loaded: {error}") from error


def save_tokenizers(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write the tokenizers into a model's folder, where `open_tokenizers` finds them."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if target_tokenizer is not None:
        target_tokenizer.save_pretrained(folder / TARGET_TOKENIZER)


__all__ = [
    "TARGET_TOKENIZER",
    "Converted",
    "add_model_arguments",
    "build_model",
    "open_model",
    "open_tokenizers",
    "require_float_weights",
    "save_tokenizers",
]
