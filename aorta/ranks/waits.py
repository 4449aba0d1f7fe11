"""Collectives of all ranks side by side: which belong together, who waited for whom, who was late.

A collective is matched across ranks by its group, and within the group by its place in the sequence of
(operation, bytes), because recordings start at different collectives (sequences.py). Each matched one is
split into wait, until its last rank arrives, and transfer, after that. The late rank is blamed, not its
victims.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.ranks.common_clock import MAX_ANCHORS, Clock, align
from aorta.ranks.match_by_order import Calls, align_sequences
from aorta.timeline.intervals import (
    EMPTY,
    Intervals,
    intersect_normalised,
    intervals,
    length_ms,
    subtract_normalised,
    union,
)
from aorta.timeline.overlap import on_compute_stream
from aorta.timeline.types import Kind, Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

POINT_TO_POINT = frozenset(("send", "recv", "send_recv"))
ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""Some ranks may leave before the last has arrived: no wait, no transfer, no anchor of the clock."""
UNEVEN = frozenset(("all_to_all", "gather", "scatter"))
"""Ranks may hold different sizes of the same collective."""
UNKNOWN_OP = "unknown"
SMALL_BYTES = 1 << 20
SMALL_NS = 200_000
"""Shortest duration of a small collective whose size is not known."""
MIN_ANCHORS = 3
MAX_NAMED = 4
"""Ranks in a note."""
NOBODY = -1


class GroupKey(NamedTuple):
    ranks: tuple[int, ...] | None
    name: str | None


NO_KEY = GroupKey(None, None)
"""Of calls whose group nothing tells."""


@dataclass(slots=True)
class RankCalls:
    """The collectives of one rank, in order of their starts."""

    rank: int
    op: list[str]
    group: list[GroupKey]
    size_bytes: list[int | None]
    start_ns: Ints
    """On the rank's own clock, as end_ns."""
    end_ns: Ints
    exposed: Intervals = field(default_factory=lambda: EMPTY)
    """Communication without compute, normalised, in ms from origin_ns."""
    origin_ns: int = 0

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    key: GroupKey
    rows: tuple[int, ...]
    """Which of the ranks given are members, by their place."""
    call: NDArray[np.int32]
    """[collective, member]: index into the member's calls, -1 where it has none."""
    is_whole: bool
    """All ranks of the group were given."""


@dataclass(slots=True)
class Waits:
    """Per call of one rank; NaN where the collective was not matched on all ranks of its group, or is
    point to point or rooted."""

    wait_ms: Floats
    transfer_ms: Floats
    late_rank: Ints
    """The rank that all waited for; NOBODY where it is not known, or its lead is below the residual."""
    late_ms: Floats
    """By how much that rank came after the one before it."""
    since_ms: Floats
    """On the late rank alone: for how long half of the others had been waiting when it arrived."""


@dataclass(frozen=True, slots=True)
class RankView:
    """All ranks side by side."""

    ranks: tuple[int, ...]
    clock: Clock
    groups: list[MatchedGroup]
    waits: list[Waits]
    """Per rank, in the order of ranks."""
    num_matched: list[int]
    """Per rank: its collectives that were matched with all other members'."""
    num_left: list[int]
    """Per rank: collectives between ranks that were not, point to point left out."""
    notes: list[str]


class ExposedSplit(NamedTuple):
    """Exposed communication of one rank. The parts add up to exposed_ms."""

    exposed_ms: float
    transfer_ms: float
    wait_ms: dict[int, float]
    """By the rank that was waited for; NOBODY: waiting, but for whom is below the residual."""
    other_ms: float
    """In collectives that were not matched, are rooted, or are point to point."""

    @property
    def total_wait_ms(self) -> float:
        return sum(self.wait_ms.values())


class Doing(NamedTuple):
    """What a rank did while others waited for it, on its compute stream."""

    window_ms: float
    kernels: list[tuple[str, float]]
    """The longest first: name and ms."""
    idle_ms: float
    """Nothing on the compute stream."""
    comm_ms: float
    """Part of idle_ms in which a collective ran on another stream."""
    copy_ms: float
    """Part of idle_ms in which a copy ran."""


class Straggler(NamedTuple):
    rank: int
    num_late: int
    """Collectives in which it arrived last, by more than the residual."""
    num_judged: int
    """Collectives of its groups that could be judged."""
    caused_ms: float
    """Exposed waiting of the other ranks, summed."""


