"""Correction of timed pieces by the kernels of other iterations.

A piece's start event passes when its stream reaches it; the kernel behind it crosses streams, waits for room
on the device or has yet to be launched. And a piece of several kernels holds the gaps between them. An
iteration is the same program every time, so both are learned by a piece's place in it, as
aorta.steps.calibration does for the steps of a training run:

- a piece that queued behind work of its stream gets the mean distance from its events to its kernels;
- one whose stream was empty gets its kernels' length before its end: that length does not depend on how late
  the host launched them. Communication with others is the exception, since its length depends on when they
  arrive, unless nothing of it would be left: under the profiler the host is later;
- within a piece, kernels lie where they lay on average.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.errors import AortaError
from aorta.queues.harness.concurrency.kernels import Kernel
from aorta.queues.harness.iterations.pieces import Window
from aorta.queues.workload import Piece

COMM = "comm"
"""Prefix of the names of communication pieces."""
MIN_ITERATIONS = 3
"""Fewer say too little about a place."""
MOST_CLOCK_US = 30
"""Largest offset of the trace's clock from the host's: beyond it a launch would be another piece's."""

_Spans = tuple[tuple[float, float], ...]


class Shift(NamedTuple):
    """Kernels less events, means over the pieces of a kind."""

    start_ms: float
    end_ms: float
    length_ms: float
    """First kernel's start to last one's end."""
    shares: _Spans
    """Positions of the kernels in that length, from 0 to 1."""


class PieceCalibration(NamedTuple):
    """Never judge it on the iterations that it is from."""

    shifts: dict[tuple[int, bool], Shift]
    """Shifts by place in the iteration and by whether the stream was empty."""
    iterations: int
    num_places: int
    empty: frozenset[int]
    """Places that start nothing on the device (a collective of a single rank)."""
    num_kernels: int
    """Matched with a piece, in all iterations."""
    num_outside: int
    """Launched between the first and the last piece, in none."""
    clock_shift_us: int
    """Found between the trace's clock and the host's."""


class Uncalibrated(AortaError):
    """Raised when the pieces do not match the traced kernels; the message says why."""


def calibrate(window: Window, kernels: Sequence[Kernel]) -> PieceCalibration:
    """Learns from pieces timed while their kernels were traced. Raises Uncalibrated if they do not match."""
    if not window.pieces:
        raise Uncalibrated("no pieces were timed")
    shift_us, of_piece, num_outside = matched(window, kernels)
    rows = [
        _Row(piece, kernels_of_piece) for piece, kernels_of_piece in zip(window.pieces, of_piece, strict=True)
    ]
    iterations = _by_iteration(rows)
    num_places = Counter(len(rows_of_iteration) for rows_of_iteration in iterations).most_common(1)[0][0]
    iterations = [
        rows_of_iteration for rows_of_iteration in iterations if len(rows_of_iteration) == num_places
    ]
    most_often = [
        Counter(len(rows_of_iteration[place].kernels) for rows_of_iteration in iterations).most_common(1)[0][
            0
        ]
        for place in range(num_places)
    ]
    aligned_rows: dict[tuple[int, bool], list[_Aligned]] = defaultdict(list)
    for rows_of_iteration in iterations:
        usual = [len(row.kernels) == num > 0 for row, num in zip(rows_of_iteration, most_often, strict=True)]
        for place, aligned in _aligned(rows_of_iteration, usual):
            aligned_rows[place, aligned.piece.is_starved].append(aligned)
    empty = frozenset(place for place, num in enumerate(most_often) if num == 0)
    for place in set(range(num_places)) - empty:
        num = sum(len(aligned_rows.get((place, starved), ())) for starved in (False, True))
        if num < MIN_ITERATIONS:
            raise Uncalibrated(
                f"{iterations[0][place].piece.name}, piece {place}: kernels match in {num} of "
                f"{len(iterations)} iterations, {MIN_ITERATIONS} are needed"
            )
    if len(empty) == num_places:
        raise Uncalibrated("no kernel was launched within a piece")
    return PieceCalibration(
        shifts={key: _shift(rows_of_iteration) for key, rows_of_iteration in aligned_rows.items()},
        empty=empty,
        iterations=len(iterations),
        num_places=num_places,
        num_kernels=sum(map(len, of_piece)),
        num_outside=num_outside,
        clock_shift_us=shift_us,
    )


def calibrated(window: Window, calibration: PieceCalibration, has_peers: bool = True) -> Window:
    """The same pieces with the times that their kernels would have. Uncalibrated where an iteration is
    another program. others: communication waits for other ranks."""
    counts = Counter(piece.iteration for piece in window.pieces)
    if any(num != calibration.num_places for num in counts.values()):
        raise Uncalibrated("iterations differ in their number of pieces")
    place_of: dict[int, int] = defaultdict(int)
    pieces = []
    for piece in window.pieces:
        place = place_of[piece.iteration]
        place_of[piece.iteration] += 1
        pieces.append(_corrected(piece, place, calibration, has_peers))
    return Window(pieces, window.fork_ms, window.host_ns)


