"""Timeline: what one rank's device did in one step or one window, as plain arrays.

Times in ms are relative to the integer origin of the Timeline, in ns on the Unix clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Flags, Floats
from aorta.timeline.intervals import Intervals, pairs

Source = Literal["kernels", "events", "kineto", "rocprofv3", "nsys", "host"]
"""Origin of a Timeline. kernels: the driver's kernel records, always on. events: device events on streams.
host: host clock (CPU). The rest are kernel traces."""

KERNEL_SOURCES = frozenset(("kernels", "kineto", "rocprofv3", "nsys"))
"""Sources that see every kernel and every copy of the device."""

TRACE_SOURCES = KERNEL_SOURCES - {"kernels"}
"""Kernel sources that are traces: their collectives have no numbers to match ranks by."""

OWN_SOURCES = frozenset(("kernels", "events", "host"))
"""Sources of the lines that a run writes itself."""

STREAM_NAMES = ("compute", "allreduce", "reducescatter", "allgather", "alltoall", "aux")
"""Keys of StepRecord.streams: the work, whatever device stream it ran on. aux: everything else
(other collectives, point-to-point, prefetch copies)."""

STEP_ANNOTATION = "aorta.step#"
"""Profiler annotation of a step body, followed by the global step: traces are cut into steps by it."""

COPY = "copy"
"""Name of copies in Segment.active_streams, apart from aux, so that the union of communication
can be rebuilt from segments."""


class Kind(IntEnum):
    """Kinds of work."""

    COMPUTE = 0
    COMM = 1
    COPY = 2


class Span(NamedTuple):
    """One piece of work; for tests and for steps with few of them."""

    start_ms: float
    end_ms: float
    kind: Kind
    op: str = ""
    """A collective's operation as in torch.distributed; for other work a class of it, or ''."""
    stream: str = "compute"
    """Device stream that it ran on."""
    name: str = ""
    """Name of the kernel, where known."""


@dataclass(frozen=True, eq=False, slots=True)
class Timeline:
    """Device work of one rank in a window. Spans may overlap, in any order, and reach outside the window.

    stream, op and name hold indices into streams, ops and names.
    """

    rank: int
    step: int | None
    """Global step; None for a window that is not a step."""
    source: Source
    origin_unix_ns: int
    window_ms: tuple[float, float]
    start_ms: Floats
    end_ms: Floats
    kind: NDArray[np.int8]
    stream: NDArray[np.int32]
    op: NDArray[np.int32]
    name: NDArray[np.int32]
    streams: tuple[str, ...]
    ops: tuple[str, ...]
    names: tuple[str, ...]
    compute_streams: frozenset[int]
    """Indices of the streams on which the program computes (normally one)."""
    sees_copies: bool
    """True where copies are among the spans if there were any."""

    @classmethod
    def from_spans(
        cls,
        spans: Iterable[Span],
        window_ms: tuple[float, float],
        *,
        rank: int = 0,
        step: int | None = None,
        source: Source = "events",
        origin_unix_ns: int = 0,
        compute_streams: Sequence[str] = ("compute",),
        sees_copies: bool | None = None,
    ) -> Self:
        """A Timeline of a few spans. sees_copies defaults to what the source can see."""
        rows = list(spans)
        start, end, kind, op, stream, name = zip(*rows, strict=True) if rows else ((),) * 6
        ops, op_index = _table(op)
        streams, stream_index = _table(stream)
        names, name_index = _table(name)
        return cls(
            rank=rank,
            step=step,
            source=source,
            origin_unix_ns=origin_unix_ns,
            window_ms=window_ms,
            start_ms=np.array(start, dtype=np.float64),
            end_ms=np.array(end, dtype=np.float64),
            kind=np.array(kind, dtype=np.int8),
            stream=stream_index,
            op=op_index,
            name=name_index,
            streams=streams,
            ops=ops,
            names=names,
            compute_streams=frozenset(i for i, s in enumerate(streams) if s in compute_streams),
            sees_copies=source in KERNEL_SOURCES if sees_copies is None else sees_copies,
        )

    def __len__(self) -> int:
        return len(self.start_ms)

    @property
    def span_ms(self) -> float:
        return self.window_ms[1] - self.window_ms[0]

    def intervals(self, mask: Flags | None = None) -> Intervals:
        """Spans as intervals, all or those of the mask; not clipped to the window."""
        if mask is None:
            return pairs(self.start_ms, self.end_ms)
        return pairs(self.start_ms[mask], self.end_ms[mask])

    def select(self, mask: Flags) -> Self:
        """The same window with the spans of the mask alone."""
        of_spans = ("start_ms", "end_ms", "kind", "stream", "op", "name")
        return replace(self, **{name: getattr(self, name)[mask] for name in of_spans})

    def of_step(self, step: int, start_ms: float, end_ms: float) -> Self:
        """The window [start_ms, end_ms) as a step of its own, its times from its start."""
        cut = self.clipped(start_ms, end_ms)
        return replace(
            cut,
            step=step,
            origin_unix_ns=cut.origin_unix_ns + round(start_ms * 1e6),
            window_ms=(0.0, end_ms - start_ms),
            start_ms=cut.start_ms - start_ms,
            end_ms=cut.end_ms - start_ms,
        )

    def clipped(self, lo: float, hi: float) -> Self:
        """The window [lo, hi) and the part of the spans within it; the origin stays."""
        inside = (self.start_ms < hi) & (self.end_ms > lo)
        inside |= (self.start_ms == self.end_ms) & (self.start_ms >= lo) & (self.start_ms < hi)
        cut = self.select(inside)
        return replace(
            cut,
            window_ms=(lo, hi),
            start_ms=np.maximum(cut.start_ms, lo),
            end_ms=np.minimum(cut.end_ms, hi),
        )


