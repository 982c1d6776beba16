"""A web page that shows what a model does: translations, word links, attention and scores."""
