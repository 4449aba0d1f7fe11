"""Finds the calls of two ranks that are the same collective, where nothing numbers them (traces).

The calls of a rank in one group are a sequence of operations, sizes and ends. The same collective ends on
both ranks at once, so between the two sequences lies one distance, that of the clocks, but recordings
begin and end at different collectives, may lack some, and clocks may be hours apart. Training repeats
itself: shifted by a step the sequences fit as well, or better where a call is missing on one side. So
every way to put them together, by one shift or with holes, is weighed against every other:

1. Ends: their distance must not scatter. One step lasts a little longer than the next, so that a wrong
   step shows, if enough pairs say so.
2. The ranks' own clocks, where one way has them nearly agree and another a step apart. Hours apart they
   tell nothing.
3. Pairs, where one way has more, by about as many as are called in the time that lies between them.
   Fewer are holes, which say nothing about the step.

Where that does not single out one, or 2 and 3 both contradict 1, there is no answer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Flags, Floats, Ints

Number = TypeVar("Number", np.int64, np.float64)
MAX_SHIFTS = 4096
"""Shifts of one rank's sequence against the other's that are tried."""
MAX_DISTANCES = 100_000
"""Pairs of calls whose distances are looked at for the offsets of sequences with holes."""
MAX_OFFSETS = 8
"""Offsets that are tried for sequences with holes."""
ENOUGH = 8
"""Number of pairs whose ends do not agree by chance."""
SAME_END_NS = 20_000
"""Difference below which two medians of scatter are alike."""
LOOSE_END_NS = 500_000
"""Distance that ends of one collective may have: large ones end up to hundreds of microseconds apart."""
FAR_FROM_REST = 20
"""Ratio to the median scatter above which two ends are not of the same collective."""
MAX_DRIFT = 5e-4
"""Largest drift of a clock: NTP turns it by no more."""
CLEARLY_NEARER, NEARER = 0.1, 0.25
"""Shares of the distance between two ways up to which one way's clocks speak clearly, or at all, for it."""
CONTRADICTED = 3
"""Votes against a way that rule it out: clearly by the clocks, and by the number of pairs."""


@dataclass
class CallSequence:
    """Calls of one rank in one group, in order of their starts; -1 where op or size is unknown."""

    op: Ints
    size: Ints
    end_ns: Ints
    is_loose: Flags
    """True for calls that ranks may end at different times."""

    def __len__(self) -> int:
        return len(self.op)

    def equal(self, i: slice | Ints, peer: "CallSequence", j: slice | Ints) -> Flags:
        """Mask of pairs with equal operation and size; unknown equals everything."""
        op = (self.op[i] == peer.op[j]) | (self.op[i] < 0) | (peer.op[j] < 0)
        size = (self.size[i] == peer.size[j]) | (self.size[i] < 0) | (peer.size[j] < 0)
        return np.asarray(op & size)

    @cached_property
    def by_end(self) -> Ints:
        return np.argsort(self.end_ns, kind="stable")

    @cached_property
    def gap_ns(self) -> float:
        """Typical time from one end to the next."""
        gaps = np.diff(self.end_ns[self.by_end])
        return float(np.median(gaps)) if len(gaps) else np.inf

    @cached_property
    def alone_ns(self) -> Floats:
        """Distance of each call's end to the nearest other end."""
        gaps: Floats = np.diff(self.end_ns[self.by_end]).astype(np.float64)
        alone: Floats = np.empty(len(self))
        alone[self.by_end] = np.minimum(np.append(np.inf, gaps), np.append(gaps, np.inf))
        return alone

    @cached_property
    def span_ns(self) -> float:
        return float(np.ptp(self.end_ns))


class Alignment(NamedTuple):
    """Pairs of calls that are the same collective."""

    index_a: Ints
    index_b: Ints
    """Index of each pair's call in a, and in b."""
    is_open: bool = False
    """True where several ways fit and none is clearly right: then there are no pairs."""


class _Line(NamedTuple):
    """Drift of b's clock, as a straight line."""

    slope: float
    height_ns: float
    reference_ns: int

    def height_ns_at(self, time_ns: Ints) -> Floats:
        return self.height_ns + self.slope * (time_ns - self.reference_ns).astype(np.float64)


class _Way(NamedTuple):
    """One way to put the sequences together."""

    index_a: Ints
    index_b: Ints
    offset_ns: int
    """Median distance of the ends."""
    line: "_Line"
    """Line through the distances above offset_ns."""
    scatter_ns: float
    """Median distance of the ends from the line."""
    is_near: Flags
    """Mask of pairs whose ends are not far from the line."""

    @property
    def num(self) -> int:
        return len(self.index_a)

    @property
    def is_steady(self) -> bool:
        return bool(self.is_near.all())


