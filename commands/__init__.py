"""The commands of `vaswani`: `main.py` chooses the file of a command.

Files named `*_options.py` have the options that commands share. `parser.py`, `train_parser.py` and
`recipes.py` read command lines. `settings_check.py`, `trainer_check.py` and `train_warnings.py`
check them. `text.py` reads and writes the lines of text files.
"""
