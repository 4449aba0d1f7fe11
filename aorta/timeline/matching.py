"""Matches collectives across ranks: each MatchedGroup has the call of every member of a process group.

Records number the calls of a group (match_by_number). Traces do not: there the place in the group's sequence
tells (match_by_order, with sequences.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.collective import POINT_TO_POINT, ROOTED, UNEVEN, GroupKey
from aorta.timeline.intervals import EMPTY, Intervals
from aorta.timeline.sequences import CallSequence, align_sequences

Ints = NDArray[np.int64]
UNKNOWN_SIZE = -1
"""Size of a collective where no call gives one."""
UNKNOWN_OP = "unknown"
MAX_NAMED = 4
"""Ranks that a note names."""
NO_KEY = GroupKey(None, None)
"""Key of calls whose group nothing tells."""


class TimedCalls(Protocol):
    """The collectives of one rank, with times on the rank's own clock."""

    @property
    def start_ns(self) -> Ints: ...

    @property
    def end_ns(self) -> Ints: ...


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    """The collectives of a group, each with the call of every member."""

    key: GroupKey
    rows: tuple[int, ...]
    """Members, by their place among the ranks given."""
    call: NDArray[np.int32]
    """[collective, member]: index into the member's calls, -1 where it has none."""
    is_whole: bool
    """All ranks of the group were given."""
    is_rooted: NDArray[np.bool_]
    """[collective]: some ranks may leave before the last has arrived."""
    size_bytes: Ints
    """[collective]: the largest size that a member gives, UNKNOWN_SIZE where none does."""


@dataclass(frozen=True, slots=True)
class NumberedCalls:
    """The collectives of one rank. A kind is an operation with a size."""

    groups: Sequence[GroupKey]
    group: NDArray[np.int32]
    """Place of each call's group in groups."""
    seq: Ints
    """Number of each call in its group."""
    ops: Sequence[str]
    """Operation of each kind."""
    sizes: Ints
    """Bytes of each kind, UNKNOWN_SIZE where they are not known."""
    kind: NDArray[np.int32]
    """Place of each call's kind in ops and sizes."""
    can_wait: NDArray[np.bool_]
    """Calls to match: timed, between ranks, neither point to point nor rooted."""
    start_ns: Ints
    end_ns: Ints


@dataclass(slots=True)
class RankCalls:
    """The collectives of one rank, in order of their starts."""

    rank: int
    op: list[str]
    group: list[GroupKey]
    size_bytes: list[int | None]
    start_ns: Ints
    """Starts on the rank's own clock, as end_ns."""
    end_ns: Ints
    exposed: Intervals = field(default_factory=lambda: EMPTY)
    """Communication without compute, normalised, in ms from origin_ns."""
    origin_ns: int = 0

    def __len__(self) -> int:
        return len(self.op)


def match_by_number(ranks: Sequence[int], calls: Sequence[NumberedCalls]) -> list[MatchedGroup]:
    """Groups of which all ranks are given, with the collectives that every member has."""
    place = {rank: row for row, rank in enumerate(ranks)}
    matched = []
    for key in dict.fromkeys(key for rank_calls in calls for key in rank_calls.groups):
        members = [place[rank] for rank in key.ranks or () if rank in place]
        if len(members) < 2 or len(members) < len(key.ranks or ()):
            continue
        index = _common_calls(key, [calls[row] for row in members])
        if len(index) == 0:
            continue
        first = calls[members[0]]
        matched.append(
            MatchedGroup(
                key=key,
                rows=tuple(members),
                call=index.astype(np.int32),
                is_whole=True,
                is_rooted=np.zeros(len(index), dtype=bool),
                size_bytes=first.sizes[first.kind[index[:, 0]]],
            )
        )
    return matched


def _common_calls(key: GroupKey, members: Sequence[NumberedCalls]) -> Ints:
    """[collective, member]: calls of the same number and operation on every member."""
    numbered = [_calls_of_group(calls, key) for calls in members]
    common = numbered[0][0]
    for seq, _ in numbered[1:]:
        common = np.intersect1d(common, seq, assume_unique=True)
    if len(common) == 0:
        return np.zeros((0, len(members)), dtype=np.int64)
    index = np.stack([places[np.searchsorted(seq, common)] for seq, places in numbered], axis=1)
    return index[_is_same_op(members, index)]


def _calls_of_group(calls: NumberedCalls, key: GroupKey) -> tuple[Ints, Ints]:
    """Numbers in increasing order, and the place of the call of each."""
    if key not in calls.groups:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    places = np.flatnonzero((calls.group == calls.groups.index(key)) & calls.can_wait)
    seq, first = np.unique(calls.seq[places], return_index=True)
    return seq, places[first]


def _is_same_op(members: Sequence[NumberedCalls], index: Ints) -> NDArray[np.bool_]:
    """Mask of collectives for which every member's call has the same operation."""
    codes: dict[str, int] = {}
    ops = []
    for column, calls in enumerate(members):
        code_of_kind = np.array([codes.setdefault(op, len(codes)) for op in calls.ops])
        ops.append(code_of_kind[calls.kind[index[:, column]]])
    is_same: NDArray[np.bool_] = np.ptp(np.stack(ops, axis=1), axis=1) == 0
    return is_same


