"""Neighbouring lines of a record file as statistics see them, whatever they were read from."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import Source

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


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


class LineKey(NamedTuple):
    """What a line is of."""

    rank: int
    run_id: str | None
    attempt: int
    rollbacks: int
    global_step: int


class SegmentNumbers(msgspec.Struct, gc=False):
    """The fields of a Segment that statistics use."""

    start_ms: float
    end_ms: float
    active_streams: tuple[str, ...]


class SegmentArrays(NamedTuple):
    """Segments of all lines, in their order."""

    row: Ints
    start_ms: Floats
    end_ms: Floats
    active: Ints
    """Places in `sets`."""
    sets: list[tuple[str, ...]]
    """The different sets of active streams."""


class StepDetails(NamedTuple):
    """The lists of a line, of which at least one is not empty."""

    source: Source
    global_step: int
    attempt: int
    start_unix_ns: int
    collectives: Sequence[CallNumbers] | None
    active_segments: Sequence[SegmentNumbers] | None
    exposed_run_lengths_ns: Sequence[int] | None


class HostSpans(NamedTuple):
    """Host spans of all lines, in their order."""

    row: Ints
    kind: Ints
    """Place in HOST_KINDS."""
    start_ms: Floats
    end_ms: Floats
    optimizer_bytes: dict[int, int]
    """By row, of what optimizers update; without rows where none says."""


class TopKernels(NamedTuple):
    """Kernels by name, of all lines, in their order."""

    row: Ints
    """Of each kernel."""
    name: Ints
    ms: Floats
    num: Ints
    is_complete: Flags
    """By line that has kernels: no kernel is missing in its list."""


def segment_arrays(lists: Iterable[tuple[int, Sequence[SegmentNumbers] | None]]) -> SegmentArrays:
    """lists: of rows."""
    rows: list[int] = []
    nums: list[int] = []
    segments: list[SegmentNumbers] = []
    for row, of_row in lists:
        if of_row:
            rows.append(row)
            nums.append(len(of_row))
            segments += of_row
    if not segments:
        return SegmentArrays(
            np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64), []
        )
    start_ms, end_ms, active = zip(*map(_FIELDS, segments), strict=True)
    sets: dict[tuple[str, ...], int] = {}
    places = [sets.setdefault(streams, len(sets)) for streams in map(tuple, active)]
    return SegmentArrays(
        row=np.repeat(np.array(rows, dtype=np.int64), nums),
        start_ms=np.array(start_ms, dtype=np.float64),
        end_ms=np.array(end_ms, dtype=np.float64),
        active=np.array(places, dtype=np.int64),
        sets=list(sets),
    )


_FIELDS = attrgetter("start_ms", "end_ms", "active_streams")

ListName = Literal["active_segments", "collectives", "exposed_run_lengths_ns", "host_spans", "kernels"]


class NumberBlock(Protocol):
    """Neighbouring lines of one file, at least one. Names are those of a record's fields, of its overlap's,
    and <part>.<field> of its other parts: step_ms, comm_ms, calibrated.comm_ms, memory.reserved_bytes."""

    @property
    def first(self) -> LineKey: ...

    @property
    def last(self) -> LineKey: ...

    @property
    def source(self) -> Source:
        """Of the first line."""
        ...

    @property
    def reasons(self) -> Sequence[dict[str, str]]:
        """Values of not_measured, in order; one that repeats the one before it may be left out."""
        ...

    def __len__(self) -> int: ...

    def numbers(self, name: str) -> Floats | None:
        """A value per line, NaN where it has none; None where no line has one."""
        ...

    def integers(self, name: str) -> Ints:
        """Of a field that every line has."""
        ...

    def gaps(self) -> Iterator[tuple[int, str]]:
        """Global step and gap of the lines that have one."""
        ...

    def has(self, name: ListName) -> Flags:
        """Which lines have this list or part, be it empty."""
        ...

    def operations(self) -> Iterable[str]:
        """Those that exposed_by_op names: columns exposed_by_op.<op>, hidden_by_op.<op>."""
        ...

    def throttling(self) -> Sequence[Sequence[str] | None]:
        """Reasons for which the device was throttled, a list per line, None where it does not say."""
        ...

    def kernel_class(self, name: str) -> tuple[Floats, Floats]:
        """ms and number, of the lines that have kernels."""
        ...

    def top_kernels(self) -> TopKernels: ...

    def host_spans(self) -> HostSpans: ...

    @property
    def segments(self) -> SegmentArrays: ...

    def details(self) -> Iterator[tuple[int, StepDetails]]:
        """Row and lists, of the lines that have some."""
        ...

    def distinct(self, *names: str) -> Iterable[tuple[int, ...]]:
        """The different values of these fields together, as they come."""
        ...

    def of_source(self, source: Source) -> Self:
        """The lines of a source that some line has."""
        ...

    def sources(self) -> Iterable[Source]:
        """Those that occur."""
        ...
