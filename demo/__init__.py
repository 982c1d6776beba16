"""A web page that shows what a model does: translations, word links, attention and scores."""

from .page import build_page, serve

__all__ = ["build_page", "serve"]
