"""Marks by events, orders between streams, and streams named for their work, on any device that has events.

What runs once per collective calls the functions that the backend names directly: each Python frame costs
microseconds in a loop whose kernels have cleared the caches. They are bound when these objects are made.
"""

import ctypes
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from aorta.device.marks import NotPassedError
from aorta.steps.notes import Mark

if TYPE_CHECKING:
    from aorta.device.backend import Backend


logger = logging.getLogger(__name__)

Elapsed = Callable[[int, int, int], int]
"""(address of a float, start event, end event) -> 0, or an error of the runtime."""

_RUNTIMES = (("libc10_hip.so", "hip"), ("libc10_cuda.so", "cuda"))
_NOT_READY = 600
"""cudaErrorNotReady, hipErrorNotReady."""
_handle = attrgetter("cuda_event")


class DeviceStream:
    """A torch stream with its handle and a function that makes it current, both looked up once."""

    __slots__ = ("make_current", "raw", "stream")

    def __init__(self, stream: Any, raw: int, make_current: Callable[[], None]) -> None:
        self.stream = stream
        self.raw = raw
        """The driver's handle."""
        self.make_current = make_current
        """Queue what follows in this thread there; the current device becomes the stream's."""


class EventClock:
    """A MarkClock whose marks are timing events of one device, taken from a pool and given back."""

    is_device = True

    def __init__(self, device: torch.device, backend: "Backend") -> None:
        self.device = device
        self.backend = backend
        self._index: int = device.index
        # Threads share it: deque's append and pop are atomic.
        self._free: deque[Any] = deque()
        self._new_event = backend.new_event
        self._record = backend.record
        self._current_stream = backend.current_stream
        elapsed_ms = backend.elapsed_ms

        def elapsed_if_passed(start: Any, end: Any) -> float:
            if not end.query():
                raise NotPassedError
            return elapsed_ms(start, end)

        self._elapsed_ms = elapsed_ms
        self._reader = ElapsedReader(backend.runtime_elapsed(), elapsed_if_passed)

    def mark(self, stream: object = None) -> Mark:
        """Record an event on a torch stream, by default the caller's current one."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._new_event(True)
        if stream is None:
            stream = self._current_stream(self._index).stream
        host_ns = monotonic_ns()
        self._record(event, stream)
        return Mark(host_ns, event)

    def first_mark(self) -> tuple[Mark, int, int]:
        """A mark and the monotonic host times between which it passed. Waits until the device is idle."""
        self.backend.synchronize(self.device)
        event = self._new_event(True)
        before_ns = monotonic_ns()
        event.record()
        event.synchronize()
        return Mark(before_ns, event), before_ns, monotonic_ns()

    def passed(self, mark: Mark) -> bool:
        has_passed: bool = mark.event.query()
        return has_passed

    def distance_ms(self, start: Mark, end: Mark) -> float:
        # A float32 of milliseconds: keep the distances short (a step, not a run).
        return self._elapsed_ms(start.event, end.event)

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        events = [mark.event for mark in marks]
        # A mark without an event is the host's: a collective of CPU tensors in a step on a device.
        if None not in events:
            return list(self._reader.distances_ms(start.event, events))
        distances = iter(
            self._reader.distances_ms(start.event, [event for event in events if event is not None])
        )
        return [None if event is None else next(distances) for event in events]

    def recycle(self, marks: Sequence[Mark]) -> None:
        give = self._free.append  # looked up once: this runs for every mark
        for mark in marks:
            event, mark.event = mark.event, None
            if event is not None:
                give(event)


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


# -- streams -------------------------------------------------------------------------------------------


class Order:
    """order(before, after): what is queued on `after` from now on follows what `before` holds now.

    By events without timing, since nobody reads their time.
    """

    def __init__(self, backend: "Backend") -> None:
        # Taken out while in use, since threads share it. An event may be recorded anew at once: a wait that
        # was issued keeps to what the event held then.
        self._free: deque[Any] = deque()
        self._new_event = backend.new_event
        self._record = backend.record
        self._wait_event = backend.wait_event

    def __call__(self, earlier: DeviceStream, later: DeviceStream) -> None:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._new_event()
        self._record(event, earlier.stream)
        self._wait_event(event, later.stream)
        self._free.append(event)


class NamedStreams(dict[str, DeviceStream]):
    """One stream per kind of work, made when first asked for.

    High priority, like the communication streams of torch's FSDP2: a collective that is ready
    should not queue behind the blocks of a large GEMM.
    """

    def __init__(self, device: torch.device, backend: "Backend") -> None:
        super().__init__()
        self._device = device
        self._backend = backend

    def __missing__(self, name: str) -> DeviceStream:
        torch_stream = self._backend.new_stream(self._device, priority=-1)
        stream = self[name] = self._backend.device_stream(torch_stream)
        return stream
