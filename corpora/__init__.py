"""From files to batches: reading, tokenising, BPE-dropout, batches by tokens."""