def align_sequences(a: CallSequence, b: CallSequence) -> Alignment:
    """Pairs of calls of two ranks that are the same collective, by the rules in this file's head."""
    plain = _plain(a, b)
    if plain is not None:
        return Alignment(plain.index_a, plain.index_b)
    shifted = _shifted(a, b, _reach(a, b))
    ways = [way for way in shifted if way.is_steady]
    doubtful = [way for way in shifted if not way.is_steady]
    for offset in _likely_offsets(a, b):
        if all(abs(offset - way.offset_ns) > a.gap_ns / 4 for way in ways):
            way = _with_holes(a, b, offset)
            if way is not None:
                (ways if way.is_steady and _explains(way, a, b) else doubtful).append(way)
    ways = _distinct(_long_enough(ways), a.gap_ns)
    if not ways:
        # Ends say nothing; operations and sizes are left.
        ways = _distinct(_shifted(a, b, {0, len(a) - len(b)}), a.gap_ns)
    chosen = _best(ways, a)
    # Ends alone are not believed against both clocks and numbers of pairs (rules 2 and 3 against 1).
    if chosen is None or any(_speaks_for(way, chosen, a) >= CONTRADICTED for way in (*ways, *doubtful)):
        nothing_matched = np.empty(0, dtype=np.int64)
        return Alignment(nothing_matched, nothing_matched, is_open=bool(ways))
    return Alignment(chosen.index_a, chosen.index_b)


# ---- ways to put them together -----------------------------------------------------------------


def _plain(a: CallSequence, b: CallSequence) -> _Way | None:
    """Call by call, where nothing speaks against it; None otherwise.

    That is: all calls are equal, ends do not scatter, and no other shift brings the clocks nearer.
    """
    if len(a) != len(b):
        return None
    way = _shift(a, b, 0)
    if way is None or not way.is_steady or way.scatter_ns > SAME_END_NS:
        return None
    if abs(way.offset_ns) > a.span_ns + b.span_ns:
        return way
    shift = _shift_by_time(a, b)
    between = set(range(min(shift, 0) - 1, max(shift, 0) + 2)) - {0}
    nearer = [rival for rival in _shifted(a, b, between) if abs(rival.offset_ns) < abs(way.offset_ns)]
    return None if nearer else way


def _reach(a: CallSequence, b: CallSequence) -> set[int]:
    """Shifts to try: all, or MAX_SHIFTS around the middle and those that lengths and clocks suggest."""
    n, m = len(a), len(b)
    low, high = -(m - 1), n
    if high - low > MAX_SHIFTS:
        middle = (n - m) // 2
        low, high = middle - MAX_SHIFTS // 2, middle + MAX_SHIFTS // 2
    return {0, n - m, _shift_by_time(a, b), *range(low, high)}


def _shift_by_time(a: CallSequence, b: CallSequence) -> int:
    """Shift by which the ends agree best if the clocks do."""
    place = int(np.searchsorted(a.end_ns, b.end_ns[0]))
    if 0 < place < len(a) and b.end_ns[0] - a.end_ns[place - 1] < a.end_ns[place] - b.end_ns[0]:
        place -= 1
    if place == 0:
        return -int(np.argmin(np.abs(b.end_ns - a.end_ns[0])))
    return min(place, len(a) - 1)


