"""Pictures of attention: as files, and as views in notebooks and web pages."""

from .attention import plot_attention
from .hoverable import HoverableAttention, hoverable_attention

__all__ = ["HoverableAttention", "hoverable_attention", "plot_attention"]