def match_ranks(calls: Sequence[RankCalls]) -> RankView:
    """The collectives of these ranks matched, on one clock, split into wait and transfer."""
    notes: list[str] = []
    groups = [
        _match_group(key, rows, members, calls, notes)
        for key, (rows, members) in sorted(_by_group(calls).items(), key=_order)
    ]
    clock = _clock(calls, groups, notes)
    waits = [_no_waits(len(one)) for one in calls]
    whole = [np.zeros(len(one), dtype=bool) for one in calls]
    for group in groups:
        _split_group(group, calls, clock, waits, whole)
    partial = [group for group in groups if not group.is_whole]
    if partial:
        notes.append(f"{len(partial)} of {len(groups)} groups have ranks that were not given: no waits there")
    between = [_between_ranks(one) for one in calls]
    num_matched = [int(mask.sum()) for mask in whole]
    return RankView(
        ranks=tuple(one.rank for one in calls),
        clock=clock,
        groups=groups,
        waits=waits,
        num_matched=num_matched,
        num_left=[int(mask.sum()) - num for mask, num in zip(between, num_matched, strict=True)],
        notes=[*clock.notes, *notes],
    )


class ExposedParts(NamedTuple):
    """Exposed communication as disjoint, normalised intervals in ms from RankCalls.origin_ns."""

    transfer: Intervals
    wait: dict[int, Intervals]
    """By the rank that was waited for, or NOBODY."""


def exposed_parts(calls: RankCalls, waits: Waits) -> ExposedParts:
    """Where several collectives run at once, transfer comes first: something moves. Then waits, in order
    of their starts."""
    known = np.flatnonzero(~np.isnan(waits.wait_ms))
    start_ms = (calls.start_ns[known] - calls.origin_ns) / 1e6
    arrived_ms = start_ms + waits.wait_ms[known]
    end_ms = (calls.end_ns[known] - calls.origin_ns) / 1e6
    transfer = intersect_normalised(calls.exposed, union(np.stack((arrived_ms, end_ms), axis=1)))
    left = subtract_normalised(calls.exposed, transfer)
    wait: dict[int, Intervals] = {}
    late = waits.late_rank[known]
    for rank in _by_first_start(late, start_ms):
        spans = union(np.stack((start_ms[late == rank], arrived_ms[late == rank]), axis=1))
        wait[rank] = intersect_normalised(left, spans)
        left = subtract_normalised(left, spans)
    return ExposedParts(transfer, wait)


def split_exposed(calls: RankCalls, waits: Waits) -> ExposedSplit:
    """The lengths of exposed_parts, and what is left."""
    parts = exposed_parts(calls, waits)
    exposed_ms, transfer_ms = length_ms(calls.exposed), length_ms(parts.transfer)
    wait_ms = {rank: ms for rank, spans in parts.wait.items() if (ms := length_ms(spans)) > 0}
    other_ms = max(0.0, exposed_ms - transfer_ms - sum(wait_ms.values()))
    return ExposedSplit(exposed_ms, transfer_ms, wait_ms, other_ms)


def stragglers(view: RankView, splits: Sequence[ExposedSplit]) -> list[Straggler]:
    """Ranks that others waited for, the costliest first."""
    found = []
    for row, rank in enumerate(view.ranks):
        judged = view.waits[row].late_rank[~np.isnan(view.waits[row].wait_ms)]
        caused = [
            split.wait_ms.get(rank, 0.0)
            for other, split in zip(view.ranks, splits, strict=True)
            if other != rank
        ]
        num_late = int(np.count_nonzero(judged == rank))
        if num_late:
            found.append(Straggler(rank, num_late, len(judged), sum(caused)))
    return sorted(found, key=lambda one: (-one.caused_ms, -one.num_late, one.rank))


def late_windows(calls: RankCalls, waits: Waits) -> list[tuple[int, int]]:
    """Where others waited for this rank: ns on its own clock, until it arrived."""
    late = np.flatnonzero((waits.late_rank == calls.rank) & (waits.since_ms > 0))
    return [
        (int(calls.start_ns[i] - round(float(waits.since_ms[i]) * 1e6)), int(calls.start_ns[i]))
        for i in late.tolist()
    ]


def doing(timeline: Timeline, windows_ns: Iterable[tuple[int, int]], top: int = 3) -> Doing:
    """What the rank of this timeline did in these windows."""
    origin = timeline.origin_unix_ns
    windows = union(intervals([((a - origin) / 1e6, (b - origin) / 1e6) for a, b in windows_ns]))
    window_ms = length_ms(windows)
    near = np.zeros(len(timeline), dtype=bool)
    for start, end in windows.tolist():
        near |= (timeline.start_ms < end) & (timeline.end_ms > start)
    on_stream = near & on_compute_stream(timeline)
    by_name: dict[str, float] = {}
    for i in np.unique(timeline.name[on_stream]).tolist():
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