def matched(window: Window, kernels: Sequence[Kernel]) -> tuple[int, list[list[Kernel]], int]:
    """Kernels of each piece: those launched while the host submitted it. Before them the shift in µs between
    the two clocks with which most kernels have a piece; after them how many were launched between pieces."""
    bounds_ns = np.array(window.host_ns, dtype=np.int64).reshape(-1, 2)
    launch_ns = np.array([kernel.launch_ns for kernel in kernels], dtype=np.int64)
    of_shift = {
        shift_us: _places(bounds_ns, launch_ns + 1000 * shift_us)
        for shift_us in sorted(range(-MOST_CLOCK_US, MOST_CLOCK_US + 1), key=abs)
    }
    largest = max(int((place >= 0).sum()) for place in of_shift.values())
    best = [shift_us for shift_us, place in of_shift.items() if int((place >= 0).sum()) == largest]
    # 0 where it is as good as any, else the middle of those that are.
    shift_us = 0 if 0 in best else sorted(best)[len(best) // 2]
    of_piece: list[list[Kernel]] = [[] for _ in window.pieces]
    num_outside = 0
    for kernel, place in zip(kernels, of_shift[shift_us].tolist(), strict=True):
        if place >= 0:
            of_piece[place].append(kernel)
        elif bounds_ns[0, 0] <= kernel.launch_ns + 1000 * shift_us <= bounds_ns[-1, 1]:
            num_outside += 1
    return shift_us, of_piece, num_outside


def _places(bounds_ns: NDArray[np.int64], at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the bounds that hold each time, or -1."""
    place = np.searchsorted(bounds_ns[:, 0], at_ns, side="right") - 1
    inside = (place >= 0) & (at_ns <= bounds_ns[place, 1])
    return np.where(inside, place, -1)


class _Row(NamedTuple):
    piece: Piece
    kernels: list[Kernel]


class _Aligned(NamedTuple):
    """A piece and its kernels, both in ms since the iteration's fork."""

    piece: Piece
    spans_ms: _Spans


def _by_iteration(rows: Iterable[_Row]) -> list[list[_Row]]:
    grouped: dict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        grouped[row.piece.iteration].append(row)
    return list(grouped.values())


def _aligned(rows: Sequence[_Row], usual: Sequence[bool]) -> list[tuple[int, _Aligned]]:
    """The places whose kernels are as many as usual. The clocks meet in the pieces' ends, for each iteration
    anew, so that no drift adds up: an event passes right after the kernel before it. Where the host recorded
    the event late it passes later than that, hence nearly the closest of them."""
    usual_rows = [(place, row) for place, (row, ok) in enumerate(zip(rows, usual, strict=True)) if ok]
    if not usual_rows:
        return []
    origin_ns = usual_rows[0][1].kernels[0].start_ns

    def ms(at_ns: int) -> float:
        return (at_ns - origin_ns) / 1e6

    ends = [max(ms(kernel.end_ns) for kernel in row.kernels) - row.piece.end_ms for _, row in usual_rows]
    off_ms = float(np.percentile(ends, 90))
    return [
        (
            place,
            _Aligned(
                row.piece,
                tuple(sorted((ms(k.start_ns) - off_ms, ms(k.end_ns) - off_ms) for k in row.kernels)),
            ),
        )
        for place, row in usual_rows
    ]


def _shift(aligned: Sequence[_Aligned]) -> Shift:
    spans = np.array([row.spans_ms for row in aligned])
    start, end = spans[:, :, 0].min(axis=1), spans[:, :, 1].max(axis=1)
    length = np.maximum(end - start, 1e-9)
    shares = ((spans - start[:, None, None]) / length[:, None, None]).mean(axis=0)
    return Shift(
        start_ms=float(np.mean(start - [row.piece.start_ms for row in aligned])),
        end_ms=float(np.mean(end - [row.piece.end_ms for row in aligned])),
        length_ms=fmean(length.tolist()),
        shares=tuple((float(a), float(b)) for a, b in shares),
    )


def _corrected(piece: Piece, place: int, calibration: PieceCalibration, has_peers: bool) -> Piece:
    if place in calibration.empty:
        return replace(piece, end_ms=piece.start_ms, kernels=())
    starved = piece.is_starved
    row_shift = calibration.shifts.get((place, starved))
    shift = row_shift or calibration.shifts.get((place, not starved))
    assert shift is not None, f"place {place} was learned"
    end_ms = piece.end_ms + shift.end_ms
    start_ms = piece.start_ms + shift.start_ms
    if (
        row_shift is None
        or start_ms >= end_ms
        or (starved and not (has_peers and piece.name.startswith(COMM)))
    ):
        start_ms = end_ms - shift.length_ms
    length_ms = end_ms - start_ms
    kernels = tuple((start_ms + a * length_ms, start_ms + b * length_ms) for a, b in shift.shares)
    return replace(piece, start_ms=start_ms, end_ms=end_ms, kernels=kernels)
