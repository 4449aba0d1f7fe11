"""Waiting and transfer of the collectives of step records, once all ranks are known.

Records name a collective by its group and its number in it, so that matching ranks needs no search. What
a rank contributes is a few numbers per collective and its exposed time; nothing else of a step is held.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError
from aorta.ranks.common_clock import Clock, align
from aorta.ranks.waits import NOBODY, POINT_TO_POINT, ROOTED, SMALL_BYTES
from aorta.records.reader import OP_OF_STREAM
from aorta.records.schema import StepRecord
from aorta.report.numbers import number
from aorta.timeline.collective import busbw_factor
from aorta.timeline.intervals import (
    Intervals,
    intersect_normalised,
    pairs,
    subtract_normalised,
    union,
)
from aorta.timeline.types import COPY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GroupKey = tuple[str, tuple[int, ...]]
Kind = tuple[str, int, str, int, str]
"""op, bytes, dtype, num_ranks, stream. bytes is ANY_SIZE where sizes share a row or are not known."""
ANY_SIZE = -1

_factor = cache(busbw_factor)

MAX_CALLS = 4_000_000
"""Collectives of all ranks together above which waits are left out: they are matched in memory."""
STREAMS = frozenset(("compute", COPY, *OP_OF_STREAM))
ROUNDING_MS = 1e-3
"""By which times of a record may contradict each other."""
UNKNOWN_END = -1
"""end_ns of a collective whose times were not measured."""
MOST_VAGUE = 0.5
"""Residual of the clocks over the usual duration of a collective, above which waits are not judged."""
MOVED_MS = 1.0
"""Difference of the ranks' clocks above which it is said."""
MAX_ANCHORS = 400
MIN_ANCHORS = 3


class ImpossibleRecord(RecordError):
    """Raised for values that no run writes; the message names them."""


@dataclass(slots=True)
class Calls:
    """The collectives of one rank, in order of the file."""

    kinds: list[Kind]
    groups: list[GroupKey]
    row: NDArray[np.int32]
    """Of the step that issued it."""
    kind: NDArray[np.int32]
    group: NDArray[np.int32]
    seq: Ints
    start_ns: Ints
    end_ns: Ints
    exposed_ns: Ints
    """[n, 2]: communication without compute."""

    def __len__(self) -> int:
        return len(self.row)

    def moved(self, place: NDArray[np.int32]) -> "Calls":
        """With the rows' new places; calls of rows whose place is -1 are left out."""
        row = place[self.row]
        kept = row >= 0
        return replace(
            self,
            row=row[kept],
            kind=self.kind[kept],
            group=self.group[kept],
            seq=self.seq[kept],
            start_ns=self.start_ns[kept],
            end_ns=self.end_ns[kept],
        )

    @property
    def duration_ms(self) -> Floats:
        """NaN where it was not measured."""
        return np.where(self.end_ns == UNKNOWN_END, np.nan, (self.end_ns - self.start_ns) / 1e6)


@dataclass(slots=True)
class CallsBuilder:
    """Collects Calls record by record."""

    kinds: dict[Kind, int] = field(default_factory=dict)
    groups: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """By name, size and attempt: within a rank these tell groups apart, and each attempt counts from 0."""
    keys: list[GroupKey] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    exposed: list[tuple[int, int]] = field(default_factory=list)

    def add(self, row: int, record: StepRecord) -> None:
        """ImpossibleRecord for what contradicts itself; OverflowError or ValueError for times that no
        clock gives, here or when finished."""
        origin, rows, kinds, groups = record.start_unix_ns, self.rows, self.kinds, self.groups
        for one in record.collectives or ():
            num_ranks = len(one.ranks)
            size = ANY_SIZE if one.bytes is None else one.bytes
            kind = kinds.setdefault((one.op, size, one.dtype, num_ranks, one.stream), len(kinds))
            group = groups.get((one.group, num_ranks, record.attempt))
            if group is None:
                group = groups[one.group, num_ranks, record.attempt] = len(groups)
                name = f"{one.group} of attempt {record.attempt}" if record.attempt else one.group
                self.keys.append((name, tuple(one.ranks)))
            start_ms, end_ms = one.start_ms, one.end_ms
            if size < ANY_SIZE or (size == ANY_SIZE and one.bytes is not None):
                raise ImpossibleRecord(f"{one.op} of {size} bytes")
            if start_ms is None or end_ms is None:
                rows.append((row, kind, group, one.seq, 0, UNKNOWN_END))
            else:
                if end_ms < start_ms - ROUNDING_MS:
                    raise ImpossibleRecord(f"{one.op} ends before it begins")
                rows.append(
                    (row, kind, group, one.seq, origin + int(start_ms * 1e6), origin + int(end_ms * 1e6))
                )
        at = -ROUNDING_MS
        for segment in record.active_segments or ():
            start_ms, end_ms = segment.start_ms, segment.end_ms
            if not at <= start_ms <= end_ms + ROUNDING_MS:
                raise ImpossibleRecord("active_segments are not in order of time")
            at = end_ms - ROUNDING_MS
            if _is_exposed(tuple(segment.active_streams)):
                self.exposed.append((origin + int(start_ms * 1e6), origin + int(end_ms * 1e6)))

    def finished(self) -> Calls:
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 6)
        row, kind, group = (column.astype(np.int32) for column in table.T[:3])
        seq, start, end = (np.ascontiguousarray(column) for column in table.T[3:])
        exposed = np.array(self.exposed, dtype=np.int64).reshape(-1, 2)
        return Calls(list(self.kinds), self.keys, row, kind, group, seq, start, end, exposed)


