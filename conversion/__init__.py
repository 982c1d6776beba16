"""Checkpoints of other toolkits in, ours out; `python -m vaswani.conversion --help`."""
