"""Registration with transformers' Auto classes and pipelines, and the package's public names."""

from pathlib import Path
from typing import Any

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
from .generation.pipeline_vaswani import VaswaniTranslationPipeline
from .generation.settings_vaswani import VaswaniGenerationConfig
from .modeling.loading_vaswani import StrictlyLoadedModel
from .modeling.modeling_vaswani import (
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniModel,
)
from .tokenization.tokenization_vaswani import VaswaniTokenizer

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


def _write_card(folder: Any, **options: Any) -> Path:
    from .hub_cards.card import write_model_card

    return write_model_card(folder, **options)


def _add_card_to_push(*arguments: Any) -> None:
    from .hub_cards.card import add_to_push

    add_to_push(*arguments)


StrictlyLoadedModel.write_card = staticmethod(_write_card)
StrictlyLoadedModel.add_card_to_push = staticmethod(_add_card_to_push)

__all__ = [
    "VaswaniConfig",
    "VaswaniEncoderModel",
    "VaswaniForConditionalGeneration",
    "VaswaniGenerationConfig",
    "VaswaniModel",
    "VaswaniTokenizer",
    "VaswaniTranslationPipeline",
]
