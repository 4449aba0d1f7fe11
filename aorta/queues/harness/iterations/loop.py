"""Fork, work, join: iterations under each sync mode.

    MAIN      start ──┬───────────────────────────┬── end
    stream 0          └── work of iteration i ────┤
    stream 1          └── work of iteration i ────┘

`start` and `end` are timing events of MAIN. Every stream waits for `start`; MAIN waits for every stream
before `end`.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aorta.device.streams import MAIN, StreamEvent, Streams
from aorta.garbage import no_garbage_collection
from aorta.queues.harness.iterations.pieces import PieceRecorder
from aorta.queues.words import SyncMode

Work = Callable[[int], None]


@dataclass
class Timed:
    """Some iterations as events and the host's clock saw them."""

    iteration_ms: list[float] = field(default_factory=list)
    """per_iteration, end_only: fork to join. none: from the last stream's end of the iteration before to
    that of this one, so that they add up to device_ms."""
    enqueue_ms: list[float] = field(default_factory=list)
    """Host time to submit each iteration, fork and join included. It includes waiting for room where the
    device's launch queue is full, which end_only and none are meant to achieve."""
    device_ms: float = 0.0
    """Divisor of throughput. per_iteration: the sum of iteration_ms; otherwise from the first fork to
    the end of the last stream's work."""
    wall_ms: float = 0.0
    """Time by the host's clock, from before the first fork until everything is done."""
    caught_up: list[bool] = field(default_factory=list)
    """end_only, none: whether the device had finished the iteration before when the host had submitted this
    one, so that it may have run dry."""

    @property
    def launch_bound(self) -> bool:
        """The device waits for the host: submitting takes 0.9 of the device's time (per_iteration), or the
        device had caught up in half of the iterations."""
        if self.caught_up:
            return 2 * sum(self.caught_up) >= len(self.caught_up)
        return sum(self.enqueue_ms) >= LAUNCH_BOUND * self.device_ms


LAUNCH_BOUND = 0.9


def run_iterations(
    streams: Streams, work: Work, indices: Iterable[int], mode: SyncMode, recorder: PieceRecorder
) -> Timed:
    """Runs work(index) for each index. The host has waited for everything when this returns; what work
    raised on a thread is raised here."""
    run = {"per_iteration": _per_iteration, "end_only": _end_only, "none": _unjoined}[mode]
    streams.synchronize()
    with no_garbage_collection():  # the pause would be the harness's own, in an iteration of the workload
        began_ns = time.perf_counter_ns()
        timed = run(streams, work, indices, recorder)
        timed.wall_ms = (time.perf_counter_ns() - began_ns) / 1e6
    return timed


def fork(streams: Streams) -> StreamEvent:
    """All streams follow what MAIN holds now."""
    start = streams.record(MAIN, timing=True)
    for stream in range(len(streams)):
        streams.wait(stream, start)
    return start


def join(streams: Streams) -> StreamEvent:
    """MAIN follows what all streams hold now."""
    for stream in range(len(streams)):
        streams.wait(MAIN, streams.record(stream))
    return streams.record(MAIN, timing=True)


def _submit(
    streams: Streams, work: Work, index: int, recorder: PieceRecorder, timed: Timed
) -> tuple[StreamEvent, StreamEvent]:
    began_ns = time.perf_counter_ns()
    start = fork(streams)
    recorder.forked(index, start)
    work(index)
    end = join(streams)
    timed.enqueue_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
    return start, end


def _per_iteration(streams: Streams, work: Work, indices: Iterable[int], recorder: PieceRecorder) -> Timed:
    timed = Timed()
    for index in indices:
        start, end = _submit(streams, work, index, recorder, timed)
        end.synchronize()
        timed.iteration_ms.append(streams.elapsed_ms(start, end))
    streams.synchronize()
    timed.device_ms = sum(timed.iteration_ms)
    return timed


def _end_only(streams: Streams, work: Work, indices: Iterable[int], recorder: PieceRecorder) -> Timed:
    timed = Timed()
    marks: list[tuple[StreamEvent, StreamEvent]] = []
    for index in indices:
        marks.append(_submit(streams, work, index, recorder, timed))
        if len(marks) > 1:
            timed.caught_up.append(marks[-2][1].query())
    streams.synchronize()
    timed.iteration_ms = [streams.elapsed_ms(start, end) for start, end in marks]
    gaps_ms = [streams.elapsed_ms(marks[i][1], marks[i + 1][0]) for i in range(len(marks) - 1)]
    timed.device_ms = sum(timed.iteration_ms) + sum(gaps_ms)
    return timed


def _unjoined(streams: Streams, work: Work, indices: Iterable[int], recorder: PieceRecorder) -> Timed:
    timed = Timed()
    start = fork(streams)
    ends: list[list[StreamEvent]] = []
    for index in indices:
        recorder.forked(index, start)
        submitted_ns = time.perf_counter_ns()
        work(index)
        ends.append([streams.record(stream, timing=True) for stream in range(len(streams))])
        timed.enqueue_ms.append((time.perf_counter_ns() - submitted_ns) / 1e6)
        if len(ends) > 1:
            timed.caught_up.append(all(event.query() for event in ends[-2]))
    join(streams)
    streams.synchronize()
    # elapsed_ms is a float32 on a device: short distances, added up per stream, keep the microseconds.
    at_ms = [0.0] * len(streams)
    previous: list[StreamEvent] = [start] * len(streams)
    done_ms = [0.0]
    for marks in ends:
        at_ms = [
            offset_ms + streams.elapsed_ms(a, b)
            for offset_ms, a, b in zip(at_ms, previous, marks, strict=True)
        ]
        previous = marks
        done_ms.append(max(at_ms))
    timed.iteration_ms = [late - early for early, late in zip(done_ms, done_ms[1:], strict=False)]
    timed.device_ms = done_ms[-1]
    return timed
