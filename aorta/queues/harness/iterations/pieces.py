"""Timing single pieces of work: what Context.span does."""

import time
from collections.abc import Callable
from typing import NamedTuple

from aorta.device.streams import Anchor, StreamEvent, Streams, anchor
from aorta.queues.workload import Piece


class _Raw(NamedTuple):
    iteration: int
    stream: int
    name: str
    submitted_ns: int
    start: StreamEvent
    end: StreamEvent


class _Fork(NamedTuple):
    iteration: int
    event: StreamEvent


class PieceRecorder:
    """Context.span, which only submits until the harness starts a window."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._is_recording = False
        self._alone = False
        self._leg = ""
        self._anchor: Anchor | None = None
        self._forks: list[_Fork] = []
        self._raw: list[_Raw] = []

    def start(self, leg: str, alone: bool = False) -> None:
        """Pieces are timed from here on; the device must be idle. alone: each follows the one before it,
        on whatever stream that was, so that nothing runs beside it."""
        self._leg, self._alone, self._is_recording = leg, alone, True
        self._forks, self._raw = [], []
        self._anchor = anchor(self._streams)

    def forked(self, index: int, event: StreamEvent) -> None:
        """The fork of an iteration, a timing event."""
        if self._is_recording:
            self._forks.append(_Fork(index, event))

    def span(self, stream: int, name: str, work: Callable[[], object]) -> None:
        if not self._is_recording:
            self._streams.submit(stream, work)
            return
        submitted_ns = time.perf_counter_ns()
        if self._alone and self._raw:
            self._streams.wait(stream, self._raw[-1].end)
        start = self._streams.record(stream, timing=True)
        self._streams.submit(stream, work)
        end = self._streams.record(stream, timing=True)
        iteration = self._forks[-1].iteration
        self._raw.append(_Raw(iteration, stream, name, submitted_ns, start, end))

    def stop(self) -> "Window":
        """The timed window; everything submitted must have passed."""
        self._is_recording = False
        if not self._forks:
            return Window([], {})
        assert self._anchor is not None
        elapsed_ms, met = self._streams.elapsed_ms, self._anchor
        at_ms = {fork.iteration: elapsed_ms(met.event, fork.event) for fork in self._forks}
        pieces = []
        for raw in self._raw:
            forked_ms = at_ms[raw.iteration]
            pieces.append(
                Piece(
                    leg=self._leg,
                    iteration=raw.iteration,
                    stream=raw.stream,
                    name=raw.name,
                    submitted_ms=(raw.submitted_ns - met.host_ns) / 1e6 - forked_ms,
                    start_ms=elapsed_ms(met.event, raw.start) - forked_ms,
                    end_ms=elapsed_ms(met.event, raw.end) - forked_ms,
                )
            )
        first_ms = elapsed_ms(met.event, self._forks[0].event)
        self._raw, self._forks = [], []
        return Window(pieces, {index: ms - first_ms for index, ms in at_ms.items()})


class Window(NamedTuple):
    """Pieces of some iterations, and when each of these forked, in ms since the first fork."""

    pieces: list[Piece]
    fork_ms: dict[int, float]
