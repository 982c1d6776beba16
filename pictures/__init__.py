"""Pictures of what a model does; they need matplotlib."""

from ..configuration.extras import needs

with needs("matplotlib"):
    from .attention import plot_attention

__all__ = ["plot_attention"]
