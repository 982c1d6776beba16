"""The base class of errors in what a user gave to a command."""


class InputError(ValueError):
    """Wrong data, options or settings. The command shows the message without a traceback."""


__all__ = ["InputError"]
