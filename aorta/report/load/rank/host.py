"""What the host did in a step, apart from one another: columns that causes are made from.

Spans of the host nest (a collection of garbage within a backward pass): each ms counts for the innermost
kind. What lies behind the body of a step delays the next one and has columns of its own.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from aorta.records.schema import HostKind, HostSpan, Segment
from aorta.records.step_block import Numbers
from aorta.report.load.rank.columns import Floats
from aorta.timeline.intervals import (
    EMPTY,
    Intervals,
    clip,
    intersect_normalised,
    length_ms,
    subtract_normalised,
    union,
)

PREFIX = "host."
AFTER = ".after"
IDLE = "host.idle."
"""Device idle while the host did this; OTHER: while it did none of the kinds."""
OTHER = "other"
BYTES = "host.optimizer_bytes"
INNERMOST_FIRST: tuple[HostKind, ...] = (
    "garbage_collection",
    "synchronisation",
    "checkpoint",
    "data",
    "pause",
    "optimizer",
    "backward",
)


def host_metrics(records: Sequence[Numbers]) -> dict[str, Floats]:
    """By metric, a value per line, NaN where it has none; without metrics that no line has.

    Most lines have spans; those that have none, and no segments, are alike: the host did nothing of note.
    """
    metrics: dict[str, Floats] = {}
    empty: list[int] = []
    for row, record in enumerate(records):
        if record.host_spans is None or record.step_ms is None:
            continue
        if not record.host_spans and record.active_segments is None:
            empty.append(row)
            continue
        for name, value in _parts(record):
            if name not in metrics:
                metrics[name] = np.full(len(records), np.nan)
            metrics[name][row] = value
    if empty:
        for name in (f"{PREFIX}{kind}{when}" for kind in INNERMOST_FIRST for when in ("", AFTER)):
            metrics.setdefault(name, np.full(len(records), np.nan))[empty] = 0.0
    return metrics


def _parts(record: Numbers) -> Iterator[tuple[str, float]]:
    """host.<kind>: ms in the body without exposed communication; host.<kind>.after: ms behind it;
    host.idle.<kind>: ms of idle device, where the line has segments and there is a device."""
    if record.host_spans is None or record.step_ms is None:
        return
    window_ms = record.step_ms
    body_ms = window_ms - (record.between_steps_ms or 0.0)
    segments = record.active_segments
    exposed, busy = _segments(segments) if segments is not None else (EMPTY, None)
    on_device = record.source not in ("host",)
    left = None
    if busy is not None and on_device:
        left = subtract_normalised(union(np.array([[0.0, window_ms]])), busy)
    for kind, spans in _without_inner(record.host_spans):
        if not len(spans):
            yield f"{PREFIX}{kind}", 0.0
            yield f"{PREFIX}{kind}{AFTER}", 0.0
            if left is not None and kind not in ("synchronisation", "backward"):
                yield f"{IDLE}{kind}", 0.0
            continue
        inside = clip(spans, 0.0, body_ms)
        if not on_device:
            inside = subtract_normalised(inside, exposed)
        yield f"{PREFIX}{kind}", length_ms(inside)
        yield f"{PREFIX}{kind}{AFTER}", length_ms(clip(spans, body_ms, window_ms))
        if left is not None and kind != "synchronisation":  # the device works while the host waits for it
            idle = intersect_normalised(left, spans)
            if kind != "backward":
                yield f"{IDLE}{kind}", length_ms(idle)
                left = subtract_normalised(left, idle)
    if left is not None:
        yield f"{IDLE}{OTHER}", length_ms(left)
    sizes = [span.bytes for span in record.host_spans if span.kind == "optimizer" and span.bytes is not None]
    if sizes:
        yield BYTES, float(sum(sizes))


def _without_inner(spans: list[HostSpan]) -> Iterator[tuple[HostKind, Intervals]]:
    """By kind, without what an inner kind has."""
    covered = EMPTY
    for kind in INNERMOST_FIRST:
        rows = [(span.start_ms, span.end_ms) for span in spans if span.kind == kind]
        if not rows:
            yield kind, EMPTY
            continue
        spans_of_kind = union(np.array(rows, dtype=np.float64))
        yield kind, subtract_normalised(spans_of_kind, covered)
        covered = union(np.concatenate([covered, spans_of_kind]))


def _segments(segments: list[Segment]) -> tuple[Intervals, Intervals]:
    """Exposed communication, and whatever is active."""
    busy = [(segment.start_ms, segment.end_ms) for segment in segments if segment.active_streams]
    exposed = [
        (segment.start_ms, segment.end_ms)
        for segment in segments
        if segment.active_streams and not {"compute", "copy"} & set(segment.active_streams)
    ]
    return tuple(  # type: ignore[return-value]
        union(np.array(rows, dtype=np.float64).reshape(-1, 2)) for rows in (exposed, busy)
    )