PARTS_MS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
"""What every window is taken apart into: a step, and a whole run or trace."""


class OverlapRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step's overlap, by the definitions in docs/definitions.md."""

    comm_ms: float | None = None
    compute_ms: float | None = None
    hidden_ms: float | None = None
    exposed_ms: float | None = None
    idle_ms: float | None = None
    exposed_copy_ms: float | None = None
    """Copies alone (part of idle_ms); None where copies are not seen."""
    overlap_ratio: float | None = None
    """hidden_ms / comm_ms; None where there is no communication."""
    hidden_per_compute: float | None = None
    """hidden_ms / compute_ms."""
    compute_allreduce_ms: float | None = None
    """Part of the all-reduce time that is hidden under compute."""
    compute_reducescatter_ms: float | None = None
    """Part of the reduce-scatter time that is hidden under compute."""
    hidden_by_op: dict[str, float] = {}
    exposed_by_op: dict[str, float] = {}
    """Exposed time by collective operation; concurrent operations each count, so these need not add up."""
    stalled_ms: float | None = None
    """Events and host: time in which the compute stream waits for another stream or a collective."""
    starved_bound_ms: float | None = None
    """Events: upper bound of the time in which the compute stream had nothing queued. It is
    inside compute_ms, because events cannot see where in it the gaps are."""
    starved_hidden_bound_ms: float | None = None
    """The part of starved_bound_ms that lies in hidden_ms."""
    host_bound: bool | None = None
    """The host was the bottleneck of this step (starved_bound_ms above a fifth of step_ms)."""


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A stretch of the window in which the same streams are active."""

    start_ms: float
    end_ms: float
    active_streams: list[str]
    """Names of STREAM_NAMES, and 'copy' for copies."""
    concurrency: int
    """Number of active streams."""


class StreamUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Time in which a kind of work kept the device busy."""

    busy_ms: float | None
    """Union of the spans of this work within the step's window."""
    utilization: float | None
    """busy_ms / step_ms."""


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a whole window, by the same set arithmetic as a step's."""

    span_ms: float
    comm_ms: float
    compute_ms: float
    hidden_ms: float
    exposed_ms: float
    idle_ms: float
    num_kernels: int | None
    """Kernels, communication included; None where the source does not see kernels."""
    num_collectives: int
    """Collectives; for a kernel source: communication kernels."""


def _table(values: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    index: dict[str, int] = {}
    column = [index.setdefault(value, len(index)) for value in values]
    return tuple(index), np.array(column, dtype=np.int32)
