"""The interface of all converters, and the converters by their names on the command line."""

import argparse
from collections.abc import Callable
from typing import Protocol

SUMMARIES = {
    "fairseq": "a checkpoint of fairseq, with its dictionaries",
    "opennmt": "a checkpoint of OpenNMT-py 2 or 3",
    "joeynmt": "a checkpoint of JoeyNMT 2, with its configuration and vocabularies",
    "marian": "a folder of MarianMTModel or OPUS-MT",
    "torch": "a state dict around torch.nn.Transformer, with a description",
    "to-ctranslate2": "a folder for CTranslate2",
    "to-onnx": "a folder of ONNX graphs",
    "to-marian": "a folder of MarianMTModel",
    "to-torch": "a state dict of torch.nn.Transformer",
}


class Converter(Protocol):
    """A module of this folder that converts from one toolkit, or to one.

    The module's docstring is the manual that `--help` prints. A module for models from a toolkit
    also has `load`, with the arguments of `convert` except the output. It returns the converted
    model in memory.
    """

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare INPUT and the options of `convert`, but not the output."""

    @property
    def convert(self) -> Callable[..., None]:
        """Function that reads INPUT and writes the new folder `output`, whole or not at all.

        Raises:
            ConversionError: the model cannot be converted exactly.
            OSError: the output exists already, or cannot be written.
        """


def find(name: str) -> Converter:
    """Import the converter with a name in `SUMMARIES`.

    Raises:
        KeyError: there is no such converter.
    """
    match name:
        case "fairseq":
            from . import fairseq

            return fairseq
        case "opennmt":
            from . import opennmt

            return opennmt
        case "joeynmt":
            from . import joeynmt

            return joeynmt
        case "marian":
            from . import marian

            return marian
        case "torch":
            from . import torch_transformer

            return torch_transformer
        case "to-ctranslate2":
            from . import ctranslate2

            return ctranslate2
        case "to-onnx":
            from . import onnx

            return onnx
        case "to-marian":
            from . import to_marian

            return to_marian
        case "to-torch":
            from . import to_torch

            return to_torch
    raise KeyError(f"There is no converter {name!r}: choose one of {', '.join(SUMMARIES)}.")


__all__ = ["SUMMARIES", "Converter", "find"]
