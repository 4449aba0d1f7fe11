"""CUDA and HIP: event marks, raw stream handles, and streams named for their work.

torch presents HIP under torch.cuda, so one file serves both. What runs once per collective calls torch's
C functions directly: each Python frame costs microseconds in a loop whose kernels have cleared the caches.
A torch without CUDA has none of them, and nothing here is called there.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import torch

from aorta.device.elapsed import ElapsedReader, runtime_elapsed
from aorta.device.marks import Mark, NotPassedError
from aorta.device.streams import loaded_function, runtime

current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
"""The driver's handle of the caller's current stream on a device: cheap, and equal for equal streams."""

is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current stream is being captured into a graph, where timing events have no place."""

wait_event: Callable[[Any, Any], None] = getattr(torch._C._CudaEventBase, "wait", None)  # type: ignore[assignment]
"""wait_event(event, stream): all later work of the stream follows the event.

Below torch.cuda.Event.wait, which the recorder watches: these waits are its own.
"""

_record: Any = getattr(torch._C._CudaEventBase, "record", None)
_elapsed_ms: Any = getattr(torch._C._CudaEventBase, "elapsed_time", None)


class CudaStream:
    """A stream of torch's with what is needed of it at hand."""

    __slots__ = ("make_current", "raw", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.raw: int = stream.cuda_stream
        self.make_current: Callable[[], None] = partial(
            torch._C._cuda_setStream, stream.stream_id, stream.device_index, stream.device_type
        )
        """Queue what follows in this thread there; the current device becomes the stream's."""


def let_others_capture() -> None:
    """Let this thread ask about events while another one captures a graph, whose capture that would end.

    Does nothing where the runtime's function cannot be reached.
    """
    library, prefix = runtime()
    exchange = loaded_function(f"{prefix}ThreadExchangeStreamCaptureMode", library)
    if exchange is not None:
        relaxed = 2  # cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed
        exchange(ctypes.byref(ctypes.c_int(relaxed)))


class Order:
    """order(before, after): what is queued on `after` from now on follows what `before` holds now.

    By events without timing, since nobody reads their time.
    """

    def __init__(self) -> None:
        # Taken out while in use, since threads share it. An event may be recorded anew at once: a wait that
        # was issued keeps to what the event held then.
        self._free: deque[Any] = deque()

    def __call__(self, earlier: CudaStream, later: CudaStream) -> None:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event()
        _record(event, earlier.stream)
        wait_event(event, later.stream)
        self._free.append(event)


_streams: dict[tuple[int, int], CudaStream] = {}
"""By (device index, driver's handle): making a Stream object costs more than asking which is current."""


def current_stream(device_index: int) -> CudaStream:
    """The caller's current stream, without making a new object for a stream seen before."""
    key = (device_index, current_raw_stream(device_index))
    stream = _streams.get(key)
    if stream is None:
        stream_id, index, device_type = torch._C._cuda_getCurrentStream(device_index)
        stream = _streams[key] = CudaStream(
            torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=device_type)
        )
    return stream


def _elapsed_if_passed(start: Any, end: Any) -> float:
    if not end.query():
        raise NotPassedError
    ms: float = _elapsed_ms(start, end)
    return ms


class EventClock:
    """Marks are pooled timing events of one device."""

    is_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index
        # Threads share it: deque's append and pop are atomic.
        self._free: deque[Any] = deque()
        self._reader = ElapsedReader(runtime_elapsed(), _elapsed_if_passed)

    def mark(self, stream: object = None) -> Mark:
        """stream: a torch.cuda.Stream."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        if stream is None:
            stream = current_stream(self._index).stream
        host_ns = monotonic_ns()
        _record(event, stream)
        return Mark(host_ns, event)

    def passed(self, mark: Mark) -> bool:
        has_passed: bool = mark.event.query()  # type: ignore[attr-defined]
        return has_passed

    def distance_ms(self, start: Mark, end: Mark) -> float:
        # A float32 of milliseconds: keep the distances short (a step, not a run).
        ms: float = _elapsed_ms(start.event, end.event)
        return ms

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        events = [mark.event for mark in marks]
        if None not in events:
            return list(self._reader.distances_ms(start.event, events))
        distances = iter(
            self._reader.distances_ms(start.event, [event for event in events if event is not None])
        )
        return [None if event is None else next(distances) for event in events]

    def recycle(self, marks: Sequence[Mark]) -> None:
        give = self._free.append
        for mark in marks:
            event, mark.event = mark.event, None
            if event is not None:
                give(event)


class NamedStreams(dict[str, CudaStream]):
    """One stream per kind of work, made when first asked for.

    High priority, like the communication streams of torch's FSDP2: a collective that is ready
    should not queue behind the blocks of a large GEMM.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, name: str) -> CudaStream:
        stream = self[name] = CudaStream(torch.cuda.Stream(self._device, priority=-1))
        return stream
