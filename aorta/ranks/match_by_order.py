"""Collectives matched across ranks by their place in the sequence of their group.

For recordings that begin at different collectives and do not number them, as traces: within a group calls are
matched by the sequence of (operation, bytes, end), see sequences.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aorta.ranks.groups import UNKNOWN_SIZE, Ints, MatchedGroup
from aorta.ranks.sequences import Calls, align_sequences
from aorta.timeline.collective import POINT_TO_POINT, ROOTED, UNEVEN, GroupKey
from aorta.timeline.intervals import EMPTY, Intervals

UNKNOWN_OP = "unknown"
MAX_NAMED = 4
"""Ranks in a note."""
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


def match_by_order(calls: Sequence[RankCalls], notes: list[str]) -> list[MatchedGroup]:
    """The groups of which two ranks or more are given. notes gets the ranks that fit in several ways."""
    return [
        _match_group(key, rows, members, calls, notes)
        for key, (rows, members) in sorted(_by_group(calls).items(), key=_order)
    ]


_Members = dict[GroupKey, tuple[list[int], list[Ints]]]
"""Per group: places of its members among the ranks given, and each one's calls."""


def _by_group(calls: Sequence[RankCalls]) -> _Members:
    named_keys = {
        key for rank_calls in calls for key in _keys(rank_calls) if key != NO_KEY and _size(key) != 1
    }
    # Calls without metadata are the only group's where there is one.
    default = next(iter(named_keys)) if len(named_keys) == 1 else NO_KEY
    groups: _Members = {}
    for row, rank_calls in enumerate(calls):
        indices: dict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(between_ranks(rank_calls)).tolist():
            indices[id(rank_calls.group[i])].append(i)
        of_key: dict[GroupKey, list[int]] = defaultdict(list)
        for places in indices.values():
            key = rank_calls.group[places[0]]
            of_key[default if key == NO_KEY else key] += places
        for key, places in of_key.items():
            rows, members = groups.setdefault(key, ([], []))
            rows.append(row)
            members.append(np.array(sorted(places), dtype=np.int64))
    return {key: group for key, group in groups.items() if len(group[0]) > 1}


def _keys(calls: RankCalls) -> list[GroupKey]:
    """The distinct ones. Calls share few objects; comparing those of a thousand ranks takes long."""
    return list({id(key): key for key in calls.group}.values())


def between_ranks(calls: RankCalls) -> NDArray[np.bool_]:
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
        call[alignment.of_a, column] = places[alignment.of_b]
        if alignment.is_open:
            open_ranks.append(calls[rows[column]].rank)
    if open_ranks:
        notes.append(
            f"rank{'s' if len(open_ranks) > 1 else ''} {', '.join(map(str, open_ranks[:MAX_NAMED]))}"
            f"{', ...' if len(open_ranks) > MAX_NAMED else ''}: collectives fit those of rank"
            f" {calls[rows[longest]].rank} in several ways, none of them clearly right: not matched"
        )
    present = {calls[row].rank for row in rows}
    is_whole = key.ranks is None or set(key.ranks) <= present
    is_rooted, size_bytes = _kinds(call, rows, calls)
    return MatchedGroup(key, tuple(rows), call, is_whole, is_rooted, size_bytes)


def _kinds(
    call: NDArray[np.int32], rows: Sequence[int], calls: Sequence[RankCalls]
) -> tuple[NDArray[np.bool_], Ints]:
    """[collective]: whether it is rooted, and its largest known size; any member may tell."""
    is_rooted, largest = np.zeros(len(call), dtype=bool), np.full(len(call), UNKNOWN_SIZE, dtype=np.int64)
    for column, row in enumerate(rows):
        present = np.flatnonzero(call[:, column] >= 0)
        places = call[present, column]
        size = np.array([UNKNOWN_SIZE if s is None else s for s in calls[row].size_bytes], dtype=np.int64)
        largest[present] = np.maximum(largest[present], size[places])
        is_rooted[present] |= np.array([op in ROOTED for op in calls[row].op], dtype=bool)[places]
    return is_rooted, largest


def _sequence(calls: RankCalls, places: Ints, ops: dict[str, int]) -> Calls:
    """These calls. ops: the numbers of operations, the same for all ranks."""
    op = [calls.op[i] for i in places.tolist()]
    size = [calls.size_bytes[i] for i in places.tolist()]
    return Calls(
        op=np.array([-1 if o == UNKNOWN_OP else ops.setdefault(o, len(ops)) for o in op], dtype=np.int64),
        size=np.array(
            [-1 if s is None or o in UNEVEN else s for o, s in zip(op, size, strict=True)], dtype=np.int64
        ),
        end_ns=calls.end_ns[places],
        is_loose=np.array([o in ROOTED for o in op], dtype=bool),
    )
