"""Splits matched collectives into waiting and transfer, and finds who was late.

A collective that all members of its group have is wait until its last rank arrives, and transfer after
that. The late rank is blamed, not its victims. match_ranks does it for traces; aorta.account.load.waits
uses the parts for records.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.common_clock import Clock, clock_of
from aorta.timeline.intervals import (
    Intervals,
    intersect_normalised,
    pairs,
    subtract_normalised,
    union,
)
from aorta.timeline.matching import Ints, MatchedGroup, RankCalls, TimedCalls, between_ranks, match_by_order

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
        Waits(np.full(num, np.nan), np.full(num, np.nan), np.full(num, NOBODY))
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
