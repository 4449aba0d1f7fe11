"""Columns of neighbouring lines, read back: the same numbers as those of a StepBlock, to the last digit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.columns.block import Block
from aorta.records.columns.flat import (
    DETAILS,
    KERNELS,
    NOT_MEASURED,
    NULL,
    RUN_LENGTHS,
    SPANS,
    THROTTLING,
    TOP,
    flat_columns,
)
from aorta.records.columns.number_block import (
    CallNumbers,
    Flags,
    Floats,
    HostSpans,
    Ints,
    LineKey,
    ListName,
    SegmentArrays,
    SegmentNumbers,
    StepDetails,
    TopKernels,
    segment_arrays,
)
from aorta.records.schema import HOST_KINDS, HostKind, Source, StepRecord

LISTS = (SPANS, RUN_LENGTHS, TOP)
TYPES: dict[str, np.dtype[Any]] = {
    "d": np.dtype("<f8"),
    "q": np.dtype("<i8"),
    "b": np.dtype("i1"),
    "i": np.dtype("<i4"),
}
_REASONS = msgspec.json.Decoder(dict[str, str])
_THROTTLING = msgspec.json.Decoder(list[str])


class Details(msgspec.Struct, gc=False):
    """The lists of a line, from the line itself: they are no columns."""

    collectives: list[CallNumbers] | None
    active_segments: list[SegmentNumbers] | None


@dataclass(frozen=True, slots=True)
class Part:
    """The columns of one block."""

    num_lines: int
    constants: dict[str, float | int | str]
    arrays: dict[str, NDArray[Any]]
    texts: dict[str, list[str]]
    details: dict[int, Details]
    """By row."""

    def __contains__(self, name: str) -> bool:
        return name in self.arrays or name in self.constants

    def column(self, name: str, null: float | int, dtype: Any) -> NDArray[Any]:
        """Its values, null where it has none."""
        column = self.arrays.get(name)
        if column is not None:
            return column
        value = self.constants.get(name)
        return np.full(self.num_values(name), null if value is None else value, dtype=dtype)

    def value(self, name: str, row: int) -> int:
        """Of a column of integers that every line has."""
        column = self.arrays.get(name)
        return int(self.constants[name] if column is None else column[row])

    def rows_with_details(self) -> list[int]:
        """Of lines that have lists which are no columns."""
        if all(name in self.constants and not self.constants[name] for name in DETAILS):
            return []
        columns = (self.column(name, -1, np.int8) == 1 for name in DETAILS)
        rows: list[int] = np.flatnonzero(np.logical_or(*columns)).tolist()
        return rows

    def num_values(self, name: str) -> int:
        """The length of a column."""
        of_list = _list_of(name)
        if of_list is None:
            return self.num_lines
        return int(np.maximum(self.column(f"{of_list}.num", -1, np.int64), 0).sum())


@lru_cache(4096)
def _list_of(name: str) -> str | None:
    """The list whose items have the column."""
    for of_list in LISTS:
        if name.startswith(f"{of_list}.") and name != f"{of_list}.num":
            return of_list
    return None


def part_of(block: Block, details: dict[int, Details]) -> Part:
    """ValueError where a column has not the length that it must have."""
    head = block.head
    arrays: dict[str, NDArray[Any]] = {
        name: np.frombuffer(data, dtype=TYPES[code]) for name, code, data in block.arrays()
    }
    part = Part(len(head.lines.sizes), head.constants, arrays, head.texts, details)
    for name, column in arrays.items():
        if len(column) != part.num_values(name):
            raise ValueError(name)
    return part


def part_of_records(records: Sequence[StepRecord]) -> Part:
    """The columns of records that were read as lines, without details. NotPlain as flat_columns."""
    flat = flat_columns(records)
    arrays: dict[str, NDArray[Any]] = {
        name: np.frombuffer(column, dtype=column.typecode) for name, column in flat.arrays.items()
    }
    return Part(flat.num_records, flat.constants, arrays, flat.texts, {})


class ColumnBlock:
    """Blocks that follow each other, at least one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._num_lines = sum(part.num_lines for part in parts)

    def __len__(self) -> int:
        return self._num_lines

    @property
    def first(self) -> LineKey:
        return self._key(0)

    @property
    def last(self) -> LineKey:
        return self._key(-1)

    def _key(self, row: int) -> LineKey:
        part = self.parts[row]
        names = ("rank", "attempt", "rollbacks", "global_step")
        rank, attempt, rollbacks, step = (part.value(name, row) for name in names)
        run_ids = ColumnBlock([part]).texts("run_id")
        return LineKey(rank, run_ids[row], attempt, rollbacks, step)

    @property
    def source(self) -> Source:
        return cast(Source, ColumnBlock(self.parts[:1]).texts("source")[0])

    @property
    def reasons(self) -> Sequence[dict[str, str]]:
        """In the order in which lines have them first: what repeats is left out."""
        places, table = self.places(NOT_MEASURED)
        _, firsts = np.unique(places, return_index=True)
        return [_REASONS.decode(table[places[first]]) for first in np.sort(firsts)]

    def __contains__(self, name: str) -> bool:
        return any(name in part for part in self.parts)

    def numbers(self, name: str) -> Floats | None:
        if name not in self:
            return None
        return np.concatenate([_as_floats(part, name) for part in self.parts])

    def integers(self, name: str) -> Ints:
        return np.concatenate([part.column(name, NULL, np.int64) for part in self.parts])

    def flags(self, name: str) -> NDArray[np.int8]:
        """1, 0, or -1 of a line that does not say."""
        return np.concatenate([part.column(name, -1, np.int8) for part in self.parts])

    def places(self, name: str) -> tuple[NDArray[np.int32], list[str]]:
        """Texts as places in a table, -1 of a line that has none."""
        table: dict[str, int] = {}
        columns = []
        for part in self.parts:
            if name not in part.arrays:
                text = part.constants.get(name)
                place = -1 if text is None else table.setdefault(str(text), len(table))
                columns.append(np.full(part.num_values(name), place, dtype=np.int32))
                continue
            moved = [table.setdefault(text, len(table)) for text in part.texts[name]]
            columns.append(np.array([*moved, -1], dtype=np.int32)[part.arrays[name]])
        return np.concatenate(columns), list(table)

    def texts(self, name: str) -> list[str | None]:
        places, table = self.places(name)
        values = [*table, None]
        return [values[place] for place in places.tolist()]

    def gaps(self) -> Iterator[tuple[int, str]]:
        if "gap" in self:
            steps = self.integers("global_step").tolist()
            for step, gap in zip(steps, self.texts("gap"), strict=True):
                if gap is not None:
                    yield step, gap

    def has(self, name: ListName) -> Flags:
        match name:
            case "kernels":
                return ~_are_null(self.integers(f"{KERNELS}.num_kernels"))
            case "host_spans" | "exposed_run_lengths_ns":
                return np.greater_equal(self.integers(f"{name}.num"), 0)
        return np.equal(self.flags(name), 1)

    def operations(self) -> Iterable[str]:
        return self.keys("exposed_by_op")

    def keys(self, name: str) -> list[str]:
        """Of columns <name>.<key>."""
        names = (column for part in self.parts for column in (*part.constants, *part.arrays))
        return [
            column.removeprefix(f"{name}.")
            for column in dict.fromkeys(names)
            if column.startswith(f"{name}.")
        ]

    def throttling(self) -> Sequence[Sequence[str] | None]:
        if THROTTLING not in self:
            return [None] * len(self)
        places, table = self.places(THROTTLING)
        lists = [*map(_THROTTLING.decode, table), None]
        return [lists[place] for place in places.tolist()]

    def kernel_class(self, name: str) -> tuple[Floats, Floats]:
        rows = self.has("kernels")
        columns = (self.numbers(f"{column}.{name}") for column in ("kernel_ms", "kernel_count"))
        times_ms, counts = (
            np.zeros(int(rows.sum())) if column is None else np.nan_to_num(column[rows], nan=0.0)
            for column in columns
        )
        return times_ms, counts

    def _items(self, name: str) -> tuple[Ints, Ints]:
        """The row of each item of a list, and the number of items of each row."""
        nums = np.maximum(self.integers(f"{name}.num"), 0)
        return np.repeat(np.arange(len(self)), nums), nums

    def top_kernels(self) -> TopKernels:
        row, _ = self._items(TOP)
        count = self.integers(f"{TOP}.count")
        num_kernels = self.integers(f"{KERNELS}.num_kernels")
        listed = np.zeros(len(self), dtype=np.int64)
        np.add.at(listed, row, count)
        is_complete = listed == num_kernels
        times_ms = self.numbers(f"{TOP}.ms")
        return TopKernels(
            row,
            self.integers(f"{TOP}.name"),
            np.empty(0) if times_ms is None else times_ms,
            count,
            is_complete[num_kernels != NULL],
        )

    def host_spans(self) -> HostSpans:
        row, _ = self._items(SPANS)
        if not len(row):
            return HostSpans(row, row, np.empty(0), np.empty(0), {})
        places, table = self.places(f"{SPANS}.kind")
        kind = np.array([HOST_KINDS.index(cast(HostKind, text)) for text in table])[places]
        start_ms, end_ms = self.numbers(f"{SPANS}.start_ms"), self.numbers(f"{SPANS}.end_ms")
        assert start_ms is not None
        assert end_ms is not None
        num_bytes = self.integers(f"{SPANS}.bytes")
        chosen = (kind == HOST_KINDS.index("optimizer")) & (num_bytes != NULL)
        sums: dict[int, int] = {}
        for place, size in zip(row[chosen].tolist(), num_bytes[chosen].tolist(), strict=True):
            sums[place] = sums.get(place, 0) + size
        return HostSpans(row, kind, start_ms, end_ms, sums)

    @cached_property
    def segments(self) -> SegmentArrays:
        return segment_arrays(
            (first + row, lists.active_segments)
            for first, part in self._places()
            for row, lists in sorted(part.details.items())
        )

    def details(self) -> Iterator[tuple[int, StepDetails]]:
        lists = {first + row: lists for first, part in self._places() for row, lists in part.details.items()}
        nums = np.maximum(self.integers(f"{RUN_LENGTHS}.num"), 0)
        ends = np.cumsum(nums)
        rows = sorted(set(np.flatnonzero(nums).tolist()).union(lists))
        if not rows:
            return
        run_lengths = self.integers(f"{RUN_LENGTHS}.ns").tolist()
        sources = self.texts("source")
        steps, attempts, starts = (
            self.integers(name)[rows].tolist() for name in ("global_step", "attempt", "start_unix_ns")
        )
        for row, step, attempt, start_ns in zip(rows, steps, attempts, starts, strict=True):
            of_row = lists.get(row, _NO_DETAILS)
            lengths = run_lengths[ends[row] - nums[row] : ends[row]]
            if of_row.collectives or of_row.active_segments or lengths:
                key = (cast(Source, sources[row]), step, attempt, start_ns)
                # Stretches count only of a line that has no segments, which is not the same as none of them.
                yield row, StepDetails(*key, of_row.collectives, of_row.active_segments, lengths)

    def _places(self) -> Iterator[tuple[int, Part]]:
        """Each part behind the row of its first line."""
        first = 0
        for part in self.parts:
            yield first, part
            first += part.num_lines

    def distinct(self, *names: str) -> Iterable[tuple[int, ...]]:
        columns = [
            [int(self.parts[0].constants[name])] if self.is_constant(name) else self.integers(name).tolist()
            for name in names
        ]
        num = max(map(len, columns))
        return dict.fromkeys(
            zip(*(column * num if len(column) < num else column for column in columns), strict=True)
        )

    def is_constant(self, name: str) -> bool:
        """Returns True where all lines are known to have the same value."""
        value = self.parts[0].constants.get(name)
        return value is not None and all(part.constants.get(name) == value for part in self.parts)

    def sources(self) -> Iterable[Source]:
        return cast(list[Source], [text for text in dict.fromkeys(self.texts("source"))])

    def of_source(self, source: Source) -> "ColumnBlock":
        places, table = self.places("source")
        return self if len(table) == 1 else self.chosen(places == table.index(source))

    def chosen(self, rows: Flags) -> "ColumnBlock":
        """Those lines alone, at least one."""
        chosen, first = [], 0
        for first, part in self._places():
            of_part = rows[first : first + part.num_lines]
            if of_part.all():
                chosen.append(part)
            elif of_part.any():
                chosen.append(_chosen(part, of_part))
        return ColumnBlock(chosen)


_NO_DETAILS = Details(None, None)


def _as_floats(part: Part, name: str) -> Floats:
    column = part.column(name, np.nan, np.float64)
    return column if column.dtype.kind == "f" else np.where(_are_null(column), np.nan, column)


def _are_null(column: NDArray[Any]) -> Flags:
    if column.dtype.kind == "f":
        are_null: Flags = np.isnan(column)
    else:
        are_null = np.equal(column, NULL if column.dtype.itemsize == 8 else -1)
    return are_null


def _chosen(part: Part, rows: Flags) -> Part:
    arrays = {}
    for name, column in part.arrays.items():
        of_list = _list_of(name)
        if of_list is None:
            if not _are_null(column[rows]).all():  # as if the block had been written without the others
                arrays[name] = column[rows]
        else:
            nums = np.maximum(part.column(f"{of_list}.num", -1, np.int64), 0)
            arrays[name] = column[np.repeat(rows, nums)]
    place = np.cumsum(rows) - 1
    details = {int(place[row]): lists for row, lists in part.details.items() if rows[row]}
    return replace(part, num_lines=int(rows.sum()), arrays=arrays, details=details)
