"""Work on streams: ordered by what it reads and writes, dealt to streams by stage, replayed as a graph.

Dataflow puts work on streams. Every piece names the buffers that it shares with other streams. A reader then
follows the last writer, and a writer follows the last writer and everybody who has read since, in this
iteration or in the one before it: with sync mode `none` nothing else keeps iteration i+1 from overwriting
what iteration i still reads.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from aorta.device.backend import accelerator
from aorta.device.streams import DeviceStreams, StreamEvent
from aorta.queues.workload import Context

Buffer = Hashable
"""A name for memory that streams share; two names must not stand for the same bytes."""


@dataclass(frozen=True)
class _Mark:
    """The end of a piece of work; numbers grow with the order of submission."""

    stream: int
    number: int
    event: StreamEvent


class Dataflow:
    """Puts work on the streams of a context and adds exactly the edges that shared buffers need."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._number = 0
        self._writer: dict[Buffer, _Mark] = {}
        self._readers: dict[Buffer, dict[int, _Mark]] = {}
        self._followed: dict[tuple[int, int], int] = {}
        """(stream, other) -> number of the latest piece of `other` that `stream` follows already."""

    def put(
        self,
        stream: int,
        name: str,
        work: Callable[[], object],
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
    ) -> None:
        """Like Context.span, after everything that `reads` and `writes` depend on.

        `writes` includes what is updated in place. Buffers that only one stream ever touches need no name.
        """
        reads, writes = tuple(reads), tuple(writes)
        for mark in self._dependencies(reads, writes):
            self._follow(stream, mark)
        self._context.span(stream, name, work)
        if len(self._context.streams) == 1 or not (reads or writes):
            return
        self._number += 1
        end_mark = _Mark(stream, self._number, self._context.streams.record(stream))
        for buffer in reads:
            self._readers.setdefault(buffer, {})[stream] = end_mark
        for buffer in writes:
            self._writer[buffer] = end_mark
            self._readers[buffer] = {}

    def _dependencies(self, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> list[_Mark]:
        marks = [self._writer[buffer] for buffer in (*reads, *writes) if buffer in self._writer]
        for buffer in writes:
            marks += self._readers.get(buffer, {}).values()
        # The latest first: it stands for the earlier ones of its stream.
        return sorted(marks, key=lambda mark: -mark.number)

    def _follow(self, stream: int, mark: _Mark) -> None:
        if mark.stream == stream or self._followed.get((stream, mark.stream), 0) >= mark.number:
            return
        self._followed[stream, mark.stream] = mark.number
        self._context.streams.wait(stream, mark.event)


def stage_stream(stage: int, item: int, num_stages: int, num_streams: int) -> int:
    """Stream of one stage of a pipeline for one item: stages have streams of their own, as many each as there
    are; with fewer streams than stages, stages share them."""
    num_rows = min(num_stages, num_streams)
    row = stage % num_rows
    num_of_row = (num_streams - row + num_rows - 1) // num_rows
    return row + num_rows * (item % num_of_row)


def graphs_refusal(is_asked: bool, device_type: str) -> str | None:
    if is_asked and device_type == "cpu":
        return "--graphs captures CUDA or HIP graphs and this device is a CPU; leave it out"
    return None


def capture(context: Context, stream: int, work: Callable[[], object]) -> Any:
    """The work as a graph, to be replayed on this stream: it keeps the stream's workspace of the matrix
    library, which graphs on other streams must not share. `work` allocates nothing."""
    assert isinstance(context.streams, DeviceStreams)
    gpu, device = accelerator(), context.device
    gpu.synchronize(device)
    context.streams.submit(stream, work)  # libraries initialise themselves outside the capture
    gpu.synchronize(device)
    return gpu.capture(work, context.streams.raw(stream))
