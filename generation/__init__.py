"""Decoding: `generate`, its searches, `score`, `align` and the pipeline, saved with each model."""