@cache
def _is_exposed(active: tuple[str, ...]) -> bool:
    unknown = [name for name in active if name not in STREAMS]
    if unknown:
        raise ImpossibleRecord(f"active_segments name the stream {unknown[0]!r}, which no record has")
    return "compute" not in active and any(name != COPY for name in active)


@dataclass(slots=True)
class Waits:
    """Per call of a rank; NaN where it was not matched on all ranks, is rooted or point to point."""

    wait_ms: Floats
    transfer_ms: Floats
    late_rank: Ints


def totals_by_op(calls: Calls, num_rows: int) -> dict[str, dict[str, Floats]]:
    """Per operation count, bytes, duration_ms and busbw_gb_s of every step; NaN for steps without it.

    What carries no bytes, as a barrier, has no bandwidth."""
    found = {}
    size = np.array([kind[1] if kind[1] != ANY_SIZE else np.nan for kind in calls.kinds], dtype=np.float64)
    moved = size * [_factor(kind[0], max(kind[3], 1)) for kind in calls.kinds]
    duration_ms = calls.duration_ms
    for op in dict.fromkeys(kind[0] for kind in calls.kinds):
        of_op = np.array([kind[0] == op for kind in calls.kinds])[calls.kind]
        rows, kind = calls.row[of_op], calls.kind[of_op]
        count = np.bincount(rows, minlength=num_rows)

        def total(weights: Floats, rows: NDArray[np.int32] = rows, count: Ints = count) -> Floats:
            return np.where(count == 0, np.nan, np.bincount(rows, weights=weights, minlength=num_rows))

        took_ms, sent, size_bytes = total(duration_ms[of_op]), total(moved[kind]), total(size[kind])
        found[op] = {
            "count": np.where(count == 0, np.nan, count),
            "bytes": size_bytes,
            "duration_ms": took_ms,
            "busbw_gb_s": np.divide(
                sent / 1e6, took_ms, out=np.full(num_rows, np.nan), where=(took_ms > 0) & (size_bytes > 0)
            ),
        }
    return found


def totals_by_kind(
    calls: Calls, values: Floats, kinds: dict[Kind, list[int]], num_rows: int
) -> dict[Kind, tuple[Floats, Floats]]:
    """How many of every step, and the sum of their values. kinds: what counts as one, by index."""
    found = {}
    for kind, members in kinds.items():
        chosen = np.isin(calls.kind, members)
        rows = calls.row[chosen]
        found[kind] = (
            np.bincount(rows, minlength=num_rows).astype(np.float64),
            np.bincount(rows, weights=values[chosen], minlength=num_rows).astype(np.float64),
        )
    return found


def sums_by_op(calls: Calls, waits: Waits, num_rows: int) -> dict[str, tuple[Floats, Floats]]:
    """Per operation wait and transfer of every step; NaN for steps without it, or with one not matched."""
    found = {}
    for op in dict.fromkeys(kind[0] for kind in calls.kinds):
        of_op = np.array([kind[0] == op for kind in calls.kinds])[calls.kind]
        rows = calls.row[of_op]
        if np.isnan(waits.wait_ms[of_op]).all():
            continue
        absent = np.bincount(rows, minlength=num_rows) == 0
        wait_ms, transfer_ms = (
            np.where(absent, np.nan, np.bincount(rows, weights=values[of_op], minlength=num_rows))
            for values in (waits.wait_ms, waits.transfer_ms)
        )
        found[op] = (wait_ms, transfer_ms)
    return found


class Matched(NamedTuple):
    waits: list[Waits]
    """In the order of the ranks given."""
    clock: Clock
    num_matched: int
    num_between: int
    """Collectives between ranks that can wait, of all ranks."""
    notes: list[str]