def match_by_order(
    calls: Sequence[RankCalls], notes: list[str], *, are_all: bool = True
) -> list[MatchedGroup]:
    """Groups of which at least two ranks are given. Ranks that fit in several ways are added to notes.

    are_all: there are no other ranks. Where there are, calls whose group names no ranks may be of different
    groups: they are not matched."""
    return [
        _match_group(key, rows, members, calls, notes)
        for key, (rows, members) in sorted(_by_group(calls).items(), key=_order)
        if are_all or key.ranks is not None
    ]


_Members = dict[GroupKey, tuple[list[int], list[Ints]]]
"""Places of a group's members among the ranks given, and the calls of each, by group."""


def _by_group(calls: Sequence[RankCalls]) -> _Members:
    """Calls of every group of which at least two ranks are given."""
    named_keys = {
        key for rank_calls in calls for key in _keys(rank_calls) if key != NO_KEY and _size(key) != 1
    }
    # Calls without metadata belong to the only named group, if there is just one.
    default = next(iter(named_keys)) if len(named_keys) == 1 else NO_KEY
    groups: _Members = {}
    for row, rank_calls in enumerate(calls):
        indices: dict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(between_ranks(rank_calls)).tolist():
            indices[id(rank_calls.group[i])].append(i)
        places_by_key: dict[GroupKey, list[int]] = defaultdict(list)
        for places in indices.values():
            key = rank_calls.group[places[0]]
            places_by_key[default if key == NO_KEY else key] += places
        for key, places in places_by_key.items():
            rows, members = groups.setdefault(key, ([], []))
            rows.append(row)
            members.append(np.array(sorted(places), dtype=np.int64))
    return {key: group for key, group in groups.items() if len(group[0]) > 1}


def _keys(calls: RankCalls) -> list[GroupKey]:
    """Distinct groups of the calls, by identity: comparing keys of a thousand ranks takes long."""
    return list({id(key): key for key in calls.group}.values())


def between_ranks(calls: RankCalls) -> NDArray[np.bool_]:
    """Mask of collectives in which several ranks take part; no point to point."""
    alone = {id(key) for key in _keys(calls) if _size(key) == 1}
    return np.array(
        [
            op not in POINT_TO_POINT and id(key) not in alone
            for op, key in zip(calls.op, calls.group, strict=True)
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
    """Calls of a group, aligned with those of the member that has most."""
    ops: dict[str, int] = {}
    sequences = [_sequence(calls[row], places, ops) for row, places in zip(rows, members, strict=True)]
    longest = int(np.argmax([len(places) for places in members]))
    call = np.full((len(members[longest]), len(rows)), -1, dtype=np.int32)
    open_ranks = []
    for column, (places, sequence) in enumerate(zip(members, sequences, strict=True)):
        if column == longest:
            call[:, column] = places
            continue
        alignment = align_sequences(sequences[longest], sequence)
        call[alignment.index_a, column] = places[alignment.index_b]
        if alignment.is_open:
            open_ranks.append(calls[rows[column]].rank)
    if open_ranks:
        notes.append(
            f"rank{'s' if len(open_ranks) > 1 else ''} {', '.join(map(str, open_ranks[:MAX_NAMED]))}"
            f"{', ...' if len(open_ranks) > MAX_NAMED else ''}: collectives align with those of rank"
            f" {calls[rows[longest]].rank} in more than one way: left unmatched"
        )
    present = {calls[row].rank for row in rows}
    is_whole = key.ranks is None or set(key.ranks) <= present
    is_rooted, size_bytes = _kinds(call, rows, calls)
    return MatchedGroup(key, tuple(rows), call, is_whole, is_rooted, size_bytes)


def _kinds(
    call: NDArray[np.int32], rows: Sequence[int], calls: Sequence[RankCalls]
) -> tuple[NDArray[np.bool_], Ints]:
    """Mask of rooted collectives, and the largest known size of each; any member may tell."""
    is_rooted, largest = np.zeros(len(call), dtype=bool), np.full(len(call), UNKNOWN_SIZE, dtype=np.int64)
    for column, row in enumerate(rows):
        present = np.flatnonzero(call[:, column] >= 0)
        places = call[present, column]
        size = np.array([UNKNOWN_SIZE if s is None else s for s in calls[row].size_bytes], dtype=np.int64)
        largest[present] = np.maximum(largest[present], size[places])
        is_rooted[present] |= np.array([op in ROOTED for op in calls[row].op], dtype=bool)[places]
    return is_rooted, largest


def _sequence(calls: RankCalls, places: Ints, ops: dict[str, int]) -> CallSequence:
    """Calls of a rank as a sequence. ops: numbers of operations, shared by all ranks."""
    op = [calls.op[i] for i in places.tolist()]
    size = [calls.size_bytes[i] for i in places.tolist()]
    return CallSequence(
        op=np.array([-1 if o == UNKNOWN_OP else ops.setdefault(o, len(ops)) for o in op], dtype=np.int64),
        size=np.array(
            [-1 if s is None or o in UNEVEN else s for o, s in zip(op, size, strict=True)], dtype=np.int64
        ),
        end_ns=calls.end_ns[places],
        is_loose=np.array([o in ROOTED for o in op], dtype=bool),
    )
