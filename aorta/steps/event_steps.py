"""Step records from events: marks on the compute stream and around every collective.

`EventSteps` takes the steps of a rank in order. Of each it works out when collectives ran, when the
compute stream stood still and when it ran dry; what is left counts as compute. On a CPU the marks are the
host's times. A collective may end in a later step than it began in, so EventSteps keeps a `_RunState`.

host ns: monotonic, on the host's clock.
run ms: on the device's clock, since the first mark of the run.
step ms: since the start of the step at hand: run ms less `start_run_ms`.
A Mark has step ms and the host ns at which it was queued; DeviceClock maps one to the other, and their
distance is the mark's lag.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from aorta.records.schema import CollectiveRecord, StartBy, StepRecord
from aorta.steps.notes import CallId, CollectiveCall, Mark, RecordedStep, ResolverSettings
from aorta.steps.record import (
    NO_DETAILS,
    NO_OVERLAP,
    collective_record,
    host_spans,
    left_out_record,
    module_places,
    noted_fields,
    scalar_reasons,
)
from aorta.timeline.collective import POINT_TO_POINT
from aorta.timeline.intervals import EMPTY, Intervals, clip, intersect, length_ms, subtract, union
from aorta.timeline.overlap import active_segments, overlap, rounded, stream_uses
from aorta.timeline.types import Kind, OverlapRecord, Span, Timeline

DRIFT_PPM = 10.0
"""Assumed bound between a GPU's and the host's oscillator where nothing tighter is known."""

STARVED_LAG_MS = 0.05
"""A mark that the device passes within this time of being queued found the queue empty."""

LAUNCH_TAIL_MS = 0.03
"""Host time between the launch of a collective's kernel and the return of the call that launched it:
a kernel cannot have started earlier than this before the return. On H200 with NCCL 2.28 the median
was 0.026 (docs/evidence.md)."""

HOST_BOUND_SHARE = 0.2
"""A step whose starved bound exceeds this share of it is called host-bound."""

_REMEMBERED_STEPS = 64
"""Steps whose calls' ends are kept for waits in later steps: no step is held back longer by a call."""
_LEAST_REMEMBERED_CALLS, _MOST_REMEMBERED_CALLS = 1000, 10_000
"""Bounds of the number of calls kept: steps without calls must not drop those of others. `_forget` lets twice
as many gather before it drops any."""

_REMEMBERED_GROUPS = 1000
"""Process groups whose last call's end is kept."""


class DeviceClock:
    """Maps times of marks, in ms after the first mark, to the host's monotonic clock.

    An event cannot pass before the host queued it: every mark bounds the offset from below. The
    opening anchor (taken while the device was idle) bounds it from above too. The error is half
    of that interval plus what the two clocks may have drifted apart since.
    """

    def __init__(self, lower_ns: int, upper_ns: int) -> None:
        self._offset_ns = (lower_ns + upper_ns) / 2
        self._half_width_ns = (upper_ns - lower_ns) / 2

    def tighten(self, queued_ns: int, run_ms: float) -> None:
        """Use a mark that passed at run_ms and was queued at queued_ns: it cannot have passed before."""
        lower = queued_ns - run_ms * 1e6
        if lower > self._offset_ns:
            self._offset_ns = lower

    def monotonic_ns(self, run_ms: float) -> float:
        return self._offset_ns + run_ms * 1e6

    def run_ms(self, monotonic_ns: int) -> float:
        return (monotonic_ns - self._offset_ns) / 1e6

    def error_us(self, run_ms: float) -> float:
        return self._half_width_ns / 1e3 + run_ms * DRIFT_PPM / 1e3


@dataclass
class _Times:
    """The intervals of one step, in ms from its start."""

    comm: list[Span]
    calls: list[tuple[float, StartBy, float] | None]
    """Start, what it began after, and end of every call; None where it has no times."""
    stalled: Intervals
    """The compute stream waited."""
    starved: Intervals
    """Stretches at whose end the compute stream's queue was empty."""
    not_compute: Intervals
    """stalled, and time after the body without work."""


