"""Models of other toolkits, converted to this package and back.

    from vaswani import conversion

    conversion.find("marian").convert("Helsinki-NLP/opus-mt-en-de", "out/")

`SUMMARIES` lists the converters, and `find` imports one of them. `vaswani convert --help` is the
same on the command line. `ctranslate2.py`, `onnx.py` and the files `to_*.py` write models for other
toolkits. The other converters read models of their toolkits.
"""

from .converter import SUMMARIES, Converter, find
from .errors import ConversionError

__all__ = ["SUMMARIES", "ConversionError", "Converter", "find"]