def match(ranks: list[int], calls: list[Calls]) -> Matched:
    """Every collective with those of the other ranks of its group, on one clock."""
    groups = [_Group(*found) for found in _complete_groups(ranks, calls)]
    clock = _clock(ranks, calls, groups)
    waits = [
        Waits(np.full(len(one), np.nan), np.full(len(one), np.nan), np.full(len(one), NOBODY))
        for one in calls
    ]
    vague = _vague(calls, groups, clock)
    for group in groups if vague is None else ():
        group.split(ranks, calls, clock, waits)
    between = sum(int(_can_wait(one).sum()) for one in calls)
    matched = sum(int((~np.isnan(one.wait_ms)).sum()) for one in waits)
    num_groups = sum(len(group.index) for group in groups)
    notes = [vague] if vague else _notes(ranks, waits, clock, num_groups, matched, between)
    return Matched(waits, clock, matched, between, notes)


def exposed_wait_ms(calls: Calls, waits: Waits, window_ns: Intervals) -> Floats:
    """Exposed time in which nothing moves because a rank has not arrived, per window [step, 2] in ns.

    Where collectives run at once, transfer comes first: something moves.
    """
    known = ~np.isnan(waits.wait_ms)
    if len(calls.exposed_ns) == 0 or not known.any() or len(window_ns) == 0:
        return np.zeros(len(window_ns))
    origin = int(calls.exposed_ns.min())
    start = (calls.start_ns[known] - origin) / 1e6
    arrived = start + waits.wait_ms[known]
    end = (calls.end_ns[known] - origin) / 1e6
    exposed = union((calls.exposed_ns - origin) / 1e6)
    waiting = subtract_normalised(union(pairs(start, arrived)), union(pairs(arrived, end)))
    waiting = intersect_normalised(exposed, waiting)
    edges = (window_ns - origin) / 1e6
    return _length_before(waiting, edges[:, 1]) - _length_before(waiting, edges[:, 0])


def _length_before(spans: Intervals, time: Floats) -> Floats:
    """Length of the part of normalised spans before each time."""
    if len(spans) == 0:
        return np.zeros(len(time))
    before = np.concatenate(([0.0], np.cumsum(spans[:, 1] - spans[:, 0])))
    begun = np.searchsorted(spans[:, 0], time, side="left")
    not_over = np.maximum(spans[np.maximum(begun - 1, 0), 1] - time, 0.0)
    length: Floats = before[begun] - np.where(begun > 0, not_over, 0.0)
    return length


@dataclass(slots=True)
class _Group:
    """Collectives of a group that every member has."""

    members: list[int]
    """Places among the ranks given."""
    index: Ints
    """[collective, member]: which call of the member."""

    def split(self, ranks: list[int], calls: list[Calls], clock: Clock, waits: list[Waits]) -> None:
        start = np.stack(
            [clock.aligned(r, calls[r].start_ns[self.index[:, c]]) for c, r in enumerate(self.members)],
            axis=1,
        )
        latest = start.max(axis=1)
        ordered = np.sort(start, axis=1)
        late = np.array([ranks[r] for r in self.members])[np.argmax(start, axis=1)]
        lead = ordered[:, -1] - ordered[:, -2]
        late = np.where(lead > 1e3 * (clock.residual_us or 0.0), late, NOBODY)
        for column, r in enumerate(self.members):
            i = self.index[:, column]
            duration = (calls[r].end_ns[i] - calls[r].start_ns[i]) / 1e6
            wait = np.clip((latest - start[:, column]) / 1e6, 0.0, np.maximum(duration, 0.0))
            waits[r].wait_ms[i] = wait
            waits[r].transfer_ms[i] = duration - wait
            waits[r].late_rank[i] = late


def _complete_groups(ranks: list[int], calls: list[Calls]) -> list[tuple[list[int], Ints]]:
    place = {rank: i for i, rank in enumerate(ranks)}
    keys = dict.fromkeys(key for one in calls for key in one.groups)
    found = []
    for key in keys:
        members = [place[rank] for rank in key[1] if rank in place]
        if len(members) < 2 or len(members) < len(key[1]):
            continue
        of_members = [_of_group(calls[r], key) for r in members]
        common = of_members[0][0]
        for seq, _ in of_members[1:]:
            common = np.intersect1d(common, seq, assume_unique=True)
        if len(common) == 0:
            continue
        index = np.stack([where[np.searchsorted(seq, common)] for seq, where in of_members], axis=1)
        index = index[_same_op(calls, members, index)]
        if len(index):
            found.append((members, index))
    return found


def _of_group(one: Calls, key: GroupKey) -> tuple[Ints, Ints]:
    """Numbers, in order, and where they are."""
    if key not in one.groups:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    where = np.flatnonzero((one.group == one.groups.index(key)) & _can_wait(one))
    seq, first = np.unique(one.seq[where], return_index=True)
    return seq, where[first]