@dataclass
class _RunState:
    """Facts of earlier steps that later ones need."""

    start_run_ms: float = 0.0
    """Start of the step at hand."""
    first_start_ns: int | None = None
    fifo_end_run_ms: dict[str, float] = field(default_factory=dict)
    """End of the last call of every group's communicator."""
    ends_run_ms: dict[CallId, float] = field(default_factory=dict)
    most_calls: int = 0
    """Collectives of the step that had most."""
    carried: list[tuple[str, float, float]] = field(default_factory=list)
    """Communication (op, start, end in run ms) that reaches into the next window."""

    def forget_old_calls(self, num_calls: int) -> None:
        """Bound what is kept, after a step of num_calls."""
        self.most_calls = max(self.most_calls, num_calls)
        num_remembered = max(_LEAST_REMEMBERED_CALLS, _REMEMBERED_STEPS * self.most_calls)
        _forget(self.ends_run_ms, min(num_remembered, _MOST_REMEMBERED_CALLS))
        _forget(self.fifo_end_run_ms, _REMEMBERED_GROUPS)


class EventSteps:
    """Turns the steps of one rank into records, in order."""

    def __init__(self, settings: ResolverSettings) -> None:
        self._settings = settings
        self._clock = (
            DeviceClock(settings.clock_lower_ns, settings.clock_upper_ns) if settings.on_device else None
        )
        self._run = _RunState()

    def resolve(self, step: RecordedStep) -> StepRecord:
        """The step's record. Steps must come in the order in which they ran."""
        if step.left_out is not None:
            return left_out_record(step, self._settings, "host" if self._clock is None else "events")
        if self._run.first_start_ns is None:
            self._run.first_start_ns = step.start_ns
        self._run.start_run_ms += step.gap_ms
        times = self._times(step)
        record = self._record(step, times)
        self._run.start_run_ms += step.window_ms  # the next window begins where this one ends
        return record

    # -- times --------------------------------------------------------------------------------

    def _times(self, step: RecordedStep) -> _Times:
        """The step's intervals.

        Order matters. Waits come after the calls, whose ends they look up. `_starved` is last: its marks
        tighten the clock, and launches of this step are placed by the clock as earlier steps left it.
        """
        run = self._run
        origin = run.start_run_ms
        comm = [
            Span(start - origin, end - origin, Kind.COMM, op, "carried") for op, start, end in run.carried
        ]
        run.carried = [c for c in run.carried if c[2] > origin + step.window_ms]
        calls: list[tuple[float, StartBy, float] | None] = []
        blocked: list[tuple[float, float]] = []
        for call in step.calls:
            if call.start is None or call.end is None:
                calls.append(None)
                continue
            queued_ms, end_ms = self._ms(step, call.start), self._ms(step, call.end)
            start_ms, start_by = self._start(call, queued_ms, end_ms)
            run.ends_run_ms[call.id] = origin + end_ms
            if call.blocks:
                blocked.append((queued_ms, end_ms))
            calls.append((start_ms, start_by, end_ms))
            if len(call.group.ranks) > 1:
                comm.append(Span(start_ms, end_ms, Kind.COMM, call.op, call.stream))
                if end_ms > step.window_ms:
                    run.carried.append((call.op, origin + start_ms, origin + end_ms))
        blocked += self._waits(step)
        stalled = clip(union(_rows(blocked)), 0.0, step.window_ms)
        starved, idle_after_body = self._starved(step)
        run.forget_old_calls(len(step.calls))
        not_compute = union(np.concatenate([stalled, idle_after_body]))
        return _Times(comm, calls, stalled, starved, not_compute)

    def _start(self, call: CollectiveCall, queued_ms: float, end_ms: float) -> tuple[float, StartBy]:
        """Start of the collective itself, and what it waited for last.

        Not before its start mark, not before the group's previous call had ended (a communicator
        runs its calls in order), and not before the host had launched it: where the host is late,
        the mark passes long before the kernel exists.
        """
        # Each pair of ranks has a communicator of its own: not first in, first out with the group's calls.
        if self._clock is None or call.op in POINT_TO_POINT or call.stream == "host":
            return min(queued_ms, end_ms), "stream"
        origin = self._run.start_run_ms
        # Popped and put back, so that the latest is the last: `_forget` drops from the front.
        busy_until = self._run.fifo_end_run_ms.pop(call.group.key, float("-inf"))
        self._run.fifo_end_run_ms[call.group.key] = max(busy_until, origin + end_ms)
        start_ms, start_by = queued_ms, "stream"
        if busy_until - origin > start_ms:
            start_ms, start_by = busy_until - origin, "previous"
        launched_ms = self._launched_ms(call)
        if launched_ms is not None and launched_ms > start_ms:
            start_ms, start_by = launched_ms, "launch"
        return min(start_ms, end_ms), start_by  # type: ignore[return-value]

    def _launched_ms(self, call: CollectiveCall) -> float | None:
        """The host's launch on the device's axis, less the host work that follows a launch."""
        if self._clock is None or call.launched_ns == 0:
            return None
        return self._clock.run_ms(call.launched_ns) - self._run.start_run_ms - LAUNCH_TAIL_MS

    def _waits(self, step: RecordedStep) -> list[tuple[float, float]]:
        """Stretches in which the compute stream waited, as it was told to."""
        origin, ends = self._run.start_run_ms, self._run.ends_run_ms
        blocked = [(self._ms(step, stall.start), self._ms(step, stall.end)) for stall in step.stalls]
        for wait in step.waits:
            if wait.call in ends:
                start = self._ms(step, wait.start)
                blocked.append((start, max(start, ends[wait.call] - origin)))
        for final in step.final_waits:
            start = self._ms(step, final.start)
            end = max([start, *(ends[i] - origin for i in final.calls if i in ends)])
            if final.end is not None:
                end = min(end, self._ms(step, final.end))
            blocked.append((start, max(start, end)))
        return blocked

    def _starved(self, step: RecordedStep) -> tuple[Intervals, Intervals]:
        """(stretches of the body that ended with an empty queue, time after the body without work)."""
        if self._clock is None:
            # On a CPU the host computes; after the body it loads data, logs, saves.
            return EMPTY, _rows([(step.body_ms, step.window_ms)])
        origin = self._run.start_run_ms
        marks = [step.body_end, *(call.start for call in step.calls if call.on_compute)]
        marks += [wait.start for wait in step.waits]
        marks += [mark for stall in step.stalls for mark in (stall.start, stall.end)]
        marks += [wait.start for wait in step.final_waits]
        starved: list[tuple[float, float]] = []
        previous_ms = 0.0
        of_device = [(mark.ms, mark.host_ns) for mark in marks if mark is not None and mark.ms is not None]
        for ms, queued_ns in sorted(of_device):
            if ms > previous_ms:
                self._clock.tighten(queued_ns, origin + ms)
                if self._lag_ms(ms, queued_ns) < STARVED_LAG_MS:
                    starved.append((previous_ms, ms))
            previous_ms = max(previous_ms, ms)
        idle = EMPTY
        self._clock.tighten(step.window_end_ns, origin + step.window_ms)
        if self._lag_ms(step.window_ms, step.window_end_ns) < STARVED_LAG_MS:
            idle = _rows([(step.body_ms, step.window_ms)])
        return union(_rows(starved)), idle

    def _ms(self, step: RecordedStep, mark: Mark) -> float:
        """ms from the step's start to the mark, on whichever clock the mark was set."""
        if mark.ms is not None or self._clock is None:
            return step.ms_of(mark)
        # A host mark in a step of device marks: a collective of CPU tensors.
        return self._clock.run_ms(mark.host_ns) - self._run.start_run_ms

    def _host_ms(self, monotonic_ns: int, step: RecordedStep) -> float:
        """ms from the step's start to a time of the host."""
        if self._clock is None:
            return (monotonic_ns - step.start_ns) / 1e6
        return self._clock.run_ms(monotonic_ns) - self._run.start_run_ms

    def _lag_ms(self, step_ms: float, queued_ns: int) -> float:
        """Time from queueing a mark to the device passing it."""
        assert self._clock is not None
        return (self._clock.monotonic_ns(self._run.start_run_ms + step_ms) - queued_ns) / 1e6

    # -- the record ---------------------------------------------------------------------------

    def _record(self, step: RecordedStep, times: _Times) -> StepRecord:
        compute = subtract(_rows([(0.0, step.window_ms)]), times.not_compute)
        spans = [*times.comm, *(Span(a, b, Kind.COMPUTE) for a, b in compute.tolist())]
        settings = self._settings
        start_unix_ns, error_us = self._start_unix_ns()
        timeline = Timeline.from_spans(
            spans,
            (0.0, step.window_ms),
            rank=settings.rank,
            step=step.global_step,
            source="host" if self._clock is None else "events",
            origin_unix_ns=start_unix_ns,
        )
        not_measured = self._not_measured(step)
        detailed = step.is_detailed
        timed = step.untimed is None
        if not detailed:
            not_measured["active_segments"] = not_measured["collectives"] = NO_DETAILS
        return StepRecord(
            **noted_fields(step, settings),
            source=timeline.source,
            start_unix_ns=start_unix_ns,
            clock_error_us=error_us,
            step_ms=rounded(step.window_ms),
            between_steps_ms=rounded(max(0.0, step.window_ms - step.body_ms)),
            streams=rounded(stream_uses(timeline)) if timed else {},
            overlap=rounded(self._overlap(timeline, times, compute, not_measured)) if timed else NO_OVERLAP,
            active_segments=active_segments(timeline) if detailed and timed else None,
            collectives=self._collectives(step, times) if detailed else None,
            host_spans=host_spans(
                step, lambda ns: self._host_ms(ns, step), with_window=self._clock is not None
            ),
            not_measured=not_measured,
        )

    def _overlap(
        self, timeline: Timeline, times: _Times, compute: Intervals, not_measured: dict[str, str]
    ) -> OverlapRecord:
        record = overlap(timeline)
        stalled_ms = length_ms(times.stalled)
        if self._clock is None:
            record = msgspec.structs.replace(record, stalled_ms=stalled_ms)
        else:
            starved = intersect(times.starved, compute)
            starved_ms = length_ms(starved)
            comm = union(timeline.intervals(timeline.kind == Kind.COMM))
            record = msgspec.structs.replace(
                record,
                stalled_ms=stalled_ms,
                starved_bound_ms=starved_ms,
                starved_hidden_bound_ms=length_ms(intersect(starved, comm)),
                host_bound=starved_ms > HOST_BOUND_SHARE * timeline.span_ms,
            )
        if "overlap" not in not_measured:
            return record
        # Collectives without times: sums over the others would look like sums over all.
        return msgspec.structs.replace(
            record,
            comm_ms=None, hidden_ms=None, exposed_ms=None, idle_ms=None, overlap_ratio=None,
            hidden_per_compute=None, compute_allreduce_ms=None, compute_reducescatter_ms=None,
        )  # fmt: skip

    def _not_measured(self, step: RecordedStep) -> dict[str, str]:
        reasons = scalar_reasons(step)
        untimed = [call.reason for call in step.calls if call.start is None or call.end is None]
        if step.untimed is not None:
            for name in ("overlap", "streams", "active_segments"):
                reasons[name] = step.untimed
        elif untimed:
            reasons["overlap"] = (
                f"{len(untimed)} of {len(step.calls)} collectives have no times ({untimed[0]})"
            )
        if self._clock is not None:
            reasons["overlap.exposed_copy_ms"] = "events do not see copies"
        else:
            reasons["overlap.exposed_copy_ms"] = "there is no device"
            reasons["overlap.starved_bound_ms"] = "there is no device"
        if step.memory is None and self._clock is None:
            reasons["memory"] = "there is no device"
        return reasons

    def _collectives(self, step: RecordedStep, times: _Times) -> list[CollectiveRecord]:
        records, places = [], module_places(step)
        for call, times_ms in zip(step.calls, times.calls, strict=True):
            start_ms, start_by, end_ms = times_ms or (None, None, None)
            launch_ms = self._launched_ms(call)
            method = start_by if self._clock is not None else None
            records.append(collective_record(call, places, launch_ms, start_ms, end_ms, start_by=method))
        return records

    def _start_unix_ns(self) -> tuple[int, float | None]:
        if self._clock is None:
            assert self._run.first_start_ns is not None
            monotonic_ns: float = self._run.first_start_ns + self._run.start_run_ms * 1e6
            error_us = 1.0
        else:
            monotonic_ns = self._clock.monotonic_ns(self._run.start_run_ms)
            error_us = self._clock.error_us(self._run.start_run_ms)
        return int(monotonic_ns) + self._settings.unix_minus_monotonic_ns, error_us


def _rows(spans: list[tuple[float, float]]) -> Intervals:
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _forget(times: dict[Any, float], num_remembered: int) -> None:
    """Drop the oldest once twice as many are kept: no step waits for a call of long ago."""
    if len(times) > 2 * num_remembered:
        for key in list(times)[:-num_remembered]:
            del times[key]
