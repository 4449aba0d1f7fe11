"""Neighbouring lines of a record file as columns of the fields that statistics are made of."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.columns.number_block import (
    CallNumbers,
    HostSpans,
    LineKey,
    ListName,
    SegmentArrays,
    SegmentNumbers,
    StepDetails,
    TopKernels,
    segment_arrays,
)
from aorta.records.schema import (
    HOST_KINDS,
    DeviceRecord,
    HostSpan,
    HostUse,
    KernelSums,
    MemoryRecord,
    OverlapRecord,
    Source,
    StepRecord,
)

FIELDS = (
    "schema", "rank", "world_size", "run_id", "attempt", "rollbacks", "epoch", "step", "global_step",
    "tokens", "source", "start_unix_ns", "clock_error_us", "step_ms", "between_steps_ms", "host_ms",
    "num_collectives", "gap", "overlap", "active_segments", "collectives", "exposed_run_lengths_ns",
    "kernels", "memory", "device", "host_spans", "host_use", "not_measured",
)  # fmt: skip
FLOAT_FIELDS = ("step_ms", "between_steps_ms", "host_ms", "clock_error_us")


class StepNumbers(msgspec.Struct, kw_only=True, gc=False):
    """The fields of a StepRecord that statistics use, with the number of its line."""

    schema: int
    rank: int
    world_size: int
    epoch: int
    step: int
    global_step: int
    tokens: int | None
    source: Source
    start_unix_ns: int
    clock_error_us: float | None
    step_ms: float | None
    between_steps_ms: float | None
    host_ms: float | None
    overlap: OverlapRecord
    active_segments: list[SegmentNumbers] | None
    collectives: list[CallNumbers] | None
    num_collectives: int
    exposed_run_lengths_ns: list[int] | None = None
    kernels: KernelSums | None = None
    memory: MemoryRecord | None = None
    device: DeviceRecord | None = None
    host_spans: list[HostSpan] | None = None
    host_use: HostUse | None = None
    run_id: str | None = None
    attempt: int = 0
    rollbacks: int = 0
    gap: str | None = None
    not_measured: msgspec.Raw = msgspec.Raw(b"{}")
    """As text: line after line has the same."""
    line: int


Numbers = StepRecord | StepNumbers
_REASONS = msgspec.json.Decoder(dict[str, str])


class StepBlock:
    """Neighbouring lines of one file, at least one."""

    def __init__(self, records: Sequence[Numbers]) -> None:
        """Raises msgspec.DecodeError where not_measured of numbers is none."""
        self.records = records
        self.values: dict[str, tuple[Any, ...]] = fields_of(records, FIELDS)
        """By field, a value per record."""
        self.floats = {name: floats(self.values[name]) for name in FLOAT_FIELDS}
        """NaN where a record has no value; None where no record has."""
        self.overlap: dict[str, tuple[Any, ...]] = fields_of(
            self.values["overlap"], OverlapRecord.__struct_fields__
        )
        """Fields of the records' overlaps."""
        self._parts: dict[str, dict[str, Sequence[Any]]] = {}
        self.reasons: list[dict[str, str]] = [
            text if isinstance(text, dict) else _REASONS.decode(text)
            for text, _ in groupby(self.values["not_measured"])
        ]
        """Values of not_measured, each once where it repeats the one before it."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def first(self) -> LineKey:
        return _key(self.records[0])

    @property
    def last(self) -> LineKey:
        return _key(self.records[-1])

    @property
    def source(self) -> Source:
        return self.records[0].source

    def is_constant(self, name: str) -> bool:
        """Returns True where every record has the same value."""
        values = self.values[name]
        return values.count(values[0]) == len(values)

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        if name in self.floats:
            return self.floats[name]
        if name in self.overlap:
            return floats(self.overlap[name])
        head, _, field = name.partition(".")
        if not field:
            return floats(self.values[name])
        if head in ("hidden_by_op", "exposed_by_op"):
            return floats([of_record.get(field) for of_record in self.overlap[head]])
        column = self._part(head).get(field)
        return None if column is None else floats(column)

    def _part(self, name: str) -> dict[str, Sequence[Any]]:
        """Fields of a part that records may lack, a value per record; nothing where all do."""
        fields = self._parts.get(name)
        if fields is None:
            parts = self.overlap[name] if name in self.overlap else self.values[name]
            fields = self._parts[name] = _fields_of_parts(parts)
        return fields

    def integers(self, name: str) -> NDArray[np.int64]:
        return np.array(self.values[name], dtype=np.int64)

    def gaps(self) -> Iterator[tuple[int, str]]:
        gaps = self.values["gap"]
        if any(gaps):
            for step, gap in zip(self.values["global_step"], gaps, strict=True):
                if gap is not None:
                    yield step, gap

    def has(self, name: ListName) -> NDArray[np.bool_]:
        return np.array([value is not None for value in self.values[name]])

    def operations(self) -> Iterable[str]:
        return dict.fromkeys(chain.from_iterable(self.overlap["exposed_by_op"]))

    def throttling(self) -> Sequence[Sequence[str] | None]:
        return [None if device is None else device.throttling for device in self.values["device"]]

    def kernel_class(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        sums = [kernels for kernels in self.values["kernels"] if kernels is not None]
        times_ms, counts = zip(*(kernels.classes.get(name, (0.0, 0)) for kernels in sums), strict=True)
        return np.array(times_ms, dtype=np.float64), np.array(counts, dtype=np.float64)

    def top_kernels(self) -> TopKernels:
        rows, ids, ms, counts, is_complete = array("q"), array("q"), array("d"), array("q"), array("b")
        for row, sums in enumerate(self.values["kernels"]):
            if sums is None:
                continue
            num = 0
            for name, time_ms, count in sums.top:
                rows.append(row)
                ids.append(name)
                ms.append(time_ms)
                counts.append(count)
                num += count
            is_complete.append(num == sums.num_kernels)
        integers = [np.array(column, dtype=np.int64) for column in (rows, ids, counts)]
        return TopKernels(
            row=integers[0],
            name=integers[1],
            ms=np.array(ms, dtype=np.float64),
            num=integers[2],
            is_complete=np.array(is_complete, dtype=bool),
        )

    def host_spans(self) -> HostSpans:
        rows, kinds, starts, ends = [], [], [], []
        num_bytes: dict[int, int] = {}
        for row, spans in enumerate(self.values["host_spans"]):
            for span in spans or ():
                rows.append(row)
                kinds.append(_PLACES[span.kind])
                starts.append(span.start_ms)
                ends.append(span.end_ms)
                if span.bytes is not None and span.kind == "optimizer":
                    num_bytes[row] = num_bytes.get(row, 0) + span.bytes
        row_of_span, kind = (np.array(column, dtype=np.int64) for column in (rows, kinds))
        start_ms, end_ms = (np.array(column, dtype=np.float64) for column in (starts, ends))
        return HostSpans(row_of_span, kind, start_ms, end_ms, num_bytes)

    @cached_property
    def segments(self) -> SegmentArrays:
        return segment_arrays(enumerate(self.values["active_segments"]))

    def details(self) -> Iterator[tuple[int, StepDetails]]:
        lists = [self.values[name] for name in ("collectives", "active_segments", "exposed_run_lengths_ns")]
        if not any(map(any, lists)):
            return
        for row, of_record in enumerate(zip(*lists, strict=True)):
            if any(of_record):
                record = self.records[row]
                key = (record.source, record.global_step, record.attempt, record.start_unix_ns)
                yield row, StepDetails(*key, *of_record)

    def distinct(self, *names: str) -> Iterable[tuple[Any, ...]]:
        columns = [self.values[name] for name in names]
        if all(map(self.is_constant, names)):
            return [tuple(column[0] for column in columns)]
        return dict.fromkeys(zip(*columns, strict=True))

    def sources(self) -> Iterable[Source]:
        return [source for (source,) in self.distinct("source")]

    def of_source(self, source: Source) -> "StepBlock":
        if self.is_constant("source"):
            return self
        return StepBlock([record for record in self.records if record.source == source])


def _key(record: Numbers) -> LineKey:
    return LineKey(record.rank, record.run_id, record.attempt, record.rollbacks, record.global_step)


_PLACES = {kind: place for place, kind in enumerate(HOST_KINDS)}


def _fields_of_parts(parts: Sequence[Any]) -> dict[str, Sequence[Any]]:
    present = [part for part in parts if part is not None]
    if not present:
        return {}
    columns = fields_of(present, type(present[0]).__struct_fields__)
    if len(present) == len(parts):
        return dict(columns)
    return {name: list(_spread(parts, values)) for name, values in columns.items()}


def _spread(parts: Sequence[Any], values: Sequence[Any]) -> Iterator[Any]:
    left = iter(values)
    return (None if part is None else next(left) for part in parts)


def fields_of(items: Sequence[Any], names: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Attributes of the items as columns."""
    return dict(zip(names, zip(*map(attrgetter(*names), items), strict=True), strict=True))


def floats(values: Sequence[float | None]) -> NDArray[np.float64] | None:
    """Numbers, NaN in place of None; None where there is no number."""
    if values[0] is None and values.count(None) == len(values):
        return None
    return np.array(values, dtype=np.float64)  # NaN in place of None
