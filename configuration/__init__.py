"""Configurations, checks of places and names, and remote code (files named `*_vaswani.py`)."""

__version__ = "0.1.0"
