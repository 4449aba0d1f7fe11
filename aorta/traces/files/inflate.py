"""The inflate library: isal (Intel's ISA-L) where it is installed, else Python's zlib.

A third of the time of reading a trace is inflating it, and ISA-L inflates two to three times as fast. It has
wheels for Linux, macOS and Windows on x86-64 and arm64; where there is none, nothing else changes.
"""

import importlib
import zlib
from types import ModuleType
from typing import Any

_library: ModuleType
try:
    _library = importlib.import_module("isal.isal_zlib")
except ImportError:
    _library = zlib

NAME: str = _library.__name__
DECOMPRESS_ERRORS: tuple[type[Exception], type[Exception]] = (zlib.error, _library.error)


def decompressobj(wbits: int) -> Any:
    """As zlib.decompressobj."""
    return _library.decompressobj(wbits)
