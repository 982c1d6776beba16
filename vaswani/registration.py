"""Registration with transformers' Auto classes and pipelines, and the package's public names."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipelines,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration.configuration_vaswani import VaswaniConfig
from .configuration.siblings_vaswani import VaswaniDecoderConfig, VaswaniEncoderConfig
from .generation.pipeline_vaswani import VaswaniTranslationPipeline
from .generation.settings_vaswani import VaswaniGenerationConfig
from .modeling.causal_lm_vaswani import VaswaniDecoderModel, VaswaniForCausalLM
from .modeling.encoder_vaswani import VaswaniEncoderModel
from .modeling.halves_vaswani import join_halves, split_halves
from .modeling.heads_vaswani import (
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from .modeling.loading_vaswani import StrictlyLoadedModel
from .modeling.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel
from .modeling.quantization_vaswani import VaswaniInt8Config
from .tokenization.tokenization_vaswani import VaswaniTokenizer

_CONFIGS = (VaswaniConfig, VaswaniEncoderConfig, VaswaniDecoderConfig)
_MODELS = {
    AutoModelForSeq2SeqLM: VaswaniForConditionalGeneration,
    AutoModelForCausalLM: VaswaniForCausalLM,
    AutoModelForMaskedLM: VaswaniForMaskedLM,
    AutoModelForSequenceClassification: VaswaniForSequenceClassification,
    AutoModelForTextEncoding: VaswaniEncoderModel,
    AutoModelForTokenClassification: VaswaniForTokenClassification,
}

for config in _CONFIGS:
    owner = CONFIG_MAPPING._extra_content.get(config.model_type, config)
    if owner.__module__ != config.__module__:
        # AutoConfig.register protects transformers' own models only.
        raise ValueError(
            f"model_type {config.model_type!r} is already registered by {owner.__module__}."
        )
    AutoConfig.register(config.model_type, config)
    AutoTokenizer.register(config, tokenizer_class=VaswaniTokenizer)
# The config of an encoder saved by version 0.1 names its class, so AutoModel can choose it.
AutoModel.register(VaswaniConfig, (VaswaniModel, VaswaniEncoderModel))
AutoModel.register(VaswaniEncoderConfig, VaswaniEncoderModel)
AutoModel.register(VaswaniDecoderConfig, VaswaniDecoderModel)
for auto_class, model_class in _MODELS.items():
    for config in _CONFIGS:
        # Our class refuses a folder of another type and names the Auto class that loads it.
        # transformers would list all models instead. A tuple of classes passes its check.
        own = config is getattr(model_class, "config_class", None)
        auto_class.register(config, model_class if own else (model_class,))

# transformers 5 has no translation task, and 5.23 refuses its name even if it is registered.
getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
pipelines.PIPELINE_REGISTRY.register_pipeline(
    "translation", VaswaniTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)
# With this attribute, saving a pipeline would copy its code again, next to the model's copy.
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
    "join_halves",
    "split_halves",
]
