"""Model cards, written from files; `python -m vaswani.hub_cards --help`."""
