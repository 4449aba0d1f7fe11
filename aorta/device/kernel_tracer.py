"""What kernel records need of either driver's tracer: sizes of the ring, the error, where libraries lie."""

import sys
from pathlib import Path

from aorta.errors import AortaError

CAPACITY = 1 << 19
"""Records that the ring holds (20 MB): some hundred steps of a thousand kernels, read 20 times a second."""
BUFFER_BYTES = 1 << 20


class KernelRecordsUnavailable(AortaError):
    """Raised when kernel records cannot be had; the message is one line and says why."""


def mapped_files() -> list[str]:
    """Shared libraries that the process has loaded."""
    if sys.platform != "linux":
        return []
    try:
        text = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[-1] for line in text.splitlines() if ".so" in line))
