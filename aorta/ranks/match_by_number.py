"""Collectives matched across ranks by their number in their group.

Ranks of one run that recorded themselves number the collectives of a group alike, so that matching needs no
search. Recordings that begin at different collectives are matched by order (match_by_order.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.ranks.groups import Ints, MatchedGroup
from aorta.timeline.collective import GroupKey


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


def match_by_number(ranks: Sequence[int], calls: Sequence[NumberedCalls]) -> list[MatchedGroup]:
    """The groups all of whose ranks are given, with the collectives that every member has."""
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
    codes: dict[str, int] = {}
    ops = []
    for column, calls in enumerate(members):
        code_of_kind = np.array([codes.setdefault(op, len(codes)) for op in calls.ops])
        ops.append(code_of_kind[calls.kind[index[:, column]]])
    is_same: NDArray[np.bool_] = np.ptp(np.stack(ops, axis=1), axis=1) == 0
    return is_same
