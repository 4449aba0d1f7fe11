"""What the steps of one rank hold: a column per metric, a row per step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.matching import CollectiveKey, RankCalls
from aorta.timeline.types import Source

IMPOSSIBLE = "impossible, and left out"
"""Why steps are missing; a note has named the first."""
OF_RUN = ("start_unix_ns", "num_collectives", "host_bound")
"""Numbers of a step that are fields of a Run; the others are its metrics."""


@dataclass(slots=True)
class RankSteps:
    """The steps that one rank did, by one source, in order."""

    global_step: Ints
    attempt: Ints
    """Which of the times that the step was done counts: the last one."""
    rollbacks: Ints
    world_size: Ints
    repeated: dict[int, list[tuple[int, int]]]
    """Global steps that were done before: attempt and rollbacks of those times."""
    gaps: list[tuple[int, str]]
    """Global step, and why it does not follow the one before it in the file."""
    has_details: Flags
    has_collectives: Flags
    """Collectives were kept: with their times, or noted alone in a step that was not timed."""
    has_exposed: Flags
    """It is known where communication was exposed: by segments, or by stretches alone."""
    overlaps_next: Flags
    """The window reaches into that of the row below."""
    collectives: dict[CollectiveKey, tuple[Floats, Floats]]
    """Per kind, in the steps of has_collectives: how many, and the sum of their durations in ms."""
    calls: RankCalls | None
    """None where ranks are not to be matched."""
    not_measured: dict[str, str]
    """The first reason of each name."""
    numbers: dict[str, NDArray[Any]]
    """By metric, and OF_RUN: a number per step. Empty once the arrays of the run have them."""

    @property
    def num_calls(self) -> int:
        return 0 if self.calls is None else len(self.calls.row)

    @property
    def passes(self) -> dict[int, tuple[int, int]]:
        """Attempt and rollbacks of the time that counts, by global step."""
        of_step = zip(self.attempt.tolist(), self.rollbacks.tolist(), strict=True)
        return dict(zip(self.global_step.tolist(), of_step, strict=True))

    def num_overlapping(self, rows: NDArray[np.intp]) -> int:
        """Windows of these rows, in order, that reach into the next one of them."""
        return int(np.count_nonzero(self.overlaps_next[rows[:-1]] & (np.diff(rows) == 1)))

    def kinds_in(self, rows: NDArray[np.intp]) -> dict[CollectiveKey, tuple[Floats, Floats]]:
        """As collectives, of these rows, all of which kept theirs."""
        kept = (np.cumsum(self.has_collectives) - 1)[rows]
        return {key: (num[kept], sum_ms[kept]) for key, (num, sum_ms) in self.collectives.items()}

    def calls_in(self, rows: NDArray[np.intp]) -> RankCalls | None:
        """The calls, whose rows are places in these, -1 for those of other steps."""
        if self.calls is None:
            return None
        column = np.full(len(self.global_step), -1, dtype=np.int32)
        column[rows] = np.arange(len(rows), dtype=np.int32)
        return self.calls.placed(column)

    def chosen(self, rows: Flags, reason: str) -> "RankSteps":
        """The steps of these rows. reason: why the others are missing, noted where the steps go on."""
        place = np.where(rows, np.cumsum(rows) - 1, -1).astype(np.int32)
        after_others = self.global_step[1:][rows[1:] & ~rows[:-1]].tolist()
        kept = rows[self.has_collectives]
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in _BY_STEP},
            gaps=[*self.gaps, *((step, reason) for step in after_others)],
            collectives={key: (a[kept], b[kept]) for key, (a, b) in self.collectives.items()},
            calls=None if self.calls is None else self.calls.moved(place),
            numbers={name: values[rows] for name, values in self.numbers.items()},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as small as it is: columns of one value, as most are, stay so."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "numbers"}
        by_step = {name: packed(values.pop(name)) for name in _BY_STEP}
        return _unpacked, (values, by_step, {name: packed(column) for name, column in self.numbers.items()})


_BY_STEP = (
    "global_step", "attempt", "rollbacks", "world_size", "has_details", "has_collectives", "has_exposed",
    "overlaps_next",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OneValue:
    """A column of one value, and its length."""

    value: NDArray[Any]
    num: int


def packed(column: NDArray[Any]) -> NDArray[Any] | _OneValue:
    if not len(column):
        return column
    is_nan = bool(column[0] != column[0])
    is_constant = bool(np.isnan(column).all() if is_nan else (column == column[0]).all())
    return _OneValue(column[:1].copy(), len(column)) if is_constant else column


def unpacked(column: Any) -> Any:
    """What was packed; a column of one value is read only."""
    return np.broadcast_to(column.value, (column.num,)) if isinstance(column, _OneValue) else column


def _unpacked(values: dict[str, Any], *packed_columns: dict[str, Any]) -> RankSteps:
    by_step, numbers = ({name: unpacked(of) for name, of in columns.items()} for columns in packed_columns)
    return RankSteps(**values, **by_step, numbers=numbers)


@dataclass(slots=True)
class RankFile:
    """What the file of a rank holds."""

    path: Path
    rank: int
    world_size: int
    sources: Mapping[Source, RankSteps]
    run_id: str | None = None
    notes: list[str] = field(default_factory=list)
    left_out: list[str] | None = None
    """What is damaged, and was left out; None where it would have been refused."""
