"""Presets of `vaswani train` for small data: sizes with matching training settings.

This file imports nothing heavy, because the command line reads its defaults from it.
"""

from typing import Any

# The sizes of Wu et al. (2021), "Tiny". The length of training is in epochs.
_TINY = {
    "set": [
        *("d_model=128", "encoder_layers=4", "decoder_layers=4"),
        *("encoder_attention_heads=4", "decoder_attention_heads=4"),
        *("encoder_ffn_dim=256", "decoder_ffn_dim=256", "dropout=0.3"),
    ],
    "vocab_size": 8000,
    "max_source_tokens": 2048,
    "epochs": 30.0,
    "warmup": 1000,
    "learning_rate": 5e-3,
    "scheduler": "inverse_sqrt",
    "eval_steps": 500,
    "average": 5,
}
# d_model is half that of fairseq's IWSLT model. The other sizes are equal.
_SMALL = {
    "set": [
        *("d_model=256", "encoder_layers=6", "decoder_layers=6"),
        *("encoder_attention_heads=4", "decoder_attention_heads=4"),
        *("encoder_ffn_dim=1024", "decoder_ffn_dim=1024", "dropout=0.3"),
    ],
    "vocab_size": 10000,
    "max_source_tokens": 4096,
    "epochs": 40.0,
    "warmup": 2000,
    "learning_rate": 2e-3,
    "scheduler": "inverse_sqrt",
    "eval_steps": 1000,
    "average": 5,
}

PRESETS: dict[str, dict[str, Any]] = {"tiny": _TINY, "small": _SMALL}

__all__ = ["PRESETS"]