# ---- matching ----------------------------------------------------------------------------------

_Members = dict[GroupKey, tuple[list[int], list[Ints]]]
"""Per group: places of its members among the ranks given, and each one's calls."""


def _by_group(calls: Sequence[RankCalls]) -> _Members:
    known = {key for one in calls for key in _keys(one) if key != NO_KEY and _size(key) != 1}
    # Calls without metadata are the only group's where there is one.
    default = next(iter(known)) if len(known) == 1 else NO_KEY
    found: _Members = {}
    for row, one in enumerate(calls):
        indices: dict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(_between_ranks(one)).tolist():
            indices[id(one.group[i])].append(i)
        of_key: dict[GroupKey, list[int]] = defaultdict(list)
        for places in indices.values():
            key = one.group[places[0]]
            of_key[default if key == NO_KEY else key] += places
        for key, places in of_key.items():
            rows, members = found.setdefault(key, ([], []))
            rows.append(row)
            members.append(np.array(sorted(places), dtype=np.int64))
    return {key: group for key, group in found.items() if len(group[0]) > 1}


def _keys(one: RankCalls) -> list[GroupKey]:
    """The distinct ones. Calls share few objects; comparing those of a thousand ranks takes long."""
    return list({id(key): key for key in one.group}.values())


def _between_ranks(one: RankCalls) -> NDArray[np.bool_]:
    alone = {id(key) for key in _keys(one) if _size(key) == 1}
    return np.array(
        [
            op not in POINT_TO_POINT and id(key) not in alone
            for op, key in zip(one.op, one.group, strict=True)
        ],
        dtype=bool,
    )


def _size(key: GroupKey) -> int | None:
    return None if key.ranks is None else len(key.ranks)


def _order(item: tuple[GroupKey, object]) -> tuple[tuple[int, ...], str]:
    return item[0].ranks or (), item[0].name or ""


def _match_group(
    key: GroupKey, rows: list[int], members: list[Ints], calls: Sequence[RankCalls], notes: list[str]
) -> MatchedGroup:
    ops: dict[str, int] = {}
    sequences = [_sequence(calls[row], places, ops) for row, places in zip(rows, members, strict=True)]
    longest = int(np.argmax([len(places) for places in members]))
    call = np.full((len(members[longest]), len(rows)), -1, dtype=np.int32)
    open_ranks = []
    for column, (places, sequence) in enumerate(zip(members, sequences, strict=True)):
        if column == longest:
            call[:, column] = places
            continue
        found = align_sequences(sequences[longest], sequence)
        call[found.of_a, column] = places[found.of_b]
        if found.is_open:
            open_ranks.append(calls[rows[column]].rank)
    if open_ranks:
        notes.append(
            f"rank{'s' if len(open_ranks) > 1 else ''} {', '.join(map(str, open_ranks[:MAX_NAMED]))}"
            f"{', ...' if len(open_ranks) > MAX_NAMED else ''}: collectives fit those of rank"
            f" {calls[rows[longest]].rank} in several ways, none of them clearly right: not matched"
        )
    present = {calls[row].rank for row in rows}
    is_whole = key.ranks is None or set(key.ranks) <= present
    return MatchedGroup(key, tuple(rows), call, is_whole)


def _sequence(one: RankCalls, places: Ints, ops: dict[str, int]) -> Calls:
    """These calls. ops: the numbers of operations, the same for all ranks."""
    op = [one.op[i] for i in places.tolist()]
    size = [one.size_bytes[i] for i in places.tolist()]
    return Calls(
        op=np.array([-1 if o == UNKNOWN_OP else ops.setdefault(o, len(ops)) for o in op], dtype=np.int64),
        size=np.array(
            [-1 if s is None or o in UNEVEN else s for o, s in zip(op, size, strict=True)], dtype=np.int64
        ),
        end_ns=one.end_ns[places],
        is_loose=np.array([o in ROOTED for o in op], dtype=bool),
    )


# ---- clock, waits ------------------------------------------------------------------------------


