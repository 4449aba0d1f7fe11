"""Points in time on a device stream (events) or on the host clock, and the distances between them."""

import ctypes
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch


class Mark(msgspec.Struct, eq=False, gc=False):
    """A point on a stream. `host_ns` is the monotonic host time just before it was queued.

    Made by the hundred beside a training loop: in C, and unknown to the garbage collector, which
    would otherwise run more often (an event refers to nothing).
    """

    host_ns: int
    event: object = None
    number: int = 0
    """Among the driver's kernel records; 0: it is none of those."""


class NotPassedError(Exception):
    """The device has not reached a mark whose time was asked for."""


class MarkClock(Protocol):
    """Sets marks on the current stream and measures their distance once they have passed."""

    is_device: bool

    def mark(self, stream: object = None) -> Mark:
        """Queue a mark on `stream`, by default the caller's current one. Never blocks."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether the device has reached the mark. Never blocks."""
        ...

    def distance_ms(self, start: Mark, end: Mark) -> float:
        """Milliseconds from start to end; both must have passed."""
        ...

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        """Milliseconds from start to each mark, None for marks that this clock did not set.

        Raises NotPassedError where one of them has not passed. Never blocks.
        """
        ...

    def recycle(self, marks: Sequence[Mark]) -> None:
        """Take marks back for reuse. The caller must not touch them again."""
        ...


class HostClock:
    """Marks on the host's monotonic clock: they pass when they are set."""

    is_device = False

    def mark(self, stream: object = None) -> Mark:
        return Mark(time.monotonic_ns())

    def passed(self, mark: Mark) -> bool:
        return True

    def distance_ms(self, start: Mark, end: Mark) -> float:
        return (end.host_ns - start.host_ns) / 1e6

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        origin_ns = start.host_ns
        return [(mark.host_ns - origin_ns) / 1e6 for mark in marks]

    def recycle(self, marks: Sequence[Mark]) -> None:
        return None


T = TypeVar("T")


class Pool(Generic[T]):
    """Free objects for reuse. Threads may share it: deque's append and pop are atomic."""

    def __init__(self) -> None:
        self._free: deque[T] = deque()

    def take(self) -> T | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give(self, item: T) -> None:
        self._free.append(item)


def clock_anchor() -> dict[str, int]:
    """unix_ns, monotonic_ns, boottime_ns of one instant, and the width of the reading in ns.

    The tightest of five tries: the reading is bracketed by two looks at the monotonic clock.
    """
    best: dict[str, int] | None = None
    for _ in range(5):
        start_ns = time.monotonic_ns()
        unix = time.time_ns()
        boottime = _boottime_ns()
        end_ns = time.monotonic_ns()
        if best is None or end_ns - start_ns < best["width_ns"]:
            best = {
                "unix_ns": unix,
                "monotonic_ns": (start_ns + end_ns) // 2,
                "boottime_ns": boottime,
                "width_ns": end_ns - start_ns,
            }
    assert best is not None
    return best


def _boottime_ns() -> int:
    # Linux only; elsewhere the monotonic clock is the nearest thing.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)


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
