"""Splits matched collectives into waiting and transfer, and finds who was late.

A collective that all members of its group have is wait until its last rank arrives, and transfer after
that. The late rank is blamed, not its victims. match_ranks does it for traces; aorta.account.load.waits
uses the parts for records.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.common_clock import Clock, clock_of
from aorta.timeline.intervals import (
    Intervals,
    distinct,
    intersect_normalised,
    intervals,
    length_ms,
    pairs,
    subtract_normalised,
    union,
)
from aorta.timeline.matching import Ints, MatchedGroup, RankCalls, TimedCalls, between_ranks, match_by_order
from aorta.timeline.overlap import on_compute_stream
from aorta.timeline.types import Kind, Timeline

Floats = NDArray[np.float64]
NOBODY = -1
"""In place of the late rank: nobody can be blamed."""


@dataclass(slots=True)
class Waits:
    """Wait and transfer of each call of one rank.

    NaN where the collective was not matched on all ranks of its group, or is point to point or rooted.
    """

    wait_ms: Floats
    transfer_ms: Floats
    late_rank: Ints
    """The rank that all waited for; NOBODY where it is not known, or its lead is below the residual."""
    since_ms: Floats
    """Time for which half of the others had been waiting when the late rank arrived; 0 on the others."""


@dataclass(frozen=True, slots=True)
class RankView:
    """All ranks side by side."""

    ranks: tuple[int, ...]
    clock: Clock
    groups: list[MatchedGroup]
    waits: list[Waits]
    """Waits of each rank, in the order of ranks."""
    num_matched: list[int]
    """Collectives of each rank that were matched with those of all other members."""
    num_left: list[int]
    """Collectives of each rank that were not; point to point is not counted."""
    notes: list[str]


class ExposedSplit(NamedTuple):
    """Exposed communication of one rank. The parts add up to exposed_ms."""

    exposed_ms: float
    transfer_ms: float
    wait_ms: dict[int, float]
    """Waiting by the rank that was waited for; NOBODY: for whom is below the residual."""
    other_ms: float
    """Exposed time of collectives that were not matched, are rooted, or are point to point."""


class ExposedParts(NamedTuple):
    """Exposed communication as disjoint, normalised intervals in ms from RankCalls.origin_ns."""

    transfer: Intervals
    wait: dict[int, Intervals]
    """Waiting by the rank that was waited for, or NOBODY."""


class Doing(NamedTuple):
    """Work of a rank on its compute stream while others waited for it."""

    window_ms: float
    kernels: list[tuple[str, float]]
    """Name and ms of the longest kernels, the longest first."""
    idle_ms: float
    """Time with nothing on the compute stream."""
    comm_ms: float
    """Part of idle_ms in which a collective ran on another stream."""
    copy_ms: float
    """Part of idle_ms in which a copy ran."""


class Straggler(NamedTuple):
    """A rank that others waited for."""

    rank: int
    num_late: int
    """Collectives in which it arrived last, by more than the residual."""
    num_judged: int
    """Collectives of its groups that could be judged."""
    caused_ms: float
    """Exposed waiting of the other ranks, summed."""


def match_ranks(calls: Sequence[RankCalls], *, are_all: bool = True) -> RankView:
    """Collectives of these ranks, matched, on one clock, split into wait and transfer.

    are_all: there are no other ranks: a group which names none has these."""
    notes: list[str] = []
    is_matched = [np.zeros(len(rank_calls), dtype=bool) for rank_calls in calls]
    groups = match_by_order(calls, notes, are_all=are_all)
    ranks = [rank_calls.rank for rank_calls in calls]
    clock = clock_of(ranks, calls, groups)
    waits = split_waits(ranks, calls, groups, clock)
    for group in groups:
        complete = group.call[(group.call >= 0).all(axis=1)]
        for column, row in enumerate(group.rows):
            is_matched[row][complete[:, column]] = True
    partial = [group for group in groups if not group.is_whole]
    if partial:
        notes.append(f"{len(partial)} of {len(groups)} groups have ranks that were not given: no waits there")
    between = [between_ranks(own_calls) for own_calls in calls]
    num_matched = [int(mask.sum()) for mask in is_matched]
    return RankView(
        ranks=tuple(own_calls.rank for own_calls in calls),
        clock=clock,
        groups=groups,
        waits=waits,
        num_matched=num_matched,
        num_left=[int(mask.sum()) - num for mask, num in zip(between, num_matched, strict=True)],
        notes=[*clock.notes, *notes],
    )


def split_waits(
    ranks: Sequence[int], calls: Sequence[TimedCalls], groups: Sequence[MatchedGroup], clock: Clock
) -> list[Waits]:
    """Waits of each rank's calls, for groups of which all ranks were given."""
    waits = [
        Waits(np.full(num, np.nan), np.full(num, np.nan), np.full(num, NOBODY), np.zeros(num))
        for num in (len(rank_calls.start_ns) for rank_calls in calls)
    ]
    for group in groups:
        if group.is_whole:
            _split_group(group, ranks, calls, clock, waits)
    return waits


