"""From files to batches: reading, filtering, mixing, tokenising, BPE-dropout and token batches."""
