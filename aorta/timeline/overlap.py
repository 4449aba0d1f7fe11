"""Overlap of communication and compute in a Timeline: hidden, exposed and idle time, streams, segments.

docs/definitions.md has every term. Recorder and readers of traces take their numbers from here.
"""

from functools import cache
from typing import Any

import msgspec
import numpy as np

from aorta.timeline.arrays import Flags
from aorta.timeline.collective import stream_of
from aorta.timeline.intervals import (
    EMPTY,
    Intervals,
    clip,
    concat,
    distinct,
    intersect_normalised,
    length_ms,
    subtract_normalised,
    union,
)
from aorta.timeline.types import (
    COPY,
    KERNEL_SOURCES,
    PARTS_MS,
    STREAM_NAMES,
    Kind,
    OverlapRecord,
    Segment,
    StreamUse,
    Timeline,
    Total,
)

DIGITS = 6
"""Of ms in lines: ns."""

SEGMENT_NAMES = (*STREAM_NAMES, COPY)
"""Names of what may be active in a segment."""


def overlap(timeline: Timeline) -> OverlapRecord:
    """The overlap of the window, all spans clipped to it.

    comm = hidden + exposed and window = compute + exposed + idle hold by construction. What needs
    more than spans (stalled_ms, starved_bound_ms, host_bound) is left to the recorder.
    """
    by_op = comm_by_op(timeline)
    comm = _union_of(by_op)
    compute = union(_clipped(timeline, timeline.kind == Kind.COMPUTE))
    hidden = intersect_normalised(comm, compute)
    comm_ms, compute_ms, hidden_ms = length_ms(comm), length_ms(compute), length_ms(hidden)

    hidden_by_op, exposed_by_op = {}, {}
    hidden_by_stream = {"allreduce": 0.0, "reducescatter": 0.0}
    for op, spans in by_op.items():
        hidden_part = hidden if len(by_op) == 1 else intersect_normalised(spans, compute)
        hidden_by_op[op] = length_ms(hidden_part)
        exposed_by_op[op] = max(0.0, length_ms(spans) - hidden_by_op[op])
    for stream in hidden_by_stream:
        ops = [op for op in by_op if stream_of(op) == stream]
        if len(ops) == 1:
            hidden_by_stream[stream] = hidden_by_op[ops[0]]
        elif ops:
            spans = _union_of({op: by_op[op] for op in ops})
            hidden_by_stream[stream] = length_ms(intersect_normalised(spans, compute))

    return OverlapRecord(
        comm_ms=comm_ms,
        compute_ms=compute_ms,
        hidden_ms=hidden_ms,
        exposed_ms=max(0.0, comm_ms - hidden_ms),
        idle_ms=max(0.0, timeline.span_ms - (comm_ms + compute_ms - hidden_ms)),
        exposed_copy_ms=_exposed_copy_ms(timeline, comm, compute),
        overlap_ratio=hidden_ms / comm_ms if comm_ms > 0 else None,
        hidden_per_compute=hidden_ms / compute_ms if compute_ms > 0 else None,
        compute_allreduce_ms=hidden_by_stream["allreduce"],
        compute_reducescatter_ms=hidden_by_stream["reducescatter"],
        hidden_by_op=hidden_by_op,
        exposed_by_op=exposed_by_op,
    )


def rounded(value: Any) -> Any:
    """Return numbers, a struct or dict of them too, with as many digits as clocks have."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: rounded(of_name) for name, of_name in value.items()}
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: rounded(getattr(value, name)) for name in value.__struct_fields__})
    return value


def _exposed_copy_ms(timeline: Timeline, comm: Intervals, compute: Intervals) -> float | None:
    if not timeline.sees_copies:
        return None
    copies = union(_clipped(timeline, timeline.kind == Kind.COPY))
    if len(copies) == 0:
        return 0.0
    return length_ms(subtract_normalised(copies, union(concat(comm, compute))))


def total(timeline: Timeline) -> Total:
    """The arithmetic of overlap() over a whole window, with counts of kernels."""
    of_window = overlap(timeline)
    num_comm, num_compute = (int((timeline.kind == kind).sum()) for kind in (Kind.COMM, Kind.COMPUTE))
    return Total(
        span_ms=timeline.span_ms,
        **{name: getattr(of_window, name) for name in PARTS_MS},
        num_kernels=num_comm + num_compute if timeline.source in KERNEL_SOURCES else None,
        num_collectives=num_comm,
    )


def exposed_intervals(timeline: Timeline) -> Intervals:
    """Communication without compute within the window, normalised; its length is overlap's exposed_ms."""
    comm = union(_clipped(timeline, timeline.kind == Kind.COMM))
    return subtract_normalised(comm, union(_clipped(timeline, timeline.kind == Kind.COMPUTE)))


