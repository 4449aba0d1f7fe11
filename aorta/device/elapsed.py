"""Distances of many events from one, read with as little time under the interpreter lock as possible.

torch's elapsed_time asks the device about both events before it asks for their distance, each time: three
calls into the runtime and a Python frame per event. Beside a training loop that is bound by its host, this
is time that the loop waits for the lock. Here the runtime is asked for the distance alone, in a loop that
runs in C.
"""

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from aorta.device.marks import NotPassedError

logger = logging.getLogger(__name__)

Elapsed = Callable[[int, int, int], int]
"""(address of a float, start event, end event) -> 0, or an error of the runtime."""

_RUNTIMES = (("libc10_hip.so", "hip"), ("libc10_cuda.so", "cuda"))
_NOT_READY = 600
"""cudaErrorNotReady, hipErrorNotReady."""
_handle = attrgetter("cuda_event")


def runtime_elapsed() -> Elapsed | None:
    """The function of the runtime that this torch itself uses; None where it cannot be reached."""
    function = _runtime_function("EventElapsedTime")
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


def forget_runtime_error() -> None:
    """Take back what the runtime keeps of this thread's last failed call.

    torch asks for it after each kernel that a thread launches, and would take it for the kernel's.
    """
    function = _runtime_function("GetLastError")
    if function is not None:
        function()


def _runtime_function(name: str) -> Any | None:
    """Looked up through torch's own library, whose dependencies are searched too.

    It keeps the interpreter lock: giving it up and taking it back for each event would cost the training
    loop more.
    """
    for library, prefix in _RUNTIMES:
        path = Path(torch.__file__).parent / "lib" / library
        if not path.exists():
            continue
        try:
            function = getattr(ctypes.PyDLL(str(path)), f"{prefix}{name}")
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_int
        return function
    return None


class ElapsedReader:
    """Reads distances through the runtime, or through torch wherever the runtime cannot say.

    The first reading is made both ways, and torch's is kept for good if they differ in a single bit.
    """

    def __init__(self, elapsed: Elapsed | None, by_torch: Callable[[Any, Any], float]) -> None:
        self._elapsed = elapsed
        self._by_torch = by_torch
        self._trusted = False

    def distances_ms(self, start: Any, events: Sequence[Any]) -> list[float]:
        """Milliseconds from start to each event.

        Raises NotPassedError where one of them has not passed, else what torch raises.
        """
        if self._elapsed is not None and events:
            distances_ms = array("f", bytes(4 * len(events)))
            address = distances_ms.buffer_info()[0]
            addresses = range(address, address + 4 * len(events), 4)
            codes = list(map(self._elapsed, addresses, repeat(_handle(start)), map(_handle, events)))
            if not any(codes):
                if self._trusted:
                    return distances_ms.tolist()
                return self._first_reading(distances_ms.tolist(), start, events)
            forget_runtime_error()
            if _NOT_READY in codes:
                raise NotPassedError
        return [self._by_torch(start, event) for event in events]

    def _first_reading(self, distances_ms: list[float], start: Any, events: Sequence[Any]) -> list[float]:
        by_torch = [self._by_torch(start, event) for event in events]
        if distances_ms == by_torch:
            self._trusted = True
        else:
            self._elapsed = None
            logger.info("events are read through torch: the runtime gives other distances")
        return by_torch
