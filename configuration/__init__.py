"""Configurations, checks of places and names, and remote code (files named `*_vaswani.py`)."""

__version__ = "0.2.0.dev0"
