"""Matches collectives across ranks: each MatchedGroup has the call of every member of a process group.

Records number the calls of a group (match_by_number). Traces do not: there the place in the group's sequence
tells (match_by_order, with sequences.py).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.collective import POINT_TO_POINT, ROOTED, UNEVEN, GroupKey
from aorta.timeline.sequences import CallSequence, align_sequences

CollectiveKey = tuple[str, int, str, int, str]
"""op, bytes, dtype, num_ranks, stream. bytes is UNKNOWN_SIZE where sizes share a row, too; num_ranks is 0
where it is not known."""
UNKNOWN_SIZE = -1
"""Size of a collective where no call gives one."""
UNKNOWN_END = -1
"""end_ns of a collective whose times were not measured."""
UNKNOWN_OP = "unknown"
MAX_NAMED = 4
"""Ranks that a note names."""
NO_KEY = GroupKey(None, None)
"""Key of calls whose group nothing tells."""


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
    is_rooted: Flags
    """[collective]: some ranks may leave before the last has arrived."""
    size_bytes: Ints
    """[collective]: the largest size that a member gives, UNKNOWN_SIZE where none does."""


@dataclass(slots=True)
class RankCalls:
    """The collectives of one rank, of records in order of the file, of a trace in order of their starts."""

    kinds: list[CollectiveKey]
    groups: list[GroupKey]
    row: NDArray[np.int32]
    """Of the step that issued each; -1 where it is none of those that are known."""
    kind: NDArray[np.int32]
    group: NDArray[np.int32]
    seq: Ints
    """Number of each in its group; 0 of a trace, which does not tell."""
    start_ns: Ints
    """Starts on the rank's own clock, as end_ns."""
    end_ns: Ints
    lead_ms: Floats
    """By how much the host had launched it before it began; NaN where that is not known."""
    exposed_ns: Ints
    """[n, 2]: communication without compute."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def of_kinds(self, is_of: Callable[[CollectiveKey], bool]) -> Flags:
        """Mask of the calls whose kind is one of those."""
        return np.array([is_of(kind) for kind in self.kinds], dtype=bool)[self.kind]

    def op_of(self, call: int) -> str:
        return self.kinds[int(self.kind[call])][0]

    def bytes_of(self, call: int) -> int | None:
        size = self.kinds[int(self.kind[call])][1]
        return None if size == UNKNOWN_SIZE else size

    def group_of(self, call: int) -> GroupKey:
        return self.groups[int(self.group[call])]

    def placed(self, place: NDArray[np.int32]) -> "RankCalls":
        """The calls with the rows' new places, -1 of those that are left out."""
        return replace(self, row=np.append(place, np.int32(-1))[self.row])

    def moved(self, place: NDArray[np.int32]) -> "RankCalls":
        """The same without the calls of rows that are left out."""
        placed = self.placed(place)
        names = ("row", "kind", "group", "seq", "start_ns", "end_ns", "lead_ms")
        is_kept = placed.row >= 0
        return replace(placed, **{name: getattr(placed, name)[is_kept] for name in names})

    @property
    def duration_ms(self) -> Floats:
        """NaN where it was not measured."""
        return np.where(self.end_ns == UNKNOWN_END, np.nan, (self.end_ns - self.start_ns) / 1e6)


def can_wait(calls: RankCalls) -> Flags:
    """Mask of calls that are matched by number: timed, between ranks, neither point to point nor rooted."""
    is_timed: Flags = calls.end_ns != UNKNOWN_END
    return calls.of_kinds(lambda kind: kind[0] not in POINT_TO_POINT | ROOTED and kind[3] > 1) & is_timed


def match_by_number(ranks: Sequence[int], calls: Sequence[RankCalls]) -> list[MatchedGroup]:
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
                size_bytes=_sizes(first)[index[:, 0]],
            )
        )
    return matched


def _sizes(calls: RankCalls) -> Ints:
    return np.array([kind[1] for kind in calls.kinds], dtype=np.int64)[calls.kind]


def _op_codes(calls: RankCalls, codes: dict[str, int]) -> Ints:
    """The operation of each call as a number that the ranks share; -1 where it is not known."""
    of_kind = [-1 if op == UNKNOWN_OP else codes.setdefault(op, len(codes)) for op, *_ in calls.kinds]
    return np.array(of_kind, dtype=np.int64)[calls.kind]


def _common_calls(key: GroupKey, members: Sequence[RankCalls]) -> Ints:
    """[collective, member]: calls of the same number and operation on every member."""
    numbered = [_calls_of_group(calls, key) for calls in members]
    common = numbered[0][0]
    for seq, _ in numbered[1:]:
        common = np.intersect1d(common, seq, assume_unique=True)
    if len(common) == 0:
        return np.zeros((0, len(members)), dtype=np.int64)
    index = np.stack([places[np.searchsorted(seq, common)] for seq, places in numbered], axis=1)
    codes: dict[str, int] = {}
    ops = np.stack([_op_codes(calls, codes)[index[:, i]] for i, calls in enumerate(members)], axis=1)
    common_calls: Ints = index[np.ptp(ops, axis=1) == 0]
    return common_calls


