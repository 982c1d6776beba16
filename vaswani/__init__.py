"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) for Hugging Face.

Importing this package registers the model and its tokenizer with transformers' Auto classes. Only
the command `vaswani` registers later, because it checks its arguments before torch is imported.
"""

import sys
from pathlib import Path
from typing import Any

_here = Path(__file__).resolve().parent
if not (_here / "modeling").is_dir():
    # In a source checkout, the subpackages are beside this folder, not inside it.
    __path__.append(str(_here.parent))

from .configuration import __version__

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # of Python itself


def _is_own_command() -> bool:
    """Tell whether this process was started as `vaswani ...` or `python -m vaswani ...`."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[2:] if words[0] in _OPTIONS_WITH_VALUE else words[1:]
    return words[:2] == ["-m", "vaswani"] or Path(*words[:1]).stem == "vaswani"


def __getattr__(name: str) -> Any:
    """Register when the command asks for the first public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import registration

    return getattr(registration, name)


if not _is_own_command():
    from .registration import (
        VaswaniConfig,
        VaswaniDecoderConfig,
        VaswaniDecoderModel,
        VaswaniEncoderConfig,
        VaswaniEncoderModel,
        VaswaniForCausalLM,
        VaswaniForConditionalGeneration,
        VaswaniForMaskedLM,
        VaswaniForSequenceClassification,
        VaswaniForTokenClassification,
        VaswaniGenerationConfig,
        VaswaniInt8Config,
        VaswaniModel,
        VaswaniTokenizer,
        VaswaniTranslationPipeline,
        join_halves,
        split_halves,
    )

__all__ = [
    "VaswaniConfig",
    "VaswaniDecoderConfig",
    "VaswaniDecoderModel",
    "VaswaniEncoderConfig",
    "VaswaniEncoderModel",
    "VaswaniForCausalLM",
    "VaswaniForConditionalGeneration",
    "VaswaniForMaskedLM",
    "VaswaniForSequenceClassification",
    "VaswaniForTokenClassification",
    "VaswaniGenerationConfig",
    "VaswaniInt8Config",
    "VaswaniModel",
    "VaswaniTokenizer",
    "VaswaniTranslationPipeline",
    "__version__",
    "join_halves",
    "split_halves",
]
