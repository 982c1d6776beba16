"""Decoding: `generate`, its searches, `score`, `align` and the pipeline. All files travel."""
