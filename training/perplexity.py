"""The perplexity of a loss."""

import math


def perplexity_of(loss: float) -> float:
    """Return e^loss, for a mean loss per token; infinity if a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


__all__ = ["perplexity_of"]
