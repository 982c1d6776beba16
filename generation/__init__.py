"""Decoding: `generate`, its searches, `score`, `align` and the pipeline. Saved with models."""
