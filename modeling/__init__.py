"""The network: its layers, loss, dropout, embeddings and strict loading, saved with each model."""
