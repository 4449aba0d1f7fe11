"""CUDA and HIP: event marks, raw stream handles, and streams named for their work.

torch presents HIP under torch.cuda, so one file serves both.
"""

import time
from typing import Any

import torch

from aorta.device.marks import Mark, Pool


def current_raw_stream(device_index: int) -> int:
    """The driver's handle of the caller's current stream: cheap, and equal for equal streams."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By (stream id, device index): making a Stream object costs more than asking which one is current."""


def current_stream(device_index: int) -> torch.cuda.Stream:
    """torch.cuda.current_stream, without making a new object for a stream seen before."""
    stream_id, index, device_type = torch._C._cuda_getCurrentStream(device_index)
    stream = _streams.get((stream_id, index))
    if stream is None:
        stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=device_type)
        _streams[stream_id, index] = stream
    return stream


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, where timing events have no place."""
    return torch.cuda.is_current_stream_capturing()


def set_stream(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def wait_event(stream: torch.cuda.Stream, mark: Mark) -> None:
    """All later work of `stream` follows the mark.

    Goes below torch.cuda.Stream.wait_event, which the recorder watches: these waits are its own.
    """
    torch._C._CudaEventBase.wait(mark.event, stream)  # type: ignore[arg-type]


# Marks are set and read by the hundred in a step: these go below torch.cuda.Event's Python methods.
# A torch without CUDA has neither, and no EventClock is made there.
_record: Any = getattr(torch._C._CudaEventBase, "record", None)
_elapsed_ms: Any = getattr(torch._C._CudaEventBase, "elapsed_time", None)


class EventClock:
    """Marks are pooled timing events of one device."""

    is_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index
        self._pool: Pool[torch.cuda.Event] = Pool()

    def mark(self, stream: object = None) -> Mark:
        event = self._pool.take()
        if event is None:
            event = torch.cuda.Event(enable_timing=True)
        if stream is None:  # making the Stream object costs more than the mark: pass it where it is known
            stream = current_stream(self._index)
        host_ns = time.monotonic_ns()
        _record(event, stream)
        return Mark(host_ns, event)

    def passed(self, mark: Mark) -> bool:
        done: bool = mark.event.query()  # type: ignore[attr-defined]
        return done

    def distance_ms(self, start: Mark, end: Mark) -> float:
        # elapsed_time is a float32 of milliseconds: keep the distances short (a step, not a run).
        ms: float = _elapsed_ms(start.event, end.event)
        return ms

    def recycle(self, marks: list[Mark]) -> None:
        for mark in marks:
            event, mark.event = mark.event, None
            if event is not None:
                self._pool.give(event)  # type: ignore[arg-type]


class NamedStreams:
    """One stream per kind of work, made when first asked for.

    High priority, like the communication streams of torch's FSDP2: a collective that is ready
    should not queue behind the blocks of a large GEMM.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def __getitem__(self, name: str) -> torch.cuda.Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self._device, priority=-1)
        return stream