def _clock(calls: Sequence[RankCalls], groups: Sequence[MatchedGroup], notes: list[str]) -> Clock:
    """From the small collectives; from the shortest of the others where there are too few."""
    found = [_candidates(group, calls) for group in groups]
    if not found:
        return align([one.rank for one in calls], np.empty((0, 0), np.int64), np.empty((0, 0), bool))
    group_of = np.concatenate([np.full(len(one.row), g) for g, one in enumerate(found)])
    row = np.concatenate([one.row for one in found])
    duration = np.concatenate([one.duration_ns for one in found])
    small = np.concatenate([one.is_small for one in found])
    chosen = np.flatnonzero(small)
    if len(chosen) < MIN_ANCHORS and len(chosen) < len(small):
        large = np.flatnonzero(~small)
        shortest = large[np.argsort(duration[large], kind="stable")]
        chosen = np.concatenate((chosen, shortest[: max(MIN_ANCHORS, len(large) // 4)]))
        notes.append("there are too few small collectives to align clocks on: ends of larger ones are used")
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), MAX_ANCHORS)).round().astype(int)]
    end_ns = np.zeros((len(chosen), len(calls)), dtype=np.int64)
    present = np.zeros((len(chosen), len(calls)), dtype=bool)
    for k, i in enumerate(chosen.tolist()):
        group = groups[group_of[i]]
        for member, at in zip(group.rows, group.call[row[i]].tolist(), strict=True):
            if at >= 0:
                end_ns[k, member] = calls[member].end_ns[at]
                present[k, member] = True
    return align([one.rank for one in calls], end_ns, present)


class _Candidates(NamedTuple):
    """Collectives of a group that end on all ranks at once."""

    row: Ints
    """Of MatchedGroup.call."""
    duration_ns: Floats
    """The shortest of the ranks'."""
    is_small: NDArray[np.bool_]


def _candidates(group: MatchedGroup, calls: Sequence[RankCalls]) -> _Candidates:
    num = len(group.call)
    shortest, largest = np.full(num, np.inf), np.full(num, -1, dtype=np.int64)
    rooted = np.zeros(num, dtype=bool)
    for column, member in enumerate(group.rows):
        one, at = calls[member], group.call[:, column]
        there = np.flatnonzero(at >= 0)
        i = at[there]
        shortest[there] = np.minimum(shortest[there], one.end_ns[i] - one.start_ns[i])
        size = np.array([-1 if s is None else s for s in one.size_bytes], dtype=np.int64)[i]
        largest[there] = np.maximum(largest[there], size)
        rooted[there] |= np.array([op in ROOTED for op in one.op], dtype=bool)[i]
    shared = np.flatnonzero(((group.call >= 0).sum(axis=1) > 1) & ~rooted)
    small = np.where(largest >= 0, largest <= SMALL_BYTES, shortest <= SMALL_NS)
    return _Candidates(shared, shortest[shared], small[shared])


def _no_waits(num: int) -> Waits:
    return Waits(
        np.full(num, np.nan), np.full(num, np.nan), np.full(num, NOBODY), np.full(num, np.nan), np.zeros(num)
    )


def _split_group(
    group: MatchedGroup,
    calls: Sequence[RankCalls],
    clock: Clock,
    waits: list[Waits],
    whole: list[NDArray[np.bool_]],
) -> None:
    complete = group.call[(group.call >= 0).all(axis=1)]
    for column, r in enumerate(group.rows):
        whole[r][complete[:, column]] = True
    if not group.is_whole or len(complete) == 0:
        return
    first = calls[group.rows[0]]
    rooted = np.array([first.op[i] in ROOTED for i in complete[:, 0].tolist()], dtype=bool)
    complete = complete[~rooted]
    if len(complete) == 0:
        return
    start = np.stack(
        [clock.aligned(r, calls[r].start_ns[complete[:, c]]) for c, r in enumerate(group.rows)], axis=1
    )
    ordered = np.sort(start, axis=1)
    latest, lead = ordered[:, -1], ordered[:, -1] - ordered[:, -2]
    half = np.median(ordered[:, :-1], axis=1)
    late = np.array([calls[r].rank for r in group.rows])[np.argmax(start, axis=1)]
    late = np.where(lead > 1e3 * (clock.residual_us or 0.0), late, NOBODY)
    for column, r in enumerate(group.rows):
        i, of = complete[:, column], waits[r]
        duration = (calls[r].end_ns[i] - calls[r].start_ns[i]) / 1e6
        wait = np.clip((latest - start[:, column]) / 1e6, 0.0, duration)
        of.wait_ms[i] = wait
        of.transfer_ms[i] = duration - wait
        of.late_rank[i] = late
        of.late_ms[i] = lead / 1e6
        of.since_ms[i] = np.where(late == calls[r].rank, (latest - half) / 1e6, 0.0)


def _by_first_start(late: Ints, start_ms: Floats) -> list[int]:
    first: dict[int, float] = {}
    for rank, start in zip(late.tolist(), start_ms.tolist(), strict=True):
        first[rank] = min(first.get(rank, start), start)
    return sorted(first, key=first.__getitem__)
