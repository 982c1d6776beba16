"""Tokenizers: their training, and the class that encodes and decodes."""
