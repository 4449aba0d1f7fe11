"""Neighbouring lines of a record file as columns of the fields that statistics are made of."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import (
    DeviceRecord,
    HostSpan,
    HostUse,
    KernelSums,
    MemoryRecord,
    OverlapRecord,
    Segment,
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


class CallNumbers(msgspec.Struct, gc=False):
    """The fields of a CollectiveRecord that statistics use."""

    op: str
    stream: str
    group: str
    ranks: list[int]
    bytes: int | None
    dtype: str
    seq: int
    start_ms: float | None
    end_ms: float | None


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
    active_segments: list[Segment] | None
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
        self.reasons: list[dict[str, str]] = [
            text if isinstance(text, dict) else _REASONS.decode(text)
            for text, _ in groupby(self.values["not_measured"])
        ]
        """Values of not_measured, each once where it repeats the one before it."""

    def __len__(self) -> int:
        return len(self.records)

    def is_constant(self, name: str) -> bool:
        """Returns True where every record has the same value."""
        values = self.values[name]
        return values.count(values[0]) == len(values)

    def distinct(self, *names: str) -> Iterable[tuple[Any, ...]]:
        """The different values of these fields together, as they come."""
        columns = [self.values[name] for name in names]
        if all(map(self.is_constant, names)):
            return [tuple(column[0] for column in columns)]
        return dict.fromkeys(zip(*columns, strict=True))


def by_source(block: StepBlock) -> Iterator[tuple[Source, StepBlock]]:
    """The block's records by source."""
    sources = block.distinct("source")
    for (source,) in sources:
        if len(block) == 1 or block.is_constant("source"):
            yield source, block
        else:
            yield source, StepBlock([record for record in block.records if record.source == source])


def fields_of(items: Sequence[Any], names: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Attributes of the items as columns."""
    return dict(zip(names, zip(*map(attrgetter(*names), items), strict=True), strict=True))


def are_given(values: Sequence[Any]) -> NDArray[np.bool_]:
    """Where a value is not None."""
    return np.array([value is not None for value in values])


def floats(values: Sequence[float | None]) -> NDArray[np.float64] | None:
    """Numbers, NaN in place of None; None where there is no number."""
    if values[0] is None and values.count(None) == len(values):
        return None
    return np.array(values, dtype=np.float64)  # NaN in place of None
