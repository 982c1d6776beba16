"""The commands of `vaswani`, one file each; `main.py` chooses between them."""
