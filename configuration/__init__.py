"""Configuration of the models; the files named `*_vaswani.py` travel with every checkpoint."""

__version__ = "0.1.0"
