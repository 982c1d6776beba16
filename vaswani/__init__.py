"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) for Hugging Face.

Importing this package registers the model and its tokenizer with transformers' Auto classes.
"""

from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not (_here / "modeling").is_dir():
    # A source checkout: the subpackages lie beside this folder, not inside it.
    __path__.append(str(_here.parent))

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    AutoTokenizer,
    pipelines,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration.configuration_vaswani import VaswaniConfig
from .modeling.modeling_vaswani import (
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniModel,
)
from .modeling.settings_vaswani import VaswaniGenerationConfig
from .tokenization.pipeline_vaswani import VaswaniTranslationPipeline
from .tokenization.tokenization_vaswani import VaswaniTokenizer

__version__ = "0.1.0"

_owner = CONFIG_MAPPING._extra_content.get("vaswani", VaswaniConfig)
if _owner.__module__ != VaswaniConfig.__module__:
    # AutoConfig.register protects transformers' own models only.
    raise ValueError(f"model_type 'vaswani' is already registered by {_owner.__module__}.")
AutoConfig.register("vaswani", VaswaniConfig)
# An encoder saved alone names itself in its config, by which AutoModel chooses.
AutoModel.register(VaswaniConfig, (VaswaniModel, VaswaniEncoderModel))
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration)
AutoModelForTextEncoding.register(VaswaniConfig, VaswaniEncoderModel)
AutoTokenizer.register(VaswaniConfig, tokenizer_class=VaswaniTokenizer)

# transformers 5 has no translation task, and 5.23 refuses its name even where it is registered.
getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
pipelines.PIPELINE_REGISTRY.register_pipeline(
    "translation", VaswaniTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)
# By this mark a saved pipeline would copy its code a second time, beside that of the model.
delattr(VaswaniTranslationPipeline, "_registered_impl")

__all__ = [
    "VaswaniConfig",
    "VaswaniEncoderModel",
    "VaswaniForConditionalGeneration",
    "VaswaniGenerationConfig",
    "VaswaniModel",
    "VaswaniTokenizer",
    "VaswaniTranslationPipeline",
]
