"""The network and its decoding; both files travel with every checkpoint."""