def _shifted(a: CallSequence, b: CallSequence, shifts: Iterable[int]) -> list[_Way]:
    """Ways by the shifts at which all pairs are equal."""
    shift = np.array(sorted(shifts), dtype=np.int64)
    low, high = np.maximum(0, -shift), np.minimum(len(b), len(a) - shift)
    likely = high > low
    for j in (low, high - 1, (low + high) // 2):  # most differ at once
        likely[likely] = a.equal((j + shift)[likely], b, j[likely])
    shift = shift[likely]
    shifted_ways = (_shift(a, b, offset) for offset in shift.tolist())
    return [way for way in shifted_ways if way is not None]


def _shift(a: CallSequence, b: CallSequence, shift: int) -> _Way | None:
    """The way in which a[i + shift] is b[i]; None where some pair is not equal."""
    low, high = max(0, -shift), min(len(b), len(a) - shift)
    if not a.equal(slice(low + shift, high + shift), b, slice(low, high)).all():
        return None
    index_b = np.arange(low, high, dtype=np.int64)
    return _way(a, b, index_b + shift, index_b)


def _way(a: CallSequence, b: CallSequence, index_a: Ints, index_b: Ints) -> _Way:
    """The way with these pairs, and how well their ends agree."""
    time = b.end_ns[index_b]
    away = a.end_ns[index_a] - time
    offset = int(_middle(away))
    residual_ns = (away - offset).astype(np.float64)
    line = _line(time, residual_ns)
    distance_ns = np.abs(residual_ns - line.height_ns_at(time))
    scatter = _median(distance_ns)
    return _Way(
        index_a, index_b, offset, line, scatter, distance_ns <= _tolerance_ns(a, b, index_a, index_b, scatter)
    )


def _line(time_ns: Ints, residual_ns: Floats) -> _Line:
    """Line through the distances of the first and of the last third; level where these are too few."""
    third = len(residual_ns) // 3
    reference = int(time_ns[0])
    time = (time_ns - reference).astype(np.float64)
    slope = 0.0
    if third >= ENOUGH // 2:
        length = _median(time[-third:]) - _median(time[:third])
        if length > 0:
            slope = (_median(residual_ns[-third:]) - _median(residual_ns[:third])) / length
            slope = min(max(slope, -MAX_DRIFT), MAX_DRIFT)
    return _Line(slope, _median(residual_ns - slope * time), reference)


def _tolerance_ns(
    a: CallSequence, b: CallSequence, index_a: Ints, index_b: Ints, scatter_ns: float
) -> Floats:
    """Distance from the rest that ends of one collective may have."""
    alone = np.minimum(a.alone_ns[index_a], b.alone_ns[index_b])
    at_most = np.maximum(a.gap_ns / 2, alone / 4)
    loose = a.is_loose[index_a] | b.is_loose[index_b]
    return np.where(loose, at_most, np.minimum(at_most, max(LOOSE_END_NS, FAR_FROM_REST * scatter_ns)))


def _likely_offsets(a: CallSequence, b: CallSequence) -> list[int]:
    """Distances that many pairs of equal calls have, and those nearest to 0 among them."""
    i, j = _pairs_looked_at(a, b)
    is_same = a.equal(i, b, j)
    away = np.sort(a.end_ns[i[is_same]] - b.end_ns[j[is_same]])
    if len(away) == 0:
        return []
    width = int(min(a.gap_ns, 1e12) / 8)
    first, last = np.searchsorted(away, away - width), np.searchsorted(away, away + width, side="right")
    votes = last - first
    counted: list[tuple[int, int]] = []
    while len(counted) < 4 * MAX_OFFSETS and (num := int(votes.max())):
        top = int(np.argmax(votes))
        counted.append((num, int(away[(first[top] + last[top]) // 2])))
        low, high = np.searchsorted(away, (away[top] - 2 * width, away[top] + 2 * width))
        votes[low : high + 1] = 0
    most_frequent = [offset for _, offset in counted[: MAX_OFFSETS // 2]]
    many = (offset for num, offset in counted[MAX_OFFSETS // 2 :] if 4 * num >= counted[0][0])
    nearest = sorted(many, key=abs)[: MAX_OFFSETS // 2]
    return [*most_frequent, *nearest]


def _pairs_looked_at(a: CallSequence, b: CallSequence) -> tuple[Ints, Ints]:
    """All pairs of calls, or those around the likely shifts where there are too many."""
    n, m = len(a), len(b)
    if n * m <= MAX_DISTANCES:
        i, j = np.divmod(np.arange(n * m, dtype=np.int64), m)
        return i, j
    half = max(1, MAX_DISTANCES // (6 * m))
    shifts = {s + d for s in (0, n - m, _shift_by_time(a, b)) for d in range(-half, half + 1)}
    shift = np.repeat(np.array(sorted(shifts), dtype=np.int64), m)
    j = np.tile(np.arange(m, dtype=np.int64), len(shifts))
    inside = (j + shift >= 0) & (j + shift < n)
    return (j + shift)[inside], j[inside]


def _with_holes(a: CallSequence, b: CallSequence, offset_ns: int) -> _Way | None:
    """Equal calls that are each other's nearest, on clocks that are about this far apart."""
    time_a, time_b = a.end_ns[a.by_end], b.end_ns[b.by_end]
    since_a = (time_a - time_b[0] - offset_ns).astype(np.float64)
    since_b = (time_b - time_b[0]).astype(np.float64)
    moved, scatter, num = since_b, np.inf, -1
    for _ in range(4):  # with each the clocks are known better
        nearest_a, nearest_b = _nearest(since_a, moved), _nearest(moved, since_a)
        mutual = np.flatnonzero(nearest_b[nearest_a] == np.arange(len(b)))
        index_a, index_b = a.by_end[nearest_a[mutual]], b.by_end[mutual]
        distance_ns = np.abs(since_a[nearest_a[mutual]] - moved[mutual])
        is_pair = a.equal(index_a, b, index_b) & (
            distance_ns <= _tolerance_ns(a, b, index_a, index_b, scatter)
        )
        if not is_pair.any():
            return None
        way = _way(a, b, index_a[is_pair], index_b[is_pair])
        if way.num == num:
            break
        moved = since_b + (way.offset_ns - offset_ns) + way.line.height_ns_at(time_b)
        scatter, num = way.scatter_ns, way.num
    # Neighbours of what is missing must not be taken for it.
    if not way.is_steady:
        way = _way(a, b, way.index_a[way.is_near], way.index_b[way.is_near])
    return way


def _nearest(sorted_times: Floats, time: Floats) -> Ints:
    """Index of the nearest of ascending times, for each time."""
    right = np.clip(np.searchsorted(sorted_times, time), 0, len(sorted_times) - 1)
    left = np.maximum(right - 1, 0)
    return np.where(np.abs(sorted_times[left] - time) <= np.abs(sorted_times[right] - time), left, right)


def _explains(way: _Way, a: CallSequence, b: CallSequence) -> bool:
    """True where most calls of one of the ranks, in the time that both recorded, are paired."""
    low_a, high_a = a.end_ns[way.index_a].min(), a.end_ns[way.index_a].max()
    low_b, high_b = b.end_ns[way.index_b].min(), b.end_ns[way.index_b].max()
    num_a = np.count_nonzero((a.end_ns >= low_a) & (a.end_ns <= high_a))
    num_b = np.count_nonzero((b.end_ns >= low_b) & (b.end_ns <= high_b))
    return bool(4 * way.num >= 3 * min(num_a, num_b))


# ---- which way is right ------------------------------------------------------------------------


def _long_enough(ways: list[_Way]) -> list[_Way]:
    """Ways with enough pairs: few ends may agree by chance."""
    longest = max((way.num for way in ways), default=0)
    return [way for way in ways if 2 * way.num >= longest or way.num >= ENOUGH]


def _distinct(ways: list[_Way], gap_ns: float) -> list[_Way]:
    """Ways without those of the same offset and fewer pairs."""
    distinct: list[_Way] = []
    for way in sorted(ways, key=lambda candidate: (-candidate.num, candidate.scatter_ns)):
        if all(abs(way.offset_ns - earlier.offset_ns) > gap_ns / 4 for earlier in distinct):
            distinct.append(way)
    return distinct


def _best(ways: list[_Way], a: CallSequence) -> _Way | None:
    """The steady way that clocks and number of pairs speak for against every other; None if there is none."""
    steady = _steadiest(ways)
    for way in steady:
        if all(_speaks_for(way, rival, a) > 0 for rival in steady if rival is not way):
            return way
    return None


def _steadiest(ways: list[_Way]) -> list[_Way]:
    """Ways without those whose ends scatter more than another's; fewer pairs must agree better to say so."""

    def limit(way: _Way, rival: _Way) -> float:
        return 2 * rival.scatter_ns * math.sqrt(max(1.0, way.num / rival.num)) + SAME_END_NS

    return [way for way in ways if all(way.scatter_ns <= limit(way, rival) for rival in ways)]


def _speaks_for(way: _Way, rival: _Way, a: CallSequence) -> int:
    """Votes of the clocks and of the number of pairs for the first way; CONTRADICTED at most."""
    distance_ns = abs(way.offset_ns - rival.offset_ns)
    calls_between = distance_ns / a.span_ns * (len(a) - 1) if a.span_ns > 0 else 1.0
    pairs_gained = 2 * (way.num - rival.num) / max(calls_between, 1.0)
    pairs = int(pairs_gained >= 1) - int(pairs_gained <= -1)
    return _clock_for(way, distance_ns) - _clock_for(rival, distance_ns) + pairs


def _clock_for(way: _Way, apart_ns: float) -> int:
    """Votes of the clocks: how much nearer they are by this way than the other way is to it."""
    distance = abs(way.offset_ns)
    return int(distance <= NEARER * apart_ns) + int(distance <= CLEARLY_NEARER * apart_ns)


def _median(values: Floats) -> float:
    return float(_middle(values))


def _middle(values: NDArray[Number]) -> Number:
    """Median, the upper of two middle values; much faster than numpy's on few values."""
    middle = len(values) // 2
    median: Number = np.partition(values, middle)[middle]
    return median
