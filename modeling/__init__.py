"""The network: its layers, loss, dropout, embeddings and strict loading. All files travel."""
