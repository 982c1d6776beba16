"""Models of other toolkits, converted to this package and back.

    from vaswani import conversion

    conversion.find("marian").convert("Helsinki-NLP/opus-mt-en-de", "out/")

`SUMMARIES` lists the converters, and `find` imports one of them. `vaswani convert
--help` is the same on the command line.
"""

from .converter import SUMMARIES, Converter, find
from .errors import ConversionError

__all__ = ["SUMMARIES", "ConversionError", "Converter", "find"]
