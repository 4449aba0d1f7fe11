"""Interval arithmetic of many rows (steps) at once: for each row the result of intervals.py, to the last
digit.

Spans of all rows stand in flat arrays, in order of rows. Normalised ones are sorted, disjoint and not empty
within each row.
"""

from typing import NamedTuple

import numpy as np

from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.intervals import distinct

Rows = Ints

_WIDEST = 4
"""Largest ratio of places to spans at which rows are sorted side by side, all as wide as the longest."""
_PAIRWISE = 8
"""Length from which on numpy sums in pairs, which changes the last digit of the sum."""


class RowIntervals(NamedTuple):
    """Spans, each with the row that it belongs to."""

    row: Rows
    start: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def of(cls, spans: list[tuple[int, float, float]]) -> "RowIntervals":
        """Spans given as (row, start, end)."""
        if not spans:
            return NONE
        row, start, end = zip(*spans, strict=True)
        return cls(np.array(row, dtype=np.int64), np.array(start, dtype=float), np.array(end, dtype=float))

    def chosen(self, mask: Flags) -> "RowIntervals":
        return RowIntervals(self.row[mask], self.start[mask], self.end[mask])


NONE = RowIntervals(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


def concat(*parts: RowIntervals) -> RowIntervals:
    """All spans of the parts, in no order."""
    return RowIntervals(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def union(a: RowIntervals) -> RowIntervals:
    """Spans of a, normalised. Spans that end before they start count as empty."""
    a = a.chosen(a.end > a.start)
    if not len(a):
        return NONE
    row, start, end = _sorted(a.row, a.start, a.end)
    gap = (row[1:] != row[:-1]) | (end[:-1] < start[1:])
    first = np.concatenate(([True], gap))
    last = np.concatenate((gap, [True]))
    return RowIntervals(row[first], start[first], end[last])


def intersect(a: RowIntervals, b: RowIntervals) -> RowIntervals:
    """Time in both; a and b are normalised."""
    if not len(a) or not len(b):
        return NONE
    return _open_twice(
        np.concatenate((a.row, b.row)), np.concatenate((a.start, b.start)), np.concatenate((a.end, b.end))
    )


def subtract(a: RowIntervals, b: RowIntervals) -> RowIntervals:
    """Time in a and not in b; both are normalised."""
    if not len(a) or not len(b):
        return a
    rows = np.flatnonzero(np.bincount(np.concatenate((a.row, b.row))))
    outermost = np.full(len(rows), np.inf)
    return _open_twice(
        np.concatenate((a.row, b.row, rows)),
        np.concatenate((a.start, b.end, -outermost)),
        np.concatenate((a.end, b.start, outermost)),
    )


def clip(a: RowIntervals, lo: Floats, hi: Floats) -> RowIntervals:
    """The part of a within [lo, hi) of its row, span by span, without empty spans."""
    low, high = lo[a.row], hi[a.row]
    clipped = RowIntervals(a.row, np.clip(a.start, low, high), np.clip(a.end, low, high))
    return clipped.chosen(clipped.end > clipped.start)


def lengths_ms(a: RowIntervals, num_rows: int) -> Floats:
    """Total length of each row's spans."""
    lengths = a.end - a.start
    sums: Floats = np.zeros(num_rows)
    if not len(a):
        return sums
    sums += np.bincount(a.row, weights=lengths, minlength=num_rows)
    counts = np.bincount(a.row, minlength=num_rows)
    if counts.max() < _PAIRWISE:
        return sums
    firsts = np.cumsum(counts) - counts
    for num in distinct(counts[counts >= _PAIRWISE]).tolist():
        rows = np.flatnonzero(counts == num)
        sums[rows] = lengths[firsts[rows][:, None] + np.arange(num)].sum(axis=1)
    return sums


def _sorted(row: Rows, start: Floats, end: Floats) -> tuple[Rows, Floats, Floats]:
    """Starts and ends of each row, each in their own order."""
    if (
        (row[1:] > row[:-1]) | (row[1:] == row[:-1]) & (start[1:] >= start[:-1]) & (end[1:] >= end[:-1])
    ).all():
        return row, start, end
    return _ordered(row, start, end)


def _ordered(row: Rows, start: Floats, end: Floats) -> tuple[Rows, Floats, Floats]:
    """The same of rows that are in no order yet."""
    counts = np.bincount(row)
    width = int(counts.max())
    if width * len(counts) > _WIDEST * len(row):
        by_start = np.lexsort((start, row))
        return row[by_start], start[by_start], end[np.lexsort((end, row))]
    # Side by side, a row each, and sorted there: a tenth of the time.
    by_row = np.argsort(row.astype(np.uint16) if len(counts) <= 1 << 16 else row, kind="stable")
    row = row[by_row]
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_taken = np.arange(width) < counts[:, None]
    sides = []
    for times in (start, end):
        side = np.full((len(counts), width), np.inf)
        side[row, place] = times[by_row]
        side.sort(axis=1)
        sides.append(side[is_taken])
    return row, sides[0], sides[1]


def _open_twice(row: Rows, start: Floats, end: Floats) -> RowIntervals:
    """Time in which two spans of a row are open; there are never three (intersect_normalised has the
    proof)."""
    row, start, end = _ordered(row, start, end)
    is_twice = (row[1:] == row[:-1]) & (start[1:] < end[:-1])
    return RowIntervals(row[1:][is_twice], start[1:][is_twice], end[:-1][is_twice])