def _split_group(
    group: MatchedGroup,
    ranks: Sequence[int],
    calls: Sequence[TimedCalls],
    clock: Clock,
    waits: Sequence[Waits],
) -> None:
    """Fill in the waits of one group's calls."""
    complete = group.call[(group.call >= 0).all(axis=1) & ~group.is_rooted]
    if len(complete) == 0:
        return
    start = np.stack(
        [clock.aligned(row, calls[row].start_ns[complete[:, c]]) for c, row in enumerate(group.rows)], axis=1
    )
    ordered = np.sort(start, axis=1)
    latest, lead = ordered[:, -1], ordered[:, -1] - ordered[:, -2]
    half = np.median(ordered[:, :-1], axis=1)
    late = np.array([ranks[row] for row in group.rows])[np.argmax(start, axis=1)]
    late = np.where(lead > 1e3 * (clock.residual_us or 0.0), late, NOBODY)
    for column, row in enumerate(group.rows):
        places, rank_waits = complete[:, column], waits[row]
        duration = (calls[row].end_ns[places] - calls[row].start_ns[places]) / 1e6
        wait = np.clip((latest - start[:, column]) / 1e6, 0.0, np.maximum(duration, 0.0))
        rank_waits.wait_ms[places] = wait
        rank_waits.transfer_ms[places] = duration - wait
        rank_waits.late_rank[places] = late
        rank_waits.since_ms[places] = np.where(late == ranks[row], (latest - half) / 1e6, 0.0)


def split_exposed(calls: RankCalls, waits: Waits) -> ExposedSplit:
    """Lengths of exposed_parts, and of the exposed time in neither part."""
    parts = exposed_parts(calls, waits)
    exposed_ms, transfer_ms = length_ms(calls.exposed), length_ms(parts.transfer)
    wait_ms = {rank: ms for rank, spans in parts.wait.items() if (ms := length_ms(spans)) > 0}
    other_ms = max(0.0, exposed_ms - transfer_ms - sum(wait_ms.values()))
    return ExposedSplit(exposed_ms, transfer_ms, wait_ms, other_ms)


def exposed_parts(calls: RankCalls, waits: Waits) -> ExposedParts:
    """Exposed time split into transfer and waits.

    Where collectives run at once, transfer comes first, then waits in order of their starts.
    """
    matched = np.flatnonzero(~np.isnan(waits.wait_ms))
    start_ms = (calls.start_ns[matched] - calls.origin_ns) / 1e6
    arrived_ms = start_ms + waits.wait_ms[matched]
    end_ms = (calls.end_ns[matched] - calls.origin_ns) / 1e6
    transfer = intersect_normalised(calls.exposed, union(np.stack((arrived_ms, end_ms), axis=1)))
    left = subtract_normalised(calls.exposed, transfer)
    wait: dict[int, Intervals] = {}
    late = waits.late_rank[matched]
    for rank in _by_first_start(late, start_ms):
        spans = union(np.stack((start_ms[late == rank], arrived_ms[late == rank]), axis=1))
        wait[rank] = intersect_normalised(left, spans)
        left = subtract_normalised(left, spans)
    return ExposedParts(transfer, wait)


