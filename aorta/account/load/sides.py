"""The ranks of a run side by side, by one source: each rank's numbers are a row as soon as they are read.

What stays of a rank beside that is what is known of its steps, and its collectives, until ranks are matched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.arrays import MOST_IN_MEMORY, ArrayFile, Arrays
from aorta.account.load.rank.calls import RecordedCalls
from aorta.account.load.rank.columns import (
    CollectiveKey,
    Flags,
    Floats,
    RankColumns,
    RankFile,
    RankSteps,
)
from aorta.account.load.rank.host import PREFIX as HOST
from aorta.account.metrics import METRICS
from aorta.records.schema import Source


class RankRows:
    """Ranks in order, whose numbers become rows as they come."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks: list[RankFile] = []
        self.by_source: dict[Source, Rows] = {}
        self._num_ranks, self._file = num_ranks, ArrayFile()

    @classmethod
    def of(cls, ranks: Sequence[RankFile]) -> "RankRows":
        rows = cls(len(ranks))
        for rank in ranks:
            rows.add(rank)
        return rows

    def add(self, rank: RankFile) -> None:
        for source, columns in rank.columns.items():
            if source not in self.by_source:
                self.by_source[source] = Rows(self._num_ranks, self._file)
            self.by_source[source].add(len(self.ranks), columns)
        self.ranks.append(replace(rank, columns={}))


class Rows:
    """The rows by one source. Columns are the steps of the first rank: every rank did no others."""

    def __init__(self, num_ranks: int, file: ArrayFile) -> None:
        self._num_ranks, self._file = num_ranks, file
        self._steps: NDArray[np.int64] | None = None
        self._numbers: tuple[Arrays, Arrays] | None = None
        """Floats, and start_unix_ns and num_collectives."""

    def add(self, row: int, columns: RankColumns) -> None:
        """The row of a rank, whose steps then are the first rank's where they are alike."""
        of_rank = columns.steps
        if self._steps is None or self._numbers is None:
            self._steps = of_rank.global_step
            shape = (self._num_ranks, len(self._steps))
            file = self._file if shape[0] * shape[1] > MOST_IN_MEMORY else None
            self._numbers = Arrays(shape, file), Arrays(shape, file, np.int64)
        floats, integers = self._numbers
        if np.array_equal(of_rank.global_step, self._steps):
            of_rank.global_step = self._steps
            places: NDArray[np.intp] | slice = slice(None)
        else:
            places, _ = places_of(self._steps, of_rank)  # what the rank has not is chosen by nobody
        for name, values in (*columns.metrics.items(), (HOST_BOUND, columns.host_bound)):
            floats.set_row(name, row, values[places])
        integers.set_row("start_unix_ns", row, columns.start_ns[places])
        integers.set_row("num_collectives", row, columns.num_collectives[places])

    def sides(self, per_rank: Sequence[RankSteps], steps: NDArray[np.int64], matches: bool) -> "Sides":
        """The first ranks, as many as there are in per_rank, in these steps, which all of them did. matches:
        collectives are kept."""
        assert self._numbers is not None
        assert self._steps is not None
        columns = np.searchsorted(self._steps, steps)
        floats, integers = (arrays.chosen(len(per_rank), columns) for arrays in self._numbers)
        in_order = [*METRICS, *sorted(floats.keys() - {*METRICS, HOST_BOUND})]
        metrics, host_parts = floats.parted(
            [name for name in in_order if not name.startswith(HOST)],
            [name for name in in_order if name.startswith(HOST)],
        )
        places = [places_of(steps, of_rank)[0] for of_rank in per_rank]
        has_details, has_collectives = (
            np.array([getattr(of_rank, name)[place] for of_rank, place in zip(per_rank, places, strict=True)])
            for name in ("has_details", "has_collectives")
        )
        sides = Sides(
            metrics=metrics,
            host_parts=host_parts,
            integers=integers,
            host_bound=floats[HOST_BOUND],
            has_details=np.logical_and.reduce(has_details),
            has_collectives=np.logical_and.reduce(has_collectives),
            collectives_kept=has_collectives,
            knows_waits=np.zeros(has_collectives.shape, dtype=bool),
            kinds=[],
            calls=[] if matches and all(of_rank.calls is not None for of_rank in per_rank) else None,
            not_measured={},
            num_overlapping=0,
        )
        for i, (of_rank, place) in enumerate(zip(per_rank, places, strict=True)):
            sides.add(i, of_rank, place)
        return sides


HOST_BOUND = "host_bound"
"""1, 0, or NaN where it is not known."""


def places_of(steps: NDArray[np.int64], of_rank: RankSteps) -> tuple[NDArray[np.intp], Flags]:
    """The row of each step among a rank's, and whether the rank has it: else the row is another one's."""
    places = np.minimum(np.searchsorted(of_rank.global_step, steps), len(of_rank.global_step) - 1)
    return places, of_rank.global_step[places] == steps


@dataclass(slots=True)
class Sides:
    """Columns are the steps that every rank did."""

    metrics: Arrays
    host_parts: Arrays
    integers: Arrays
    """start_unix_ns and num_collectives."""
    host_bound: Floats
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

    def add(self, i: int, of_rank: RankSteps, rows: NDArray[np.intp]) -> None:
        """What is known of a rank's steps. rows: of each column."""
        self.num_overlapping += int(np.count_nonzero(of_rank.overlaps_next[rows[:-1]] & (np.diff(rows) == 1)))
        self.knows_waits[i] = self.collectives_kept[i] & of_rank.has_exposed[rows]
        kept = (np.cumsum(of_rank.has_collectives) - 1)[rows[self.has_collectives]]
        self.kinds.append(
            {key: (num[kept], sum_ms[kept]) for key, (num, sum_ms) in of_rank.collectives.items()}
        )
        if self.calls is not None and of_rank.calls is not None:
            column = np.full(len(of_rank.global_step), -1, dtype=np.int32)
            column[rows] = np.arange(len(rows), dtype=np.int32)
            self.calls.append(replace(of_rank.calls, row=column[of_rank.calls.row]))
        for name, reason in of_rank.not_measured.items():
            self.not_measured.setdefault(name, reason)
