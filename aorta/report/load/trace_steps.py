"""Steps of one trace as step records."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.timeline.collective import algbw_gb_s, busbw_gb_s
from aorta.timeline.overlap import active_segments, overlap, stream_uses
from aorta.timeline.types import OverlapRecord, Timeline
from aorta.traces.model import NS_PER_MS, RankTrace, TraceCollective

WHOLE_WINDOW = 0
"""Step number of the whole window of a trace without steps."""
NOT_IN_TRACE = "a trace does not hold it"
OF_KIND = {
    "comm": ("comm_ms", "hidden_ms", "exposed_ms", "idle_ms"),
    "compute": ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms"),
}
"""Sums that need all spans of a kind."""


def step_records(trace: RankTrace, world_size: int) -> Iterator[StepRecord]:
    """A record of every step of the trace, or one of the whole window where it has none."""
    by_step: dict[int | None, list[TraceCollective]] = {}
    seq: Counter[str] = Counter()
    numbers: dict[int, int] = {}
    for one in trace.collectives:
        by_step.setdefault(one.step, []).append(one)
        numbers[id(one)] = seq[one.group or ""]
        seq[one.group or ""] += 1
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
    line = _from_start(trace.timeline.clipped(start_ms, end_ms), step, start_ms)
    computes = {trace.timeline.streams[i] for i in trace.timeline.compute_streams}
    not_measured = dict.fromkeys(("loss", "lr", "grad_norm", "tokens", "host_ms"), NOT_IN_TRACE)
    not_measured["between_steps_ms"] = "a trace does not tell the step's body from what follows it"
    if any(one.bytes is None for one in issued):
        not_measured["collectives.bytes"] = "the trace does not tell the size of every collective"
    for kind, why in trace.untimed.items():
        not_measured |= dict.fromkeys((f"overlap.{name}" for name in OF_KIND[kind]), why)
    return StepRecord(
        rank=trace.rank,
        world_size=world_size,
        epoch=0,
        step=step,
        global_step=step,
        loss=None,
        lr=None,
        grad_norm=None,
        tokens=None,
        source=trace.source,
        start_unix_ns=line.origin_unix_ns,
        clock_error_us=None,
        step_ms=end_ms - start_ms,
        between_steps_ms=None,
        host_ms=None,
        streams=stream_uses(line),
        overlap=_known(overlap(line), trace.untimed),
        active_segments=active_segments(line),
        collectives=[
            _collective(
                one, start_ms, trace.timeline.origin_unix_ns, one.stream in computes, numbers[id(one)]
            )
            for one in issued
        ],
        num_collectives=len(issued),
        not_measured=not_measured,
    )


def _known(found: OverlapRecord, untimed: Mapping[str, str]) -> OverlapRecord:
    """Without what needs kernels whose duration is not known."""
    if not untimed:
        return found
    lost = dict.fromkeys(name for kind in untimed for name in OF_KIND[kind])
    more = ("exposed_copy_ms", "overlap_ratio", "hidden_per_compute", "compute_stream",
            "compute_allreduce_ms", "compute_reducescatter_ms")  # fmt: skip
    return msgspec.structs.replace(found, hidden_by_op={}, exposed_by_op={}, **dict.fromkeys((*lost, *more)))


def _from_start(line: Timeline, step: int, start_ms: float) -> Timeline:
    """The same with times from the start of its window."""
    return replace(
        line,
        step=step,
        origin_unix_ns=line.origin_unix_ns + round(start_ms * NS_PER_MS),
        window_ms=(0.0, line.window_ms[1] - start_ms),
        start_ms=line.start_ms - start_ms,
        end_ms=line.end_ms - start_ms,
    )


def _collective(
    one: TraceCollective, start_ms: float, origin_ns: int, on_compute: bool, seq: int
) -> CollectiveRecord:
    duration_ms = one.end_ms - one.start_ms
    algbw = busbw = None
    if one.bytes:  # neither unknown nor 0, as a barrier's: that has no bandwidth
        algbw = algbw_gb_s(one.bytes, duration_ms)
        busbw = busbw_gb_s(one.op, one.bytes, len(one.ranks), duration_ms) if one.ranks else None
    launch_ms = None
    if one.launch_unix_ns is not None:
        launch_ms = (one.launch_unix_ns - origin_ns) / NS_PER_MS - start_ms
    return CollectiveRecord(
        op=one.op,
        stream="compute" if on_compute else "group",
        group=one.group or "",
        ranks=one.ranks or [],
        bytes=one.bytes,
        dtype=one.dtype or "",
        seq=seq,
        launch_ms=launch_ms,
        start_ms=one.start_ms - start_ms,
        end_ms=one.end_ms - start_ms,
        algbw_gb_s=algbw,
        busbw_gb_s=busbw,
    )
