"""Python's garbage collection, held back where it costs more than it frees."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Nothing is collected inside. For work that makes 1e5 objects without cycles: looking at them takes
    longer than making them; and for timed work, in which the pause would be the collector's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
