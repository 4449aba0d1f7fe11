"""Splits matched collectives into waiting and transfer, and finds who was late.

A collective that all members of its group have is wait until its last rank arrives, and transfer after
that. The late rank is blamed, not its victims. Records number their collectives; of a trace the order tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aorta.timeline.arrays import Floats, Ints
from aorta.timeline.common_clock import Clock, clock_of, why_vague
from aorta.timeline.intervals import (
    Intervals,
    intersect_normalised,
    length_within,
    pairs,
    subtract_normalised,
    union,
)
from aorta.timeline.matching import (
    MatchedGroup,
    RankCalls,
    between_ranks,
    can_wait,
    match_by_number,
    match_by_order,
)

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


@dataclass(frozen=True, slots=True)
class RankView:
    """All ranks side by side; what is of each rank stands in the order of ranks."""

    ranks: tuple[int, ...]
    calls: Sequence[RankCalls]
    clock: Clock
    groups: list[MatchedGroup]
    waits: list[Waits]
    num_matched: list[int]
    """Collectives of each rank that were matched with those of all other members."""
    num_left: list[int]
    """Collectives of each rank that were not; point to point is not counted."""
    notes: list[str]


def match_ranks(ranks: Sequence[int], calls: Sequence[RankCalls], *, are_all: bool = True) -> RankView:
    """Collectives of these ranks, matched by their order, on one clock, split into wait and transfer.

    are_all: there are no other ranks: a group which names none has these."""
    notes: list[str] = []
    groups = match_by_order(ranks, calls, notes, are_all=are_all)
    clock = clock_of(ranks, calls, groups)
    partial = [group for group in groups if not group.is_whole]
    if partial:
        notes.append(f"{len(partial)} of {len(groups)} groups have ranks that were not given: no waits there")
    waits = split_waits(ranks, calls, groups, clock)
    is_matched = [np.zeros(len(rank_calls), dtype=bool) for rank_calls in calls]
    for group in groups:
        complete = group.call[(group.call >= 0).all(axis=1)]
        for column, row in enumerate(group.rows):
            is_matched[row][complete[:, column]] = True
    num_matched = [int(mask.sum()) for mask in is_matched]
    num_between = [int(between_ranks(rank_calls).sum()) for rank_calls in calls]
    left = [all_of - num for all_of, num in zip(num_between, num_matched, strict=True)]
    return RankView(tuple(ranks), calls, clock, groups, waits, num_matched, left, [*clock.notes, *notes])


def match_numbered(ranks: Sequence[int], calls: Sequence[RankCalls], *, is_one_clock: bool) -> RankView:
    """The same by their numbers. is_one_clock: the ranks have one."""
    groups = match_by_number(ranks, calls)
    clock = clock_of(ranks, calls, groups, is_one=is_one_clock)
    vague = why_vague(clock, calls, groups)
    waits = split_waits(ranks, calls, groups if vague is None else (), clock)
    num_matched = [int((~np.isnan(rank_waits.wait_ms)).sum()) for rank_waits in waits]
    left = [int(can_wait(of).sum()) - num for of, num in zip(calls, num_matched, strict=True)]
    if vague is not None:  # which says it of all of them
        return RankView(tuple(ranks), calls, clock, groups, waits, num_matched, [0] * len(calls), [vague])
    return RankView(tuple(ranks), calls, clock, groups, waits, num_matched, left, [*clock.notes])


def split_waits(
    ranks: Sequence[int], calls: Sequence[RankCalls], groups: Sequence[MatchedGroup], clock: Clock
) -> list[Waits]:
    """Waits of each rank's calls, for groups of which all ranks were given."""
    waits = [
        Waits(np.full(num, np.nan), np.full(num, np.nan), np.full(num, NOBODY)) for num in map(len, calls)
    ]
    for group in groups:
        if group.is_whole:
            _split_group(group, ranks, calls, clock, waits)
    return waits


def _split_group(
    group: MatchedGroup,
    ranks: Sequence[int],
    calls: Sequence[RankCalls],
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
    late = np.array([ranks[row] for row in group.rows])[np.argmax(start, axis=1)]
    late = np.where(lead > 1e3 * (clock.residual_us or 0.0), late, NOBODY)
    for column, row in enumerate(group.rows):
        places, rank_waits = complete[:, column], waits[row]
        duration = (calls[row].end_ns[places] - calls[row].start_ns[places]) / 1e6
        wait = np.clip((latest - start[:, column]) / 1e6, 0.0, np.maximum(duration, 0.0))
        rank_waits.wait_ms[places] = wait
        rank_waits.transfer_ms[places] = duration - wait
        rank_waits.late_rank[places] = late


def exposed_waiting(start: Floats, arrived: Floats, end: Floats, exposed: Intervals) -> Intervals:
    """Part of normalised exposed spans in which nothing moves because a rank has not arrived.

    start, arrived and end of each collective, in the unit of exposed. Where collectives run at once, transfer
    comes first: something moves.
    """
    waiting = subtract_normalised(union(pairs(start, arrived)), union(pairs(arrived, end)))
    return intersect_normalised(exposed, waiting)


def exposed_wait_ms(calls: RankCalls, waits: Waits, window_ns: Ints | Floats) -> Floats:
    """The same of one rank in ms, per window [step, 2]."""
    is_matched = ~np.isnan(waits.wait_ms)
    if len(calls.exposed_ns) == 0 or not is_matched.any() or len(window_ns) == 0:
        return np.zeros(len(window_ns))
    origin = int(calls.exposed_ns.min())
    start, end = ((ns[is_matched] - origin) / 1e6 for ns in (calls.start_ns, calls.end_ns))
    exposed = union((calls.exposed_ns - origin) / 1e6)
    waiting = exposed_waiting(start, start + waits.wait_ms[is_matched], end, exposed)
    return length_within(waiting, *((window_ns - origin) / 1e6).T)
