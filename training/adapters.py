"""LoRA on every linear layer, the map to the vocabulary included, through PEFT."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def untie_embeddings(model: PreTrainedModel) -> None:
    """Give both embeddings and the map to the vocabulary, one matrix in the paper (3.4), their own.

    Needed wherever LoRA adapts `lm_head`: merging adds the adapter to a weight in place, and so to
    the embeddings that share it. PEFT only warns of that, and its `ensure_weight_tying` adds to the
    shared matrix once for each of its three uses. Call it before `get_peft_model`, and on the base
    model before `PeftModel.from_pretrained`; what is merged and saved then has
    `tie_word_embeddings=False`.

    Args:
        model: a VaswaniForConditionalGeneration without adapters.
    """
    model.config.tie_word_embeddings = False
    base: Any = model.base_model
    if base.decoder.embed_tokens is base.encoder.embed_tokens:
        base.decoder.embed_tokens = copy.deepcopy(base.encoder.embed_tokens)
    seen = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            if weight in seen:
                module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
            seen.add(weight)


__all__ = ["untie_embeddings"]
