"""Steps of one trace as step records."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from aorta.records.schema import CollectiveRecord, HostKind, HostSpan, StepRecord
from aorta.steps.record import partial_record
from aorta.timeline.collective import algbw_gb_s, busbw_gb_s
from aorta.timeline.overlap import window_fields
from aorta.timeline.types import OverlapRecord
from aorta.traces.host_spans import NO_CALLS, NO_RANGES
from aorta.traces.model import NS_PER_MS, RankTrace, TraceCollective

WHOLE_WINDOW = 0
"""Step number of the whole window of a trace without steps."""
NOT_IN_TRACE = "a trace does not hold it"
OF_KIND = {
    "comm": ("comm_ms", "hidden_ms", "exposed_ms", "idle_ms"),
    "compute": ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms"),
}
"""Sums that need all spans of a kind."""
NEEDED: frozenset[HostKind] = frozenset(("data", "optimizer"))
"""What a trace has to show of the host, or its waits alone would stand for all that the host does."""


def step_records(trace: RankTrace, world_size: int) -> Iterator[StepRecord]:
    """A record of every step of the trace, or one of the whole window where it has none."""
    by_step: dict[int | None, list[TraceCollective]] = {}
    seq: Counter[str] = Counter()
    numbers: dict[int, int] = {}
    for collective in trace.collectives:
        by_step.setdefault(collective.step, []).append(collective)
        numbers[id(collective)] = seq[collective.group or ""]
        seq[collective.group or ""] += 1
    for step, window in windows_of(trace):
        issued = trace.collectives if not trace.steps else by_step.get(step, [])
        yield _record(trace, step, window, issued, numbers, max(world_size, trace.rank + 1))


def windows_of(trace: RankTrace) -> list[tuple[int, tuple[float, float]]]:
    if not trace.steps:
        return [(WHOLE_WINDOW, trace.timeline.window_ms)]
    return [(line.step or 0, line.window_ms) for line in trace.steps]


def _record(
    trace: RankTrace,
    step: int,
    window: tuple[float, float],
    issued: Sequence[TraceCollective],
    numbers: dict[int, int],
    world_size: int,
) -> StepRecord:
    start_ms, end_ms = window[0], max(window)
    line = trace.timeline.of_step(step, start_ms, end_ms)
    fields = window_fields(line)
    computes = {trace.timeline.streams[i] for i in trace.timeline.compute_streams}
    not_measured = dict.fromkeys(("loss", "lr", "grad_norm", "tokens", "host_ms"), NOT_IN_TRACE)
    not_measured["between_steps_ms"] = "a trace does not tell the step's body from what follows it"
    if any(collective.bytes is None for collective in issued):
        not_measured["collectives.bytes"] = "the trace does not tell the size of every collective"
    hidden = trace.host_not_shown.keys() & NEEDED
    host_spans = None if hidden else _host_spans(trace, start_ms, end_ms)
    if hidden:
        not_measured["host_spans"] = NO_CALLS if trace.quality.num_launches is None else NO_RANGES
    else:
        not_measured |= {f"host_spans.{kind}": reason for kind, reason in trace.host_not_shown.items()}
    for kind, reason in trace.untimed.items():
        not_measured |= dict.fromkeys((f"overlap.{name}" for name in OF_KIND[kind]), reason)
    return partial_record(
        trace.rank,
        world_size,
        step,
        source=trace.source,
        start_unix_ns=line.origin_unix_ns,
        step_ms=end_ms - start_ms,
        **(fields | {"overlap": _without_untimed(fields["overlap"], trace.untimed)}),
        collectives=[
            _collective(
                collective,
                start_ms,
                trace.timeline.origin_unix_ns,
                collective.stream in computes,
                numbers[id(collective)],
            )
            for collective in issued
        ],
        num_collectives=len(issued),
        host_spans=host_spans,
        not_measured=not_measured,
    )


def _host_spans(trace: RankTrace, start_ms: float, end_ms: float) -> list[HostSpan]:
    """What the host did in a window, from its start."""
    return [
        msgspec.structs.replace(
            span, start_ms=max(span.start_ms, start_ms) - start_ms, end_ms=min(span.end_ms, end_ms) - start_ms
        )
        for span in trace.host_spans
        if span.start_ms < end_ms and span.end_ms > start_ms
    ]


def _without_untimed(record: OverlapRecord, untimed: Mapping[str, str]) -> OverlapRecord:
    """The record without values that need kernels whose duration is not known."""
    if not untimed:
        return record
    lost = dict.fromkeys(name for kind in untimed for name in OF_KIND[kind])
    derived = ("exposed_copy_ms", "overlap_ratio", "hidden_per_compute",
            "compute_allreduce_ms", "compute_reducescatter_ms")  # fmt: skip
    return msgspec.structs.replace(
        record, hidden_by_op={}, exposed_by_op={}, **dict.fromkeys((*lost, *derived))
    )


def _collective(
    collective: TraceCollective, start_ms: float, origin_ns: int, on_compute: bool, seq: int
) -> CollectiveRecord:
    duration_ms = collective.end_ms - collective.start_ms
    algbw = busbw = None
    if collective.bytes:  # neither unknown nor 0, as a barrier's: that has no bandwidth
        algbw = algbw_gb_s(collective.bytes, duration_ms)
        if collective.ranks:
            busbw = busbw_gb_s(collective.op, collective.bytes, len(collective.ranks), duration_ms)
    launch_ms = None
    if collective.launch_unix_ns is not None:
        launch_ms = (collective.launch_unix_ns - origin_ns) / NS_PER_MS - start_ms
    return CollectiveRecord(
        op=collective.op,
        stream="compute" if on_compute else "group",
        group=collective.group or "",
        ranks=collective.ranks or [],
        bytes=collective.bytes,
        dtype=collective.dtype or "",
        seq=seq,
        launch_ms=launch_ms,
        start_ms=collective.start_ms - start_ms,
        end_ms=collective.end_ms - start_ms,
        algbw_gb_s=algbw,
        busbw_gb_s=busbw,
    )
