"""The ranks of a run side by side, by one source: one rank's numbers in memory at a time.

What stays is a row of every metric, and the collectives of the steps that kept them, until ranks are matched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.arrays import ArrayFile, Arrays
from aorta.account.load.rank.calls import RecordedCalls
from aorta.account.load.rank.columns import CollectiveKey, Floats, RankColumns, SourceColumns
from aorta.account.load.rank.host import PREFIX as HOST
from aorta.account.metrics import METRICS

Flags = NDArray[np.bool_]


@dataclass(slots=True)
class Sides:
    """Columns are the steps that every rank did."""

    metrics: Arrays
    host_parts: Arrays
    integers: Arrays
    """start_unix_ns and num_collectives."""
    flags: Arrays
    """host_bound: 1, 0, or NaN where it is not known."""
    has_details: Flags
    """[step]: every rank kept segments and collectives."""
    has_collectives: Flags
    """[step]: every rank kept its collectives."""
    collectives_kept: Flags
    """[rank, step]"""
    knows_waits: Flags
    """[rank, step]: collectives were kept, and where they were exposed."""
    kinds: list[dict[CollectiveKey, tuple[Floats, Floats]]]
    """Per rank and kind, the number of collectives and their time in the steps of has_collectives."""
    calls: list[RecordedCalls] | None
    """Per rank; rows are columns of the run, -1 for steps that it leaves out. None where ranks are not to be
    matched."""
    not_measured: dict[str, str]
    """The reason of the first rank that has one."""
    num_overlapping: int
    """Windows that reach into the next one."""


def side_by_side(
    per_rank: Sequence[SourceColumns], steps: NDArray[np.int64], file: ArrayFile | None, matches: bool
) -> Sides:
    """steps: those that every rank did. file: keeps the arrays. matches: collectives are kept."""
    shape = (len(per_rank), len(steps))
    has_collectives = _kept_by_all(per_rank, steps)
    sides = Sides(
        metrics=Arrays(shape, file),
        host_parts=Arrays(shape, file),
        integers=Arrays(shape, file, np.int64),
        flags=Arrays(shape, file),
        has_details=np.ones(len(steps), dtype=bool),
        has_collectives=has_collectives,
        collectives_kept=np.zeros(shape, dtype=bool),
        knows_waits=np.zeros(shape, dtype=bool),
        kinds=[],
        calls=[] if matches else None,
        not_measured={},
        num_overlapping=0,
    )
    measured: set[str] = set()
    for i, of_source in enumerate(per_rank):
        columns = of_source.load()
        rows = np.searchsorted(columns.global_step, steps)
        measured |= columns.metrics.keys()
        _set_rows(sides, i, columns, rows)
    in_order = [*METRICS, *sorted(measured - set(METRICS))]
    sides.metrics.reorder([name for name in in_order if not name.startswith(HOST)])
    sides.host_parts.reorder([name for name in in_order if name.startswith(HOST)])
    return sides


def _kept_by_all(per_rank: Sequence[SourceColumns], steps: NDArray[np.int64]) -> Flags:
    kept = np.ones(len(steps), dtype=bool)
    for columns in per_rank:
        kept &= columns.has_collectives[np.searchsorted(columns.global_step, steps)]
    return kept


def _set_rows(sides: Sides, i: int, columns: RankColumns, rows: NDArray[np.intp]) -> None:
    sides.num_overlapping += _num_overlaps(columns, rows)
    for name, values in columns.metrics.items():
        (sides.host_parts if name.startswith(HOST) else sides.metrics).set_row(name, i, values[rows])
    sides.integers.set_row("start_unix_ns", i, columns.start_ns[rows])
    sides.integers.set_row("num_collectives", i, columns.num_collectives[rows])
    sides.flags.set_row("host_bound", i, columns.host_bound[rows])
    sides.has_details &= columns.has_details[rows]
    sides.collectives_kept[i] = columns.has_collectives[rows]
    sides.knows_waits[i] = columns.has_collectives[rows] & columns.has_exposed[rows]
    chosen = rows[sides.has_collectives]
    sides.kinds.append(
        {key: (num[chosen], sum_ms[chosen]) for key, (num, sum_ms) in columns.collectives.items()}
    )
    if columns.calls is None:
        sides.calls = None
    if sides.calls is not None and columns.calls is not None:
        column = np.full(len(columns.global_step), -1, dtype=np.int32)
        column[rows] = np.arange(len(rows), dtype=np.int32)
        sides.calls.append(replace(columns.calls, row=column[columns.calls.row]))
    for name, reason in columns.not_measured.items():
        sides.not_measured.setdefault(name, reason)


def _num_overlaps(columns: RankColumns, rows: NDArray[np.intp]) -> int:
    rows_before, next_rows = rows[:-1], rows[1:]
    limit = columns.start_ns[next_rows] + columns.tolerance_ns[rows_before]
    return int(np.count_nonzero(columns.end_ns[rows_before] > limit))
