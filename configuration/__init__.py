"""Configuration of the model; `configuration_vaswani.py` travels with every checkpoint."""