def _can_wait(one: Calls) -> NDArray[np.bool_]:
    can = np.array([kind[0] not in POINT_TO_POINT | ROOTED and kind[3] > 1 for kind in one.kinds], dtype=bool)
    return can[one.kind] & (one.end_ns != UNKNOWN_END) if len(one) else np.zeros(0, dtype=bool)


def _same_op(calls: list[Calls], members: list[int], index: Ints) -> NDArray[np.bool_]:
    names: dict[str, int] = {}
    ops = []
    for column, r in enumerate(members):
        of_kind = np.array([names.setdefault(op, len(names)) for op, *_ in calls[r].kinds])
        ops.append(of_kind[calls[r].kind[index[:, column]]])
    same: NDArray[np.bool_] = np.ptp(np.stack(ops, axis=1), axis=1) == 0
    return same


def _clock(ranks: list[int], calls: list[Calls], groups: list[_Group]) -> Clock:
    """From the ends of small collectives; of the shortest ones where there are few."""
    columns: list[tuple[Ints, _Group, Ints]] = []
    for group in groups:
        first = calls[group.members[0]]
        size = np.array([kind[1] for kind in first.kinds])[first.kind[group.index[:, 0]]]
        length = np.min(
            [
                calls[r].end_ns[i] - calls[r].start_ns[i]
                for r, i in zip(group.members, group.index.T, strict=True)
            ],
            axis=0,
        )
        columns.append((np.where(size <= SMALL_BYTES, -1, length), group, np.arange(len(group.index))))
    if not columns:
        return align(ranks, np.zeros((0, len(ranks)), np.int64), np.zeros((0, len(ranks)), bool))
    rating = np.concatenate([column[0] for column in columns])
    num_small = int((rating < 0).sum())
    wanted = num_small if num_small >= MIN_ANCHORS else max(MIN_ANCHORS, len(rating) // 4)
    limit = np.sort(rating, kind="stable")[min(wanted, len(rating)) - 1]
    chosen = np.flatnonzero(rating <= limit)
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), MAX_ANCHORS)).round().astype(int)]
    which = np.concatenate([np.full(len(column[0]), k) for k, column in enumerate(columns)])[chosen]
    where = np.concatenate([column[2] for column in columns])[chosen]
    end_ns = np.zeros((len(chosen), len(ranks)), dtype=np.int64)
    present = np.zeros((len(chosen), len(ranks)), dtype=bool)
    for k, (_, group, _) in enumerate(columns):
        rows = np.flatnonzero(which == k)
        for column, r in enumerate(group.members):
            end_ns[rows, r] = calls[r].end_ns[group.index[where[rows], column]]
            present[rows, r] = True
    return align(ranks, end_ns, present)


def _vague(calls: list[Calls], groups: list[_Group], clock: Clock) -> str | None:
    """Why nothing is said about waits: collectives end too far apart to tell who came when."""
    durations = [
        calls[r].duration_ms[i] for group in groups for r, i in zip(group.members, group.index.T, strict=True)
    ]
    if not durations or clock.residual_us is None:
        return None
    usual_ms = float(np.median(np.concatenate(durations)))
    if clock.residual_us / 1e3 <= MOST_VAGUE * usual_ms:
        return None
    return (
        f"waits are not told apart: ranks see the same collective end up to {clock.residual_us:.0f} µs apart,"
        f" and one takes {1e3 * usual_ms:.0f} µs"
    )


def _notes(
    ranks: list[int], waits: list[Waits], clock: Clock, num_groups: int, matched: int, between: int
) -> list[str]:
    """num_groups: collectives, each of which counts once per rank in matched and in between."""
    notes = list(clock.notes)
    if matched < between:
        notes.append(
            f"{between - matched} of {between} records of collectives were not matched on all ranks:"
            " no waits there"
        )
    if clock.residual_us is not None and matched:
        apart_ms = float(np.ptp(clock.offset_ns)) / 1e6
        moved = f", after {number(apart_ms)} ms between them were taken out" if apart_ms > MOVED_MS else ""
        notes.append(
            f"ranks are matched by {num_groups} collectives; their clocks agree to"
            f" {clock.residual_us:.0f} µs{moved}"
        )
    late: Counter[int] = Counter()
    num = 0
    for rank, one in zip(ranks, waits, strict=True):
        judged = one.late_rank[~np.isnan(one.wait_ms)]
        num = max(num, len(judged))
        late[rank] = int((judged == rank).sum())
    rank, count = max(late.items(), key=lambda item: item[1], default=(NOBODY, 0))
    if count and len(ranks) > 1:
        waited = [
            float(np.nansum(one.wait_ms[one.late_rank == rank]))
            for other, one in zip(ranks, waits, strict=True)
            if other != rank
        ]
        notes.append(
            f"rank {rank} came last in {count} of {num} collectives; the others waited"
            f" {number(float(np.median(waited)))} ms for it in all (median rank)"
        )
    return notes
