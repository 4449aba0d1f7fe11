"""The collectives of a run by kind: how many in every step, how long they took and waited."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.calls import (
    Floats,
    Ints,
    few_sizes,
    operations_of_many_sizes,
    shared_kind,
)
from aorta.account.load.rank.columns import CollectiveKey
from aorta.account.load.waits import MatchedRanks
from aorta.account.model import CollectiveKind
from aorta.timeline.waits import Waits


def collectives(
    of_ranks: Sequence[dict[CollectiveKey, tuple[Floats, Floats]]],
    has_collectives: NDArray[np.bool_],
    matched: MatchedRanks | None,
) -> list[CollectiveKind]:
    """The kinds that any rank issued, over the steps whose collectives all ranks kept.

    of_ranks: per rank and kind, the number of collectives and their time in these steps.
    """
    detailed = np.flatnonzero(has_collectives)
    if len(detailed) == 0:
        return []
    keys = dict.fromkeys(key for kinds in of_ranks for key in kinds)
    many = operations_of_many_sizes(keys)
    shape = (len(of_ranks), len(detailed))
    kinds_by_key = {
        key: _no_collectives(key, shape) for key in dict.fromkeys(shared_kind(key, many) for key in keys)
    }
    place = np.full(len(has_collectives), -1, dtype=np.int64)
    place[detailed] = np.arange(len(detailed))
    for i, of_rank in enumerate(of_ranks):
        sums: dict[CollectiveKey, list[tuple[Floats, Floats]]] = {}
        for key, parts_of_kind in of_rank.items():
            sums.setdefault(shared_kind(key, many), []).append(parts_of_kind)
        for key, parts in sums.items():
            num, sum_ms = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
            kinds_by_key[key].count[i] = num
            kinds_by_key[key].duration_ms[i] = _means(sum_ms, num)
    pairs = () if matched is None else zip(matched.calls, matched.waits, strict=True)
    for i, (of_calls, of_waits) in enumerate(pairs):
        members: dict[CollectiveKey, list[int]] = {}
        for key, places in few_sizes(of_calls.kinds).items():
            members.setdefault(shared_kind(key, many), []).extend(places)
        kinds = [(kinds_by_key[key], np.isin(of_calls.kind, places)) for key, places in members.items()]
        column = np.where(of_calls.row >= 0, place[of_calls.row], -1)
        add_waits_of_kinds(kinds, i, column, of_waits)
    return list(kinds_by_key.values())


def _no_collectives(key: CollectiveKey, shape: tuple[int, int]) -> CollectiveKind:
    op, size, dtype, num_ranks, stream = key
    return CollectiveKind(
        op=op,
        bytes=size if size >= 0 else None,
        dtype=dtype,
        num_ranks=num_ranks or None,
        stream=stream,
        count=np.full(shape, np.nan),
        duration_ms=np.full(shape, np.nan),
        wait_ms=np.full(shape, np.nan),
        transfer_ms=np.full(shape, np.nan),
    )


def _means(sums: Floats, num: Floats) -> Floats:
    """NaN of none."""
    means = np.full(num.shape, np.nan)
    np.divide(sums, num, out=means, where=num > 0)
    return means


def add_waits_of_kinds(
    kinds: Iterable[tuple[CollectiveKind, NDArray[np.bool_]]], row: int, column: Ints, waits: Waits
) -> None:
    """Writes into each kind the mean wait and transfer of a rank's collectives of it, in every step.

    kinds: each with the calls that belong to it. row: of the rank. column: the step of the kinds' arrays that
    issued each call, -1 for none of them.
    """
    for kind, belongs in kinds:
        chosen = belongs & (column >= 0)
        num = np.bincount(column[chosen], minlength=kind.wait_ms.shape[1])
        for by_step, values in ((kind.wait_ms, waits.wait_ms), (kind.transfer_ms, waits.transfer_ms)):
            total = np.bincount(column[chosen], weights=values[chosen], minlength=kind.wait_ms.shape[1])
            by_step[row, num > 0] = total[num > 0] / num[num > 0]
