"""The network: its layers, loss, dropout, embeddings and strict loading. Saved with models."""
