"""Last accesses to a region of memory, by byte range: of each byte the last write, and since it one read per
stream. That is all that a later access can be unordered with."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

MAX_SEGMENTS = 4096
"""Ranges of one region that are told apart. Beyond them its history is forgotten: hazards may be missed
there, none is invented."""
MAX_ROWS = 100_000
"""Contiguous runs of a strided view that are enumerated; beyond them its whole span counts as accessed."""

Strides = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Item size in bytes, sizes, strides in bytes of a tensor whose elements do not fill its span."""


class Touch(NamedTuple):
    """One access of an operation, as it is remembered."""

    stream: int
    number: int
    """Number of the operation in its stream."""
    site: Any
    owner: int
    """Number of the allocation that the bytes belonged to."""
    is_write: bool
    start: int
    end: int
    strides: Strides | None


class Segments:
    """Disjoint ranges in ascending order, each with its last write and the reads since."""

    __slots__ = ("ends", "reads", "starts", "writes")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.writes: list[Touch | None] = []
        self.reads: list[dict[int, Touch]] = []

    def read(self, start: int, end: int, touch: Touch) -> list[Touch]:
        """Note a read of the bytes from start to before end; return the last writes there."""
        starts = self.starts
        if not starts:
            self._insert(0, start, end, None, {touch.stream: touch})
            return []
        i = bisect_left(starts, start)
        if i < len(starts) and starts[i] == start and self.ends[i] == end:  # the same tensor again
            write = self.writes[i]
            self.reads[i][touch.stream] = touch
            return [] if write is None else [write]
        self._cut(start)
        self._cut(end)
        found: list[Touch] = []
        i, at = bisect_left(starts, start), start
        while at < end:
            if i < len(starts) and starts[i] == at:
                write = self.writes[i]
                if write is not None and (not found or found[-1] is not write):
                    found.append(write)
                self.reads[i][touch.stream] = touch
                at = self.ends[i]
            else:
                gap_end = min(end, starts[i]) if i < len(starts) else end
                self._insert(i, at, gap_end, None, {touch.stream: touch})
                at = gap_end
            i += 1
        return found

    def write(self, start: int, end: int, touch: Touch) -> list[Touch]:
        """Note a write of the bytes from start to before end; return the last writes and the reads since."""
        starts = self.starts
        if not starts:
            self._insert(0, start, end, touch, {})
            return []
        i = bisect_left(starts, start)
        if i < len(starts) and starts[i] == start and self.ends[i] == end:
            found = list(self.reads[i].values())
            write = self.writes[i]
            if write is not None:
                found.append(write)
            self.writes[i] = touch
            if self.reads[i]:
                self.reads[i] = {}
            return found
        self._cut(start)
        self._cut(end)
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        seen: dict[int, Touch] = {}
        for i in range(first, last):
            for read in self.reads[i].values():
                seen[id(read)] = read
            write = self.writes[i]
            if write is not None:
                seen[id(write)] = write
        starts[first:last] = [start]
        self.ends[first:last] = [end]
        self.writes[first:last] = [touch]
        self.reads[first:last] = [{}]
        return list(seen.values())

    def touches(self) -> Iterator[Touch]:
        """All accesses that are remembered; one that several ranges share comes several times."""
        for write, reads in zip(self.writes, self.reads, strict=True):
            if write is not None:
                yield write
            yield from reads.values()

    def within(self, start: int, end: int) -> "Segments":
        """The part from start to before end, as segments of its own."""
        part = Segments()
        for i in range(max(0, bisect_right(self.starts, start) - 1), bisect_left(self.starts, end)):
            if self.ends[i] > start:
                part._insert(
                    len(part.starts),
                    max(start, self.starts[i]),
                    min(end, self.ends[i]),
                    self.writes[i],
                    dict(self.reads[i]),
                )
        return part

    def extend(self, later: "Segments") -> None:
        """Add segments that all lie behind these."""
        self.starts += later.starts
        self.ends += later.ends
        self.writes += later.writes
        self.reads += later.reads

    def forget_streams(self, streams: set[int]) -> None:
        """Forget the accesses of some streams."""
        for i, write in enumerate(self.writes):
            if write is not None and write.stream in streams:
                self.writes[i] = None
            if not streams.isdisjoint(self.reads[i]):
                self.reads[i] = {s: touch for s, touch in self.reads[i].items() if s not in streams}

    def forget(self) -> None:
        self.starts, self.ends, self.writes, self.reads = [], [], [], []

    def _cut(self, at: int) -> None:
        """Divide the segment that holds the byte at `at` and one before it, if there is one."""
        i = bisect_right(self.starts, at) - 1
        if i >= 0 and self.starts[i] < at < self.ends[i]:
            self._insert(i + 1, at, self.ends[i], self.writes[i], dict(self.reads[i]))
            self.ends[i] = at

    def _insert(self, i: int, start: int, end: int, write: Touch | None, reads: dict[int, Touch]) -> None:
        self.starts.insert(i, start)
        self.ends.insert(i, end)
        self.writes.insert(i, write)
        self.reads.insert(i, reads)


def common_bytes(a: Touch, b: Touch) -> bool:
    """True if two accesses whose spans overlap have a byte in common."""
    if a.strides is None and b.strides is None:
        return True
    runs_a, runs_b = _runs(a), _runs(b)
    if runs_a is None or runs_b is None:
        return True
    i = j = 0
    while i < len(runs_a) and j < len(runs_b):
        if runs_a[i][1] <= runs_b[j][0]:
            i += 1
        elif runs_b[j][1] <= runs_a[i][0]:
            j += 1
        else:
            return True
    return False


def _runs(touch: Touch) -> list[tuple[int, int]] | None:
    """Contiguous ranges of an access in ascending order; None where there are too many."""
    if touch.strides is None:
        return [(touch.start, touch.end)]
    item, sizes, strides = touch.strides
    dims = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride)
    run = item
    while dims and dims[0][0] == run:  # the innermost dimensions that lie without gaps are one run
        run *= dims.pop(0)[1]
    if prod(size for _, size in dims) > MAX_ROWS:
        return None
    offsets = (range(0, stride * size, stride) for stride, size in dims)
    return sorted((touch.start + sum(at), touch.start + sum(at) + run) for at in product(*offsets))
