"""What runs code when its pickle is loaded without care."""


class Hostile:
    """Pickles as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call
