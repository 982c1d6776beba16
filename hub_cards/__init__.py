"""Model cards, written from files; `vaswani card --help`."""
