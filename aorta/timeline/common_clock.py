"""One clock for all ranks, from the ends of collectives.

A small collective ends on all ranks within microseconds (it cannot end anywhere before the last rank has
arrived, and little is left to send then), so the ends of many tell how far the ranks' clocks are apart.
Large ones end up to hundreds of microseconds apart and are used only where there are no small ones. How
far aligned ends still differ is the residual: nothing smaller can be said of who came first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.matching import MatchedGroup, RankCalls

SMALL_BYTES = 1 << 20
"""Largest size of a small collective."""
SMALL_NS = 200_000
"""Longest duration of a small collective whose size is not known."""
MIN_ANCHORS = 3
"""Fewest small collectives to align clocks on."""
MAX_ANCHORS = 400
GOOD_ENOUGH_NS = 20_000
"""Distance of ends up to which clocks are left as they are."""
MIN_FOR_DRIFT = 20
"""Fewest anchors for an estimate of drift."""
DRIFT_SPAN_NS = 10e9
"""Shortest recording for it: over less time clocks drift by less than ends differ."""
MOST_VAGUE = 0.5
"""Residual of the clocks over the usual duration of a collective, above which waits are not judged."""
FEW_SMALL = "there are too few small collectives to align clocks on: ends of larger ones are used"


@dataclass(frozen=True, slots=True)
class Clock:
    """Offsets that are added to each rank's clock to make it that of the first rank."""

    ranks: tuple[int, ...]
    offset_ns: Floats
    """Offset of each rank at reference_ns."""
    drift: Floats
    """Drift of each rank, ns per ns."""
    reference_ns: int
    residual_us: float | None
    """95th percentile, over anchors, of the distance between the first and the last aligned end; None
    where there was no anchor."""
    num_anchors: int
    notes: tuple[str, ...] = ()
    moved_ns: dict[int, int] = field(default_factory=dict)
    """Offsets of the ranks whose clock is not that of the first."""

    def aligned(self, row: int, time_ns: Ints) -> Floats:
        """Times of the rank in this row of ranks, as ns from reference_ns on the common clock."""
        since = (time_ns - self.reference_ns).astype(np.float64)
        common: Floats = since + self.offset_ns[row] + self.drift[row] * since
        return common


class _Candidates(NamedTuple):
    """Collectives of a group that end on all members at once, in order."""

    row: Ints
    """Row of MatchedGroup.call."""
    rating: Floats
    """-1 for a small collective; for others the shortest duration of a member, in ns."""