def _by_first_start(late: Ints, start_ms: Floats) -> list[int]:
    """Distinct late ranks, in order of the first collective that waited for each."""
    first: dict[int, float] = {}
    for rank, start in zip(late.tolist(), start_ms.tolist(), strict=True):
        first[rank] = min(first.get(rank, start), start)
    return sorted(first, key=first.__getitem__)


def exposed_waiting(start: Floats, arrived: Floats, end: Floats, exposed: Intervals) -> Intervals:
    """Part of normalised exposed spans in which nothing moves because a rank has not arrived.

    start, arrived and end of each collective, in the unit of exposed. Where collectives run at once, transfer
    comes first: something moves.
    """
    waiting = subtract_normalised(union(pairs(start, arrived)), union(pairs(arrived, end)))
    return intersect_normalised(exposed, waiting)


def stragglers(view: RankView, splits: Sequence[ExposedSplit]) -> list[Straggler]:
    """Ranks that others waited for, the costliest first."""
    late_ranks = []
    for row, rank in enumerate(view.ranks):
        judged = view.waits[row].late_rank[~np.isnan(view.waits[row].wait_ms)]
        caused = [
            split.wait_ms.get(rank, 0.0)
            for waiting_rank, split in zip(view.ranks, splits, strict=True)
            if waiting_rank != rank
        ]
        num_late = int(np.count_nonzero(judged == rank))
        if num_late:
            late_ranks.append(Straggler(rank, num_late, len(judged), sum(caused)))
    return sorted(late_ranks, key=lambda late: (-late.caused_ms, -late.num_late, late.rank))


def late_windows(calls: RankCalls, waits: Waits) -> list[tuple[int, int]]:
    """Windows in which others waited for this rank: ns on its own clock, until it arrived."""
    late = np.flatnonzero((waits.late_rank == calls.rank) & (waits.since_ms > 0))
    return [
        (int(calls.start_ns[i] - round(float(waits.since_ms[i]) * 1e6)), int(calls.start_ns[i]))
        for i in late.tolist()
    ]


def doing(timeline: Timeline, windows_ns: Iterable[tuple[int, int]], top: int = 3) -> Doing:
    """Work of the rank of this timeline in these windows, with its `top` longest kernels."""
    origin = timeline.origin_unix_ns
    windows = union(intervals([((a - origin) / 1e6, (b - origin) / 1e6) for a, b in windows_ns]))
    window_ms = length_ms(windows)
    near = np.zeros(len(timeline), dtype=bool)
    for start, end in windows.tolist():
        near |= (timeline.start_ms < end) & (timeline.end_ms > start)
    on_stream = near & on_compute_stream(timeline)
    by_name: dict[str, float] = {}
    for i in distinct(timeline.name[on_stream]).tolist():
        spans = union(timeline.intervals(on_stream & (timeline.name == i)))
        ms = length_ms(intersect_normalised(spans, windows))
        if ms > 0:
            by_name[timeline.names[i]] = ms
    idle = subtract_normalised(windows, union(timeline.intervals(on_stream)))
    comm = union(timeline.intervals(near & (timeline.kind == Kind.COMM)))
    copies = union(timeline.intervals(near & (timeline.kind == Kind.COPY)))
    return Doing(
        window_ms=window_ms,
        kernels=sorted(by_name.items(), key=lambda row: -row[1])[:top],
        idle_ms=length_ms(idle),
        comm_ms=length_ms(intersect_normalised(idle, comm)),
        copy_ms=length_ms(intersect_normalised(idle, copies)),
    )
