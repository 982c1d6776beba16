"""Small models that run the compiled kernels, and the marker of tests that need them."""

import pytest
import torch
from vaswani.generation.library_vaswani import library

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

compiled = pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")
KINDS = ("float32", "bfloat16", "int8")


def model_with(**changes):
    settings = {
        **{"vocab_size": 9000, "d_model": 32, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 3},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 48, **changes},
    }
    model = VaswaniForConditionalGeneration(VaswaniConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 3)
            elif "embed" not in name:
                parameter.mul_(2)
    return model


SOURCE = torch.randint(4, 700, (5, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([9, 4, 7, 1, 9])
STEPS = 8  # later, hypotheses with the same tokens in another order have almost equal scores
MASK = (torch.arange(9) < LENGTHS[:, None]).long()


def translate(model, **call):
    """Return the sequences of all hypotheses, and their scores if there is a beam."""
    beams = call.get("num_beams", 1)
    inputs = {"input_ids": SOURCE * MASK, "attention_mask": MASK, "max_new_tokens": STEPS}
    output = model.generate(
        **{**inputs, "return_dict_in_generate": True, "num_return_sequences": beams, **call}
    )
    return output.sequences, getattr(output, "sequences_scores", torch.zeros(1))
