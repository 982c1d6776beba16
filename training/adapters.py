"""Preparation of a model for LoRA (PEFT) on every linear layer, including `lm_head`."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def untie_embeddings(model: PreTrainedModel) -> None:
    """Give both embeddings and `lm_head` a matrix each. In the paper, they share one (3.4).

    LoRA on `lm_head` needs this, because merging adds the adapter to a weight in place, and would
    change embeddings that share the weight. An adapter of `embed_tokens` would serve the encoder
    alone, because both stacks share one module. PEFT only warns about it, and its
    `ensure_weight_tying` adds the adapter once for each of the three uses of the matrix.

    Call this function before `get_peft_model`, and on the base model before
    `PeftModel.from_pretrained`. The merged and saved model then has `tie_word_embeddings=False`.

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
