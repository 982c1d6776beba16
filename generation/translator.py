"""A saved model as a pipeline, for the demo page and for the commands about text."""

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.places_vaswani import check_folder
from .pipeline_vaswani import VaswaniTranslationPipeline


def load_translator(model: str, dtype: str = "auto") -> VaswaniTranslationPipeline:
    """Load a model with its tokenizers, on the first accelerator or else on the CPU.

    Raises:
        OSError: the model does not exist, is damaged, or belongs to another toolkit.
        ValueError: a file of the model is damaged.
    """
    # Load the configuration first, because its errors explain wrong paths and foreign models.
    check_folder(model)
    VaswaniConfig.from_pretrained(model)
    # transformers' `pipeline` would hide an error of the weights among the tracebacks of all
    # classes that it tries.
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return VaswaniTranslationPipeline(loaded, tokenizer, task="translation")


__all__ = ["load_translator"]
