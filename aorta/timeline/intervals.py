"""Set arithmetic on intervals of time.

Intervals are a float64 array of shape (n, 2), one half-open span [start, end) in ms a row. A function
takes spans in any order, overlapping or not, unless it says normalised; it returns them normalised:
sorted, disjoint, not touching, none empty.

Sorting starts and ends apart is enough, because only the number of open spans matters: with s and e
sorted, the k+1 spans that start before s[k+1] have all ended iff e[k] < s[k+1].
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Floats, Ints

Intervals = Floats

EMPTY: Intervals = np.empty((0, 2))
EMPTY.flags.writeable = False


def intervals(spans: Iterable[Sequence[float]]) -> Intervals:
    """Spans given as pairs, as an array."""
    return np.array(list(spans), dtype=np.float64).reshape(-1, 2)


def pairs(start_ms: Floats, end_ms: Floats) -> Intervals:
    """Spans given as starts and ends, as an array."""
    spans = np.empty((len(start_ms), 2))
    spans[:, 0] = start_ms
    spans[:, 1] = end_ms
    return spans


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Distinct values in increasing order; np.unique without loading numpy.ma."""
    # Asked for counts it does not look for masked values, for which numpy would import it.
    return np.unique(values, return_counts=True)[0]


def concat(*parts: Intervals) -> Intervals:
    return np.concatenate(parts) if parts else EMPTY


def union(a: Intervals) -> Intervals:
    """Spans of a, normalised. Spans that end before they start count as empty."""
    if len(a) == 0:
        return EMPTY
    start, end = a[:, 0], a[:, 1]
    positive = end > start
    if not positive.all():
        start, end = start[positive], end[positive]
        if len(start) == 0:
            return EMPTY
    start, end = _sorted(start), _sorted(end)
    gap = end[:-1] < start[1:]
    num = int(np.count_nonzero(gap)) + 1
    spans = np.empty((num, 2))
    spans[0, 0] = start[0]
    spans[-1, 1] = end[-1]
    spans[1:, 0] = start[1:][gap]
    spans[:-1, 1] = end[:-1][gap]
    return spans


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Time in both."""
    return intersect_normalised(union(a), union(b))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Time in a and not in b."""
    return subtract_normalised(union(a), union(b))


def clip(a: Intervals, lo: float, hi: float) -> Intervals:
    """The part of a within [lo, hi), span by span: not normalised, but without empty spans."""
    if len(a) == 0:
        return EMPTY
    clipped = np.clip(a, lo, hi)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def length_ms(a: Intervals) -> float:
    """Total length of normalised a. Of spans that overlap it is the sum, not the union."""
    return float((a[:, 1] - a[:, 0]).sum())


def length_within(a: Intervals, start: Floats, end: Floats) -> Floats:
    """Length of the part of normalised a in each span: of a collective what nothing hides, where a is exposed
    time."""
    if len(a) == 0:
        return np.zeros(len(start))
    before = np.concatenate(([0.0], np.cumsum(a[:, 1] - a[:, 0])))

    def length_before(time: Floats) -> Floats:
        begun = np.searchsorted(a[:, 0], time, side="left")
        not_over = np.maximum(a[np.maximum(begun - 1, 0), 1] - time, 0.0)
        return before[begun] - np.where(begun > 0, not_over, 0.0)

    return length_before(end) - length_before(start)


def run_lengths_ns(a: Intervals) -> list[int]:
    """Normalised a as whole ns: distance from the span before (or from 0), length, distance, length, ..."""
    lengths: list[int] = np.diff(np.rint(a.ravel() * 1e6).astype(np.int64), prepend=0).tolist()
    return lengths


def of_run_lengths(lengths_ns: Sequence[int] | Ints) -> Ints:
    """Starts and ends in ns, of shape (n, 2): the inverse of run_lengths_ns.

    Raises ValueError for lists that are no run lengths, OverflowError for numbers beyond 64 bits.
    """
    lengths = np.asarray(lengths_ns, dtype=np.int64)
    edges = np.cumsum(lengths)
    if len(edges) % 2 or (lengths < 0).any():
        raise ValueError("run lengths are pairs of a distance and a length, none below 0")
    return edges.reshape(-1, 2)


def intersect_normalised(a: Intervals, b: Intervals) -> Intervals:
    """intersect for arguments that are normalised already.

    At most two spans are open at a time. At the start s[k+1] two are open iff e[k] > s[k+1], and
    e[k] is then the next end.
    """
    if len(a) == 0 or len(b) == 0:
        return EMPTY
    start = _merged(a[:, 0], b[:, 0])
    end = _merged(a[:, 1], b[:, 1])
    overlaps = start[1:] < end[:-1]
    return pairs(start[1:][overlaps], end[:-1][overlaps])


def subtract_normalised(a: Intervals, b: Intervals) -> Intervals:
    """subtract for arguments that are normalised already."""
    if len(a) == 0 or len(b) == 0:
        return a
    outside = np.empty((len(b) + 1, 2))
    outside[0, 0] = -np.inf
    outside[1:, 0] = b[:, 1]
    outside[:-1, 1] = b[:, 0]
    outside[-1, 1] = np.inf
    return intersect_normalised(a, outside)


def _sorted(values: Floats) -> Floats:
    if (values[1:] >= values[:-1]).all():
        return values
    return np.sort(values)


def _merged(a: Floats, b: Floats) -> Floats:
    edges = np.concatenate((a, b))
    edges.sort(kind="stable")  # timsort merges two sorted runs in linear time
    return edges
