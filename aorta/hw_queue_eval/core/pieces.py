"""Timing single pieces of work: what Context.span does."""

import time
from collections.abc import Callable
from typing import NamedTuple

from aorta.device.streams import Event, Streams
from aorta.hw_queue_eval.workload import Piece


class _Raw(NamedTuple):
    iteration: int
    stream: int
    name: str
    submitted_ns: int
    start: Event
    end: Event


class _Fork(NamedTuple):
    iteration: int
    event: Event


class PieceRecorder:
    """Context.span, which only submits until the harness starts a window."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._on = False
        self._alone = False
        self._leg = ""
        self._first_ns = 0
        self._forks: list[_Fork] = []
        self._raw: list[_Raw] = []

    def start(self, leg: str, alone: bool = False) -> None:
        """Pieces are timed from here on; the device must be idle. alone: each follows the one before it,
        on whatever stream that was, so that nothing runs beside it."""
        self._leg, self._alone, self._on = leg, alone, True
        self._forks, self._raw = [], []

    def forked(self, index: int, event: Event, host_ns: int) -> None:
        """The fork of an iteration, a timing event; host_ns is just before it was recorded."""
        if not self._on:
            return
        if not self._forks:
            self._first_ns = host_ns
        self._forks.append(_Fork(index, event))

    def span(self, stream: int, name: str, work: Callable[[], object]) -> None:
        if not self._on:
            self._streams.submit(stream, work)
            return
        submitted_ns = time.perf_counter_ns()
        if self._alone and self._raw:
            self._streams.wait(stream, self._raw[-1].end)
        start = self._streams.record(stream, timing=True)
        self._streams.submit(stream, work)
        end = self._streams.record(stream, timing=True)
        self._raw.append(_Raw(self._forks[-1].iteration, stream, name, submitted_ns, start, end))

    def stop(self) -> "Window":
        """What was timed; everything submitted must have passed."""
        self._on = False
        if not self._forks:
            return Window([], {})
        origin = self._forks[0].event
        elapsed_ms = self._streams.elapsed_ms
        fork_ms = {fork.iteration: elapsed_ms(origin, fork.event) for fork in self._forks}
        pieces = []
        for raw in self._raw:
            # Relative to the first fork, the only moment at which host and device are known to meet.
            forked_ms = fork_ms.get(raw.iteration, 0.0)
            pieces.append(
                Piece(
                    leg=self._leg,
                    iteration=raw.iteration,
                    stream=raw.stream,
                    name=raw.name,
                    submitted_ms=(raw.submitted_ns - self._first_ns) / 1e6 - forked_ms,
                    start_ms=elapsed_ms(origin, raw.start) - forked_ms,
                    end_ms=elapsed_ms(origin, raw.end) - forked_ms,
                )
            )
        self._raw, self._forks = [], []
        return Window(pieces, fork_ms)


class Window(NamedTuple):
    """Pieces of some iterations, and when each of these forked, in ms since the first fork."""

    pieces: list[Piece]
    fork_ms: dict[int, float]
