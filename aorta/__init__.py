"""Tells where a distributed PyTorch training step loses its time.

`import aorta` loads neither torch nor numpy; the names below are imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aorta._version import __version__

if TYPE_CHECKING:
    from aorta.attach.instrument import instrument as instrument
    from aorta.page.notebook import compare as compare
    from aorta.page.notebook import load as load

__all__ = ["__version__", "compare", "instrument", "load"]

_HOME = {
    "compare": "aorta.page.notebook",
    "instrument": "aorta.attach.instrument",
    "load": "aorta.page.notebook",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aorta' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME.keys())
