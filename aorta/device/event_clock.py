"""Marks by events, orders between streams, and streams named for their work, on any device that has events.

What runs once per collective calls the functions that the backend names directly: each Python frame costs
microseconds in a loop whose kernels have cleared the caches. They are bound when these objects are made.
"""

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from aorta.device.marks import NotPassedError
from aorta.steps.notes import Mark

if TYPE_CHECKING:
    from aorta.device.backend import Backend


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
        self._elapsed_ms = backend.elapsed_ms

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

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        # Float32s of milliseconds: keep the distances short (a step, not a run).
        begin, elapsed_ms = start.event, self._elapsed_ms
        distances: list[float | None] = []
        for mark in marks:
            event = mark.event
            if event is None:  # the host's: a collective of CPU tensors in a step on a device
                distances.append(None)
            elif event.query():
                distances.append(elapsed_ms(begin, event))
            else:
                raise NotPassedError
        return distances

    def recycle(self, marks: Sequence[Mark]) -> None:
        give = self._free.append  # looked up once: this runs for every mark
        for mark in marks:
            event, mark.event = mark.event, None
            if event is not None:
                give(event)


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
