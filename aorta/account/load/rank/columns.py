"""The numbers of one rank: a column per metric, a row per step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.calls import Kind, RecordedCalls
from aorta.records.schema import Source

Floats = NDArray[np.float64]
IMPOSSIBLE = "impossible, and left out"
"""Why steps are missing; a note has named the first."""


@dataclass(slots=True)
class RankColumns:
    """The numbers of one rank by one source, a column per metric, one row per step in order of steps."""

    global_step: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: Floats
    tolerance_ns: Floats
    metrics: dict[str, Floats]
    num_collectives: NDArray[np.int64]
    host_bound: Floats
    has_details: NDArray[np.bool_]
    has_collectives: NDArray[np.bool_]
    """Collectives were kept: with their times, or noted alone in a step that was not timed."""
    has_exposed: NDArray[np.bool_]
    """It is known where communication was exposed: by segments, or by stretches alone."""
    collectives: dict["CollectiveKey", tuple[Floats, Floats]]
    """Per kind and step: how many, and the sum of their durations in ms."""
    calls: RecordedCalls | None
    """None where ranks are not to be matched."""
    not_measured: dict[str, str]
    """The first reason of each name."""
    passes: "Passes"
    """When each step was done, of a run that did some twice."""

    @property
    def num_calls(self) -> int:
        return 0 if self.calls is None else len(self.calls.row)

    def load(self) -> "RankColumns":
        """Itself: the numbers are in memory."""
        return self

    def sharing(self, other: "SourceColumns | None") -> "RankColumns":
        """Itself."""
        return self


class SourceColumns(Protocol):
    """What a rank did by one source: its steps, and its numbers when they are asked for."""

    @property
    def global_step(self) -> NDArray[np.int64]: ...

    @property
    def passes(self) -> "Passes": ...

    @property
    def has_collectives(self) -> NDArray[np.bool_]: ...

    @property
    def num_calls(self) -> int: ...

    def load(self) -> RankColumns: ...

    def sharing(self, other: "SourceColumns | None") -> "SourceColumns": ...


@dataclass(slots=True)
class Passes:
    """Per step: which of the times that it was done counts, which is the last."""

    attempt: NDArray[np.int64]
    rollbacks: NDArray[np.int64]
    world_size: NDArray[np.int64]
    repeated: dict[int, list[tuple[int, int]]]
    """Global steps that were done before: attempt and rollbacks of those times."""
    gaps: list[tuple[int, str]]
    """Global step, and why it does not follow the one before it in the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels to another process as small as it is: columns of one value, as most are, stay so."""
        columns = [packed(column) for column in (self.attempt, self.rollbacks, self.world_size)]
        return _passes, (columns, self.repeated, self.gaps)


def packed(column: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """A column of one value, as many are, as that value, and its length."""
    if not len(column):
        return column, 0
    is_nan = bool(column[0] != column[0])
    is_constant = bool(np.isnan(column).all() if is_nan else (column == column[0]).all())
    return (column[:1].copy() if is_constant else column), len(column)


def unpacked(column: NDArray[Any], num: int) -> NDArray[Any]:
    """The column that was packed; of one value it is read only."""
    return np.broadcast_to(column, (num,)) if len(column) != num else column


def _passes(
    columns: list[tuple[NDArray[np.int64], int]],
    repeated: dict[int, list[tuple[int, int]]],
    gaps: list[tuple[int, str]],
) -> Passes:
    attempt, rollbacks, world_size = (unpacked(column, num) for column, num in columns)
    return Passes(attempt, rollbacks, world_size, repeated, gaps)


CollectiveKey = Kind
"""num_ranks is 0 where it is not known."""


@dataclass(slots=True)
class RankFile:
    """Numbers of the file of a rank."""

    path: Path
    rank: int
    world_size: int
    columns: Mapping[Source, SourceColumns]
    run_id: str | None = None
    notes: list[str] = field(default_factory=list)
    left_out: list[str] | None = None
    """What is damaged, and was left out; None where it would have been refused."""

    def sharing(self, ranks: Sequence["RankFile"]) -> "RankFile":
        """The same with the steps of the last of the ranks where they are alike: as a rule all ranks did the
        same ones."""
        if not ranks:
            return self
        shared = ranks[-1].columns
        columns = {source: part.sharing(shared.get(source)) for source, part in self.columns.items()}
        return replace(self, columns=columns)


def chosen_passes(passes: Passes, rows: NDArray[np.bool_], steps: NDArray[np.int64], reason: str) -> Passes:
    """With the reason why steps are missing before a row that is chosen and follows one that is not."""
    after_others = steps[1:][rows[1:] & ~rows[:-1]].tolist()
    return replace(
        passes,
        attempt=passes.attempt[rows],
        rollbacks=passes.rollbacks[rows],
        world_size=passes.world_size[rows],
        gaps=[*passes.gaps, *((step, reason) for step in after_others)],
    )


def chosen_rows(columns: RankColumns, rows: NDArray[np.bool_], reason: str) -> RankColumns:
    """The steps of these rows. reason: why the others are missing."""
    place = np.where(rows, np.cumsum(rows) - 1, -1).astype(np.int32)
    return replace(
        columns,
        global_step=columns.global_step[rows],
        start_ns=columns.start_ns[rows],
        end_ns=columns.end_ns[rows],
        tolerance_ns=columns.tolerance_ns[rows],
        metrics={name: values[rows] for name, values in columns.metrics.items()},
        num_collectives=columns.num_collectives[rows],
        host_bound=columns.host_bound[rows],
        has_details=columns.has_details[rows],
        has_collectives=columns.has_collectives[rows],
        has_exposed=columns.has_exposed[rows],
        collectives={key: (a[rows], b[rows]) for key, (a, b) in columns.collectives.items()},
        calls=None if columns.calls is None else columns.calls.moved(place),
        passes=chosen_passes(columns.passes, rows, columns.global_step, reason),
    )