def window_fields(timeline: Timeline) -> dict[str, Any]:
    """Fields of a step's record that the spans of its window give."""
    named = named_unions(timeline)
    return {
        "streams": stream_uses(timeline, named),
        "overlap": overlap(timeline),
        "active_segments": active_segments(timeline, named),
    }


def stream_uses(timeline: Timeline, named: dict[str, Intervals] | None = None) -> dict[str, StreamUse]:
    """Busy time of the device by kind of work, under the names of STREAM_NAMES. named: of named_unions."""
    named = named_unions(timeline) if named is None else named
    uses = {}
    for name in STREAM_NAMES:
        spans = union(concat(named[name], named[COPY])) if name == "aux" else named[name]
        busy_ms = length_ms(spans)
        share = busy_ms / timeline.span_ms if timeline.span_ms > 0 else None
        uses[name] = StreamUse(busy_ms=busy_ms, utilization=share)
    return uses


def active_segments(timeline: Timeline, named: dict[str, Intervals] | None = None) -> list[Segment]:
    """Stretches of the window with something active, in order; unions() is the inverse."""
    named = named_unions(timeline) if named is None else named
    sets = [named[name] for name in SEGMENT_NAMES]
    edges = distinct(concat(*sets))
    if len(edges) == 0:
        return []
    bits = np.zeros(len(edges), dtype=np.int64)
    for i, spans in enumerate(sets):
        if len(spans):
            opened = spans[:, 0].searchsorted(edges, side="right")
            closed = spans[:, 1].searchsorted(edges, side="right")
            bits |= (opened - closed) << i
    # Every edge starts or ends a normalised set, so neighbouring stretches always differ.
    edge_ms = edges.tolist()
    return [
        Segment(edge_ms[i], edge_ms[i + 1], list(_active(active)), active.bit_count())
        for i, active in enumerate(bits.tolist())
        if active
    ]


def unions(segments: list[Segment]) -> dict[str, Intervals]:
    """Normalised intervals of every name of SEGMENT_NAMES: the inverse of active_segments."""
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in SEGMENT_NAMES}
    for segment in segments:
        for name in segment.active_streams:
            spans[name].append((segment.start_ms, segment.end_ms))
    return {name: union(np.array(rows).reshape(-1, 2)) for name, rows in spans.items()}


@cache
def _active(bits: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(SEGMENT_NAMES) if bits >> i & 1)


def named_unions(timeline: Timeline) -> dict[str, Intervals]:
    """Normalised intervals of every name of SEGMENT_NAMES."""
    named: dict[str, list[Intervals]] = {name: [] for name in SEGMENT_NAMES}
    named["compute"].append(_clipped(timeline, timeline.kind == Kind.COMPUTE))
    named[COPY].append(_clipped(timeline, timeline.kind == Kind.COPY))
    for op, spans in comm_by_op(timeline).items():
        named[stream_of(op)].append(spans)
    return {name: union(concat(*parts)) if parts else EMPTY for name, parts in named.items()}


def comm_by_op(timeline: Timeline) -> dict[str, Intervals]:
    """Normalised intervals of every collective operation of the window."""
    is_comm = timeline.kind == Kind.COMM
    present = distinct(timeline.op[is_comm]).tolist()
    if len(present) == 1:
        return {timeline.ops[present[0]]: union(_clipped(timeline, is_comm))}
    return {timeline.ops[i]: union(_clipped(timeline, is_comm & (timeline.op == i))) for i in present}


def on_compute_stream(timeline: Timeline) -> Flags:
    """Mask of the spans that ran on a compute stream."""
    if len(timeline.compute_streams) == 1:
        return np.asarray(timeline.stream == next(iter(timeline.compute_streams)))
    return np.isin(timeline.stream, list(timeline.compute_streams))


def _clipped(timeline: Timeline, mask: Flags) -> Intervals:
    """Spans of the mask, each cut to the window; they may overlap."""
    return clip(timeline.intervals(mask), *timeline.window_ms)


def _union_of(by_op: dict[str, Intervals]) -> Intervals:
    if len(by_op) == 1:
        return next(iter(by_op.values()))
    return union(concat(*by_op.values()))