def _calls_of_group(calls: RankCalls, key: GroupKey) -> tuple[Ints, Ints]:
    """Numbers in increasing order, and the place of the call of each."""
    if key not in calls.groups:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    places = np.flatnonzero((calls.group == calls.groups.index(key)) & can_wait(calls))
    seq, first = np.unique(calls.seq[places], return_index=True)
    return seq, places[first]


def match_by_order(
    ranks: Sequence[int], calls: Sequence[RankCalls], notes: list[str], *, are_all: bool = True
) -> list[MatchedGroup]:
    """Groups of which at least two ranks are given. Ranks that fit in several ways are added to notes.

    are_all: there are no other ranks. Where there are, calls whose group names no ranks may be of different
    groups: they are not matched."""
    return [
        _match_group(key, rows, members, ranks, calls, notes)
        for key, (rows, members) in sorted(_by_group(calls).items(), key=_order)
        if are_all or key.ranks is not None
    ]


_Members = dict[GroupKey, tuple[list[int], list[Ints]]]
"""Places of a group's members among the ranks given, and the calls of each, by group."""


def _by_group(calls: Sequence[RankCalls]) -> _Members:
    """Calls of every group of which at least two ranks are given."""
    named_keys = {
        key for rank_calls in calls for key in rank_calls.groups if key != NO_KEY and _size(key) != 1
    }
    # Calls without metadata belong to the only named group, if there is just one.
    default = next(iter(named_keys)) if len(named_keys) == 1 else NO_KEY
    groups: _Members = {}
    for row, rank_calls in enumerate(calls):
        is_between = between_ranks(rank_calls)
        places_by_key: dict[GroupKey, list[Ints]] = defaultdict(list)
        for place, key in enumerate(rank_calls.groups):
            places = np.flatnonzero(is_between & (rank_calls.group == place))
            if len(places):
                places_by_key[default if key == NO_KEY else key].append(places)
        for key, parts in places_by_key.items():
            rows, members = groups.setdefault(key, ([], []))
            rows.append(row)
            members.append(np.sort(np.concatenate(parts)))
    return {key: group for key, group in groups.items() if len(group[0]) > 1}


def between_ranks(calls: RankCalls) -> Flags:
    """Mask of collectives in which several ranks take part; no point to point."""
    is_shared: Flags = np.array([_size(key) != 1 for key in calls.groups], dtype=bool)[calls.group]
    return calls.of_kinds(lambda kind: kind[0] not in POINT_TO_POINT) & is_shared


def _size(key: GroupKey) -> int | None:
    return None if key.ranks is None else len(key.ranks)


def _order(item: tuple[GroupKey, object]) -> tuple[tuple[int, ...], str]:
    return item[0].ranks or (), item[0].name or ""


def _match_group(
    key: GroupKey,
    rows: list[int],
    members: list[Ints],
    ranks: Sequence[int],
    calls: Sequence[RankCalls],
    notes: list[str],
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
            open_ranks.append(ranks[rows[column]])
    if open_ranks:
        notes.append(
            f"rank{'s' if len(open_ranks) > 1 else ''} {', '.join(map(str, open_ranks[:MAX_NAMED]))}"
            f"{', ...' if len(open_ranks) > MAX_NAMED else ''}: collectives align with those of rank"
            f" {ranks[rows[longest]]} in more than one way: left unmatched"
        )
    present = {ranks[row] for row in rows}
    is_whole = key.ranks is None or set(key.ranks) <= present
    is_rooted, size_bytes = _kinds(call, rows, calls)
    return MatchedGroup(key, tuple(rows), call, is_whole, is_rooted, size_bytes)


def _kinds(call: NDArray[np.int32], rows: Sequence[int], calls: Sequence[RankCalls]) -> tuple[Flags, Ints]:
    """Mask of rooted collectives, and the largest known size of each; any member may tell."""
    is_rooted, largest = np.zeros(len(call), dtype=bool), np.full(len(call), UNKNOWN_SIZE, dtype=np.int64)
    for column, row in enumerate(rows):
        present = np.flatnonzero(call[:, column] >= 0)
        places = call[present, column]
        largest[present] = np.maximum(largest[present], _sizes(calls[row])[places])
        is_rooted[present] |= calls[row].of_kinds(lambda kind: kind[0] in ROOTED)[places]
    return is_rooted, largest


def _sequence(calls: RankCalls, places: Ints, ops: dict[str, int]) -> CallSequence:
    """Calls of a rank as a sequence. ops: numbers of operations, shared by all ranks."""
    is_uneven = calls.of_kinds(lambda kind: kind[0] in UNEVEN)
    return CallSequence(
        op=_op_codes(calls, ops)[places],
        size=np.where(is_uneven, UNKNOWN_SIZE, _sizes(calls))[places],
        end_ns=calls.end_ns[places],
        is_loose=calls.of_kinds(lambda kind: kind[0] in ROOTED)[places],
    )
