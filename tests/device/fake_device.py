"""A kind of device that is not there: streams are clocks that the test moves, tensors lie on the CPU.

It is what another device would be to aorta: one file with a `Backend`. Work takes the milliseconds that the
test says (`run`), streams wait for events as a device's do, and the host is ahead of all of it: nothing has
passed until somebody waits (`synchronize`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from aorta.device.backend import Backend
from aorta.device.event_clock import DeviceStream


class FakeStream:
    def __init__(self, backend: "FakeBackend", handle: int) -> None:
        self.backend = backend
        self.handle = handle
        self.device_index = 0
        self.end_ms = 0.0
        """When all that was queued on it will have run."""

    def record_event(self) -> "FakeEvent":
        event = FakeEvent(self.backend)
        event.record(self)
        return event

    def wait_event(self, event: "FakeEvent") -> None:
        event.wait(self)


class FakeEvent:
    def __init__(self, backend: "FakeBackend") -> None:
        self.backend = backend
        self.at_ms = 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        self.at_ms = (stream or self.backend.current).end_ms

    def query(self) -> bool:
        return self.at_ms <= self.backend.now_ms

    def synchronize(self) -> None:
        self.backend.now_ms = max(self.backend.now_ms, self.at_ms)

    def wait(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.backend.current
        stream.end_ms = max(stream.end_ms, self.at_ms)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at_ms - self.at_ms


class FakeBackend(Backend):
    kind = "fake"  # type: ignore[assignment]
    torch_type = "cpu"
    dispatch_key = "CPU"
    collectives = "fake"
    event_type = FakeEvent
    stream_type = FakeStream
    event_wait_module = FakeEvent.wait.__module__

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.streams: list[FakeStream] = []
        self.main = self.current = self.new_stream(self.device(0))
        # The methods as they are now, before the recorder puts others in their place.
        self.record, self.wait_event, self.elapsed_ms = (
            FakeEvent.record,
            FakeEvent.wait,
            FakeEvent.elapsed_time,
        )
        self.handle_of = attrgetter("handle")
        self.current_raw_stream = lambda index: self.current.handle
        self.current_stream = lambda index: self.device_stream(self.current)
        self.current_index = lambda: 0
        self.is_capturing = lambda: False
        self.holds = lambda tensor: False
        self.memory_of = lambda index: (100, 300, 200, 0, 0)

    def run(self, ms: float) -> None:
        """Queue work of so many milliseconds on the current stream."""
        self.current.end_ms += ms

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        pass

    def synchronize(self, device: torch.device | None = None) -> None:
        self.now_ms = max(stream.end_ms for stream in self.streams)

    def index_of(self, tensor: torch.Tensor) -> int:
        return 0

    def name(self, device: torch.device) -> str:
        return "a device that is not there"

    def properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=None)

    def reserved_bytes(self, index: int) -> int:
        return 300

    def new_stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        self.streams.append(FakeStream(self, handle=len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def device_stream(self, stream: FakeStream) -> DeviceStream:
        return DeviceStream(stream, stream.handle, partial(setattr, self, "current", stream))

    def new_event(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def torch_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.PrivateUse1