def clock_of(
    ranks: Sequence[int],
    calls: Sequence[RankCalls],
    groups: Sequence[MatchedGroup],
    *,
    is_one: bool = False,
) -> Clock:
    """The common clock, from the ends of small collectives; where few are small, of the shortest. is_one: all
    times are by one clock, which is left as it is: what ends differ by is what woke whom when."""
    candidates = [_candidates(group, calls) for group in groups]
    if not candidates:
        return align(ranks, np.zeros((0, len(ranks)), np.int64), np.zeros((0, len(ranks)), bool))
    rating = np.concatenate([group.rating for group in candidates])
    num_small = int((rating < 0).sum())
    num_wanted = num_small if num_small >= MIN_ANCHORS else max(MIN_ANCHORS, len(rating) // 4)
    chosen = np.zeros(0, dtype=np.intp)
    if len(rating):
        limit = np.sort(rating, kind="stable")[min(num_wanted, len(rating)) - 1]
        chosen = np.flatnonzero(rating <= limit)
        # In order of time: anchors that are left out are spread over the recording, as drift needs.
        places = np.linspace(0, len(chosen) - 1, min(len(chosen), MAX_ANCHORS)).round().astype(int)
        chosen = chosen[places]
    group_of = np.concatenate([np.full(len(ranked.row), k) for k, ranked in enumerate(candidates)])[chosen]
    row_of = np.concatenate([ranked.row for ranked in candidates])[chosen]
    end_ns = np.zeros((len(chosen), len(ranks)), dtype=np.int64)
    present = np.zeros((len(chosen), len(ranks)), dtype=bool)
    for k, group in enumerate(groups):
        anchors = np.flatnonzero(group_of == k)
        for column, member in enumerate(group.rows):
            places = group.call[row_of[anchors], column]
            is_there = places >= 0
            end_ns[anchors[is_there], member] = calls[member].end_ns[places[is_there]]
            present[anchors, member] = is_there
    clock = align(ranks, end_ns, present, is_one=is_one)
    if num_small < min(MIN_ANCHORS, len(rating)):
        return replace(clock, notes=(*clock.notes, FEW_SMALL))
    return clock


def _candidates(group: MatchedGroup, calls: Sequence[RankCalls]) -> _Candidates:
    shortest = np.full(len(group.call), np.inf)
    for column, member in enumerate(group.rows):
        present = np.flatnonzero(group.call[:, column] >= 0)
        places = group.call[present, column]
        duration = calls[member].end_ns[places] - calls[member].start_ns[places]
        shortest[present] = np.minimum(shortest[present], duration)
    shared = np.flatnonzero(((group.call >= 0).sum(axis=1) > 1) & ~group.is_rooted)
    size, duration = group.size_bytes[shared], shortest[shared]
    is_small = np.where(size >= 0, size <= SMALL_BYTES, duration <= SMALL_NS)
    return _Candidates(shared, np.where(is_small, -1.0, duration))


def align(ranks: Sequence[int], end_ns: Ints, present: Flags, *, is_one: bool = False) -> Clock:
    """The clock from anchors: end_ns[anchor, rank] where present, on each rank's own clock."""
    num_ranks = len(ranks)
    zeros = np.zeros(num_ranks)
    if len(end_ns) == 0:
        note = "no collective was matched: clocks are as they were recorded"
        return Clock(tuple(ranks), zeros, zeros, 0, None, 0, (note,) if num_ranks > 1 else ())
    chosen = np.linspace(0, len(end_ns) - 1, min(len(end_ns), MAX_ANCHORS)).round().astype(int)
    end_ns, present = end_ns[chosen], present[chosen]
    reference = int(end_ns[present].min())
    ends = np.where(present, (end_ns - reference).astype(np.float64), np.nan)
    raw = _spread(ends)
    if is_one or raw <= GOOD_ENOUGH_NS:
        return Clock(tuple(ranks), zeros, zeros, reference, raw / 1e3, len(ends))
    notes = []
    tied = np.array(_components(present))
    if len(set(tied)) > 1:
        notes.append("some ranks share no collective, directly or through others: their clocks are not tied")
    offset = _offsets(ends, tied)
    residual = _spread(ends + offset)
    drift = zeros
    slopes = _drift(ends + offset)
    if slopes is not None:
        straight = ends * (1 + slopes)
        offset_then = _offsets(straight, tied)
        residual_then = _spread(straight + offset_then)
        if residual_then < 0.7 * residual:
            offset, residual, drift = offset_then, residual_then, slopes
    if residual > 0.8 * raw:
        # The ends scatter more than the clocks differ: correcting them would invent differences.
        return Clock(tuple(ranks), zeros, zeros, reference, raw / 1e3, len(ends), tuple(notes))
    moved_ns = {rank: ns for rank, ns in zip(ranks, offset.round().astype(int).tolist(), strict=True) if ns}
    return Clock(tuple(ranks), offset, drift, reference, residual / 1e3, len(ends), tuple(notes), moved_ns)


def _offsets(ends: Floats, tied: Ints) -> Floats:
    """Offset of each rank that brings its ends to the median end of each anchor, by the median over anchors.

    0 for the first of the ranks that are tied.
    """
    offset = np.zeros(ends.shape[1])
    is_present = ~np.isnan(ends)
    for _ in range(200):
        away = ends + offset - np.nanmedian(ends + offset, axis=1, keepdims=True)
        change = np.array(
            [np.median(away[rows, i]) if rows.any() else 0.0 for i, rows in enumerate(is_present.T)]
        )
        offset -= change
        if np.abs(change).max() < 1.0:
            break
    for group in set(tied.tolist()):
        members = np.flatnonzero(tied == group)
        offset[members] -= offset[members[0]]
    return offset


def _drift(aligned: Floats) -> Floats | None:
    """Slope of each rank's distance from the median end; None where there is too little to tell."""
    if len(aligned) < MIN_FOR_DRIFT or np.nanmax(aligned) - np.nanmin(aligned) < DRIFT_SPAN_NS:
        return None
    middle = np.nanmedian(aligned, axis=1)
    slopes = np.zeros(aligned.shape[1])
    for row in range(aligned.shape[1]):
        is_present = ~np.isnan(aligned[:, row])
        away = aligned[is_present, row] - middle[is_present]
        if is_present.sum() < MIN_FOR_DRIFT:
            continue
        near = np.abs(away - np.median(away)) <= np.percentile(np.abs(away - np.median(away)), 90)
        slopes[row] = -np.polyfit(middle[is_present][near], away[near], 1)[0]
    slopes -= slopes[0]
    return slopes


def _spread(aligned: Floats) -> float:
    """95th percentile over anchors of the distance from the first end to the last."""
    return float(np.percentile(np.nanmax(aligned, axis=1) - np.nanmin(aligned, axis=1), 95))


def _components(present: Flags) -> list[int]:
    """Number of each rank that ranks tied by anchors share."""
    parent = list(range(present.shape[1]))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for row in np.unique(present, axis=0):
        members = np.flatnonzero(row).tolist()
        for member in members[1:]:
            parent[root(member)] = root(members[0])
    return [root(i) for i in range(len(parent))]


def why_vague(clock: Clock, calls: Sequence[RankCalls], groups: Sequence[MatchedGroup]) -> str | None:
    """Reason why waits are not judged: collectives end too far apart to tell who came when."""
    durations = [
        (calls[row].end_ns[places] - calls[row].start_ns[places]) / 1e6
        for group in groups
        for row, places in zip(group.rows, group.call.T, strict=True)
    ]
    if not durations or clock.residual_us is None:
        return None
    usual_ms = float(np.median(np.concatenate(durations)))
    if clock.residual_us / 1e3 <= MOST_VAGUE * usual_ms:
        return None
    return (
        "clocks cannot tell who came when: ranks see the same collective end up to"
        f" {clock.residual_us:.0f} µs apart, and one takes {1e3 * usual_ms:.0f} µs; where all ranks"
        " communicate in the same groups, waiting is what a rank is exposed beyond the one that waits least"
    )
