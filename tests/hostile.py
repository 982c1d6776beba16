"""A class whose pickle runs code when it is loaded unsafely."""


class Hostile:
    """An object that pickles as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call
