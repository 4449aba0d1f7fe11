"""Single pieces of work: timed between events, and what follows from their times.

PieceRecorder is what Context.span does. A piece lasts from when its stream reached it until its end: one
whose kernel waits for free compute units counts as under way.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

import numpy as np

from aorta.account.results.schema import Concurrency
from aorta.device.streams import Anchor, StreamEvent, Streams, anchor
from aorta.queues.workload import Piece
from aorta.timeline.intervals import Intervals, intersect, intervals, length_ms, union

COMM = "comm"
"""Prefix of the names of communication pieces."""


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
        elapsed_ms, anchored = self._streams.elapsed_ms, self._anchor
        fork_ms = {fork.iteration: elapsed_ms(anchored.event, fork.event) for fork in self._forks}
        pieces = []
        for raw in self._raw:
            forked_ms = fork_ms[raw.iteration]
            pieces.append(
                Piece(
                    leg=self._leg,
                    iteration=raw.iteration,
                    stream=raw.stream,
                    name=raw.name,
                    submitted_ms=(raw.submitted_ns - anchored.host_ns) / 1e6 - forked_ms,
                    start_ms=elapsed_ms(anchored.event, raw.start) - forked_ms,
                    end_ms=elapsed_ms(anchored.event, raw.end) - forked_ms,
                )
            )
        first_ms = elapsed_ms(anchored.event, self._forks[0].event)
        self._raw, self._forks = [], []
        return Window(pieces, {index: ms - first_ms for index, ms in fork_ms.items()})


class _Raw(NamedTuple):
    """A piece whose events may not have passed yet."""

    iteration: int
    stream: int
    name: str
    submitted_ns: int
    start: StreamEvent
    end: StreamEvent


class _Fork(NamedTuple):
    iteration: int
    event: StreamEvent


class Window(NamedTuple):
    """Pieces of some iterations, and when each of these forked, in ms since the first fork."""

    pieces: list[Piece]
    fork_ms: dict[int, float]


def concurrency(together: Window, alone: Window) -> Concurrency | None:
    """Concurrency of iterations as they run, against iterations of pieces one after the other; None without
    pieces."""
    if not together.pieces:
        return None
    all_pieces = _intervals_of(together, together.pieces)
    busy_ms = length_ms(union(all_pieces))
    rounds = list(_by_iteration(together.pieces).values())
    alone_rounds = list(_by_iteration(alone.pieces).values())
    sums = [sum(piece.duration_ms for piece in pieces) for pieces in rounds]
    # Without joins an iteration's communication may hide under another one's compute.
    compute = union(_intervals_of(together, [piece for piece in together.pieces if not _is_comm(piece)]))
    comm = [
        union(_intervals_of(together, [piece for piece in pieces if _is_comm(piece)])) for pieces in rounds
    ]
    comm_ms = [length_ms(intervals) for intervals in comm]
    hidden_ms = [length_ms(intersect(intervals, compute)) for intervals in comm]
    has_comm = any(comm_ms)
    return Concurrency(
        iterations=len(rounds),
        achieved=sum(sums) / busy_ms if busy_ms > 0 else 0.0,
        idle_share=_idle_share(all_pieces, busy_ms),
        placement_bound=median(_placement_bound(intervals) for intervals in alone_rounds)
        if alone_rounds
        else None,
        slowdown=_slowdown(together.pieces, alone.pieces),
        comm_ms_each=comm_ms if has_comm else [],
        hidden_ms_each=hidden_ms if has_comm else [],
    )


def _by_iteration(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    grouped: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        grouped[piece.iteration].append(piece)
    return grouped


def _intervals_of(window: Window, pieces: Iterable[Piece]) -> Intervals:
    """Spans of the pieces since the first fork."""
    forked = window.fork_ms
    return intervals(
        (forked[piece.iteration] + piece.start_ms, forked[piece.iteration] + piece.end_ms) for piece in pieces
    )


def _is_comm(piece: Piece) -> bool:
    return piece.name.startswith(COMM)


def _idle_share(spans: Intervals, busy_ms: float) -> float:
    """Idle share of the time from the first fork to the last end, gaps between iterations included."""
    whole_ms = float(spans[:, 1].max())
    return 1 - busy_ms / whole_ms if whole_ms > 0 else 0.0


def _placement_bound(pieces: list[Piece]) -> float:
    """Speed-up over one stream that dealing these pieces to their streams allows at best."""
    per_stream: dict[int, float] = defaultdict(float)
    for piece in pieces:
        per_stream[piece.stream] += piece.duration_ms
    busiest = max(per_stream.values())
    return sum(per_stream.values()) / busiest if busiest > 0 else 1.0


def _slowdown(together: Iterable[Piece], alone: Iterable[Piece]) -> dict[str, float]:
    """Mean duration over mean duration, by name: means, because pieces of one name may differ in size."""
    sides: list[dict[str, list[float]]] = []
    for pieces in (together, alone):
        durations: dict[str, list[float]] = defaultdict(list)
        for piece in pieces:
            durations[piece.name].append(piece.duration_ms)
        sides.append(durations)
    overlapped, single = sides
    return {
        name: float(np.mean(overlapped[name]) / np.mean(single[name]))
        for name in overlapped
        if name in single and np.mean(single[name]) > 0
    }
