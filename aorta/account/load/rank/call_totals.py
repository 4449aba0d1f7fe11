"""Sums over the collectives of a rank: per step and operation, and per step and kind."""

from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.calls import ANY_SIZE, Floats, Ints, Kind, RecordedCalls
from aorta.account.load.rank.columns import CollectiveKey
from aorta.timeline.collective import busbw_factor

MAX_SIZES = 24
"""Kinds of one operation above which sizes share a row."""

_factor = cache(busbw_factor)


def totals_by_op(calls: RecordedCalls, duration_ms: Floats, num_rows: int) -> dict[str, dict[str, Floats]]:
    """Per operation count, bytes, duration_ms and busbw_gb_s of every step; NaN for steps without it.

    What carries no bytes, as a barrier, has no bandwidth."""
    totals = {}
    size = np.array([kind[1] if kind[1] != ANY_SIZE else np.nan for kind in calls.kinds], dtype=np.float64)
    moved = size * [_factor(kind[0], max(kind[3], 1)) for kind in calls.kinds]
    for op in dict.fromkeys(kind[0] for kind in calls.kinds):
        of_op = np.array([kind[0] == op for kind in calls.kinds])[calls.kind]
        rows, kind = calls.row[of_op], calls.kind[of_op]
        count = np.bincount(rows, minlength=num_rows)

        def total(weights: Floats, rows: NDArray[np.int32] = rows, count: Ints = count) -> Floats:
            return np.where(count == 0, np.nan, np.bincount(rows, weights=weights, minlength=num_rows))

        took_ms, sent, size_bytes = total(duration_ms[of_op]), total(moved[kind]), total(size[kind])
        totals[op] = {
            "count": np.where(count == 0, np.nan, count),
            "bytes": size_bytes,
            "duration_ms": took_ms,
            "busbw_gb_s": np.divide(
                sent / 1e6, took_ms, out=np.full(num_rows, np.nan), where=(took_ms > 0) & (size_bytes > 0)
            ),
        }
    return totals


def totals_by_kind(
    calls: RecordedCalls, values: Floats, kinds: dict[Kind, list[int]], num_rows: int
) -> dict[Kind, tuple[Floats, Floats]]:
    """Number of calls in every step and the sum of their values. kinds: the members of each, by index."""
    totals = {}
    for kind, members in kinds.items():
        chosen = np.isin(calls.kind, members)
        rows = calls.row[chosen]
        totals[kind] = (
            np.bincount(rows, minlength=num_rows).astype(np.float64),
            np.bincount(rows, weights=values[chosen], minlength=num_rows).astype(np.float64),
        )
    return totals


def few_sizes(kinds: list[CollectiveKey]) -> dict[CollectiveKey, list[int]]:
    """Kinds that share a row, by index: the sizes of an operation where there are more than MAX_SIZES."""
    many = operations_of_many_sizes(kinds)
    result: dict[CollectiveKey, list[int]] = {}
    for i, key in enumerate(kinds):
        result.setdefault(shared_kind(key, many), []).append(i)
    return result


def operations_of_many_sizes(kinds: Iterable[CollectiveKey]) -> set[str]:
    """Operations of which there are more than MAX_SIZES kinds."""
    return {op for op, num in Counter(kind[0] for kind in kinds).items() if num > MAX_SIZES}


def shared_kind(key: CollectiveKey, many: set[str]) -> CollectiveKey:
    """The kind that it is counted under: sizes of the operations in many are one."""
    return (key[0], ANY_SIZE, *key[2:]) if key[0] in many else key
