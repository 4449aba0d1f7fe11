"""From marks to a StepRecord: runs on the resolving thread, steps later, waits for nothing.

Two time axes: ms since the start of the step that is resolved (what records hold), and ms since
the run's first mark ("run ms", what calls that cross a step boundary are kept in).
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from aorta.device.anchors import DeviceClock
from aorta.device.marks import Mark, MarkClock
from aorta.recording.calibration import Calibration
from aorta.recording.calls import Call, Step
from aorta.records.schema import (
    CollectiveMember,
    CollectiveRecord,
    MemoryRecord,
    OverlapRecord,
    StepRecord,
)
from aorta.timeline.collective import algbw_gb_s, busbw_gb_s
from aorta.timeline.intervals import EMPTY, Intervals, clip, intersect, length_ms, subtract, union
from aorta.timeline.overlap import active_segments, overlap, stream_uses
from aorta.timeline.types import Kind, Span, Timeline

_POINT_TO_POINT = {"send", "recv", "send_recv"}
"""Each pair of ranks has a communicator of its own: not first in, first out with the group's calls."""

STARVED_LAG_MS = 0.05
"""A mark that the device passes within this time of being queued found the queue empty."""

LAUNCH_TAIL_MS = 0.03
"""Host time between the launch of a collective's kernel and the return of the call that launched it:
a kernel cannot have started earlier than this before the return. On H200 with NCCL 2.28 the median
was 0.026 (docs/validation.md)."""

HOST_BOUND_SHARE = 0.2
"""A step whose starved bound exceeds this share of it is called host-bound."""


@dataclass
class _Times:
    """The step's marks in ms relative to its start."""

    window_ms: float
    body_ms: float
    comm: list[Span]
    not_compute: Intervals
    stalled: Intervals
    starved: Intervals


class Resolver:
    """Turns closed steps into records, in order. Owned by one thread."""

    def __init__(
        self,
        clock: MarkClock,
        device_clock: DeviceClock | None,
        unix_minus_monotonic_ns: int,
        rank: int,
        world_size: int,
        detail_every: int,
    ) -> None:
        self._clock = clock
        self._device_clock = device_clock
        self._unix_minus_monotonic_ns = unix_minus_monotonic_ns
        self._rank = rank
        self._world_size = world_size
        self._detail_every = detail_every
        self.calibration: Calibration | None = None
        self._start_run_ms: float | None = None
        self._first_start_ns = 0
        self._last_start_run_ms = 0.0
        self._carried: list[tuple[str, float, float]] = []
        """Communication (op, start, end in run ms) that reaches into the next window."""

    def ready(self, step: Step, closing: bool) -> bool:
        """Whether the device has passed everything that the step's record needs."""
        assert step.window_end is not None
        if not self._clock.passed(step.window_end):
            return False
        return all(self._call_ready(call, closing) for call in step.calls) and all(
            wait.after is None or self._passed(wait.after) for wait in step.final_waits
        )

    def _call_ready(self, call: Call, closing: bool) -> bool:
        if call.reason is not None:
            return True
        if call.end is None:
            if closing:
                call.reason = "never waited for"
            return closing
        return self._passed(call.end)

    def _passed(self, mark: Mark) -> bool:
        return mark.event is None or self._clock.passed(mark)

    def resolve(self, step: Step) -> StepRecord:
        """The record of a step that is ready. Gives the step's marks back to their clock."""
        assert step.start is not None
        if self._start_run_ms is None:
            self._start_run_ms = 0.0
            self._first_start_ns = step.start.host_ns
        start_run_ms = self._start_run_ms
        times = self._times(step, start_run_ms)
        record = self._record(step, times, start_run_ms)
        self._start_run_ms = start_run_ms + times.window_ms
        self._recycle(step)
        return record

    # -- times --------------------------------------------------------------------------------

    def _ms(self, step: Step, mark: Mark) -> float:
        """ms from the step's start to the mark, on whichever clock the mark was set."""
        assert step.start is not None
        assert self._start_run_ms is not None
        if mark.ms is None:
            if mark.event is not None or self._device_clock is None:
                mark.ms = self._clock.distance_ms(step.start, mark)
            else:
                # A host mark in a step of device marks: a collective of CPU tensors.
                run_ms = (mark.host_ns - self._device_clock.monotonic_ns(0.0)) / 1e6
                mark.ms = run_ms - self._start_run_ms
        return mark.ms

    def _times(self, step: Step, start_run_ms: float) -> _Times:
        assert step.start is not None
        assert step.body_end is not None
        assert step.window_end is not None
        window_ms = self._clock.distance_ms(step.start, step.window_end)
        body_ms = self._clock.distance_ms(step.start, step.body_end)
        comm: list[Span] = []
        for op, start, end in self._carried:
            comm.append(Span(start - start_run_ms, end - start_run_ms, Kind.COMM, op, "carried"))
        self._carried = [c for c in self._carried if c[2] > start_run_ms + window_ms]

        blocked: list[tuple[float, float]] = []
        for call in step.calls:
            if call.reason is not None or call.start is None or call.end is None:
                continue
            queued_ms, end_ms = self._ms(step, call.start), self._ms(step, call.end)
            start_ms = self._launch_order(call, queued_ms, end_ms, start_run_ms)
            call.start_run_ms, call.end_run_ms = start_run_ms + start_ms, start_run_ms + end_ms
            if len(call.group.ranks) > 1:
                comm.append(Span(start_ms, end_ms, Kind.COMM, call.op, call.stream))
                if end_ms > window_ms:
                    self._carried.append((call.op, call.start_run_ms, call.end_run_ms))
            if call.blocks:
                blocked.append((queued_ms, end_ms))

        for wait in step.waits:
            before = self._ms(step, wait.before)
            if wait.call.end_run_ms is not None:
                blocked.append((before, max(before, wait.call.end_run_ms - start_run_ms)))
        for stall in step.stalls:
            blocked.append((self._ms(step, stall.before), self._ms(step, stall.after)))
        for final in step.final_waits:
            before = self._ms(step, final.before)
            ends = [c.end_run_ms - start_run_ms for c in final.calls if c.end_run_ms is not None]
            until = max([before, *ends])
            if final.after is not None:
                until = min(until, self._ms(step, final.after))
            blocked.append((before, max(before, until)))

        stalled = clip(union(_rows(blocked)), 0.0, window_ms)
        starved, idle_after_body = self._starved(step, body_ms, window_ms)
        not_compute = union(np.concatenate([stalled, idle_after_body]))
        return _Times(window_ms, body_ms, comm, not_compute, stalled, starved)

    def _launch_order(self, call: Call, queued_ms: float, end_ms: float, start_run_ms: float) -> float:
        """When the collective itself began.

        Not before its start mark, not before the group's previous call had ended (a communicator
        runs its calls in order), and not before the host had launched it: where the host is late,
        the mark passes long before the kernel exists.
        """
        group = call.group
        if not self._clock.is_device or call.op in _POINT_TO_POINT or call.stream == "host":
            return min(queued_ms, end_ms)
        start_ms = max(queued_ms, group.fifo_end_ms - start_run_ms, self._launched_ms(call, start_run_ms))
        group.fifo_end_ms = max(group.fifo_end_ms, start_run_ms + end_ms)
        return min(start_ms, end_ms)

    def _launched_ms(self, call: Call, start_run_ms: float) -> float:
        """The host's launch on the device's axis, less the host work that follows a launch."""
        if self._device_clock is None or call.launched_ns == 0:
            return float("-inf")
        run_ms = (call.launched_ns - self._device_clock.monotonic_ns(0.0)) / 1e6
        return run_ms - start_run_ms - LAUNCH_TAIL_MS

    def _starved(self, step: Step, body_ms: float, window_ms: float) -> tuple[Intervals, Intervals]:
        """(stretches of the body that ended with an empty queue, time after the body without work)."""
        if self._device_clock is None:
            # On a CPU the host computes; after the body it loads data, logs, saves.
            return EMPTY, _rows([(body_ms, window_ms)])
        assert step.start is not None
        assert step.body_end is not None
        assert step.window_end is not None
        marks = [step.body_end]
        marks += [call.start for call in step.calls if call.blocks and call.start is not None]
        marks += [wait.before for wait in step.waits]
        marks += [mark for stall in step.stalls for mark in (stall.before, stall.after)]
        marks += [wait.before for wait in step.final_waits]
        at = sorted((self._ms(step, mark), mark.host_ns) for mark in marks)
        starved: list[tuple[float, float]] = []
        previous_ms = 0.0
        for ms, queued_ns in at:
            if ms > previous_ms and self._lag_ms(ms, queued_ns) < STARVED_LAG_MS:
                starved.append((previous_ms, ms))
            previous_ms = max(previous_ms, ms)
        after = EMPTY
        if self._lag_ms(window_ms, step.window_end.host_ns) < STARVED_LAG_MS:
            after = _rows([(body_ms, window_ms)])
        return union(_rows(starved)), after

    def _lag_ms(self, step_ms: float, queued_ns: int) -> float:
        """How long after it was queued the device reached a point of the step."""
        assert self._device_clock is not None
        assert self._start_run_ms is not None
        run_ms = self._start_run_ms + step_ms
        self._device_clock.tighten(queued_ns, run_ms)
        return (self._device_clock.monotonic_ns(run_ms) - queued_ns) / 1e6

    # -- the record ---------------------------------------------------------------------------

    def _record(self, step: Step, times: _Times, start_run_ms: float) -> StepRecord:
        compute = subtract(_rows([(0.0, times.window_ms)]), times.not_compute)
        spans = list(times.comm)
        spans += [Span(a, b, Kind.COMPUTE) for a, b in compute.tolist()]
        for used in step.ranges:
            if used.end is not None:
                spans.append(
                    Span(self._ms(step, used.start), self._ms(step, used.end), Kind.COPY, stream=used.name)
                )
        start_unix_ns, error_us = self._start_unix_ns(start_run_ms)
        timeline = Timeline.from_spans(
            spans,
            (0.0, times.window_ms),
            rank=self._rank,
            step=step.global_step,
            source="events" if self._clock.is_device else "host",
            origin_unix_ns=start_unix_ns,
        )
        not_measured = self._not_measured(step)
        detailed = step.global_step % self._detail_every == 0
        if not detailed:
            not_measured["active_segments"] = not_measured["collectives"] = (
                "left out (recording.detail_every)"
            )
        loss, lr, grad_norm = (_scalar(step, name) for name in ("loss", "lr", "grad_norm"))
        return StepRecord(
            rank=self._rank,
            world_size=self._world_size,
            epoch=step.epoch,
            step=step.step,
            global_step=step.global_step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=step.tokens,
            source=timeline.source,
            start_unix_ns=start_unix_ns,
            clock_error_us=error_us,
            step_ms=times.window_ms,
            between_steps_ms=max(0.0, times.window_ms - times.body_ms),
            host_ms=(step.host_end_ns - step.host_start_ns) / 1e6,
            streams=stream_uses(timeline),
            overlap=self._overlap(timeline, times, compute, not_measured),
            active_segments=active_segments(timeline) if detailed else None,
            collectives=[self._collective(call, start_run_ms) for call in step.calls] if detailed else None,
            num_collectives=len(step.calls),
            memory=None if step.memory is None else MemoryRecord(
                allocated_bytes=step.memory[0],
                reserved_bytes=step.memory[1],
                peak_allocated_bytes=step.memory[2],
            ),
            not_measured=not_measured,
        )  # fmt: skip

    def _overlap(
        self, timeline: Timeline, times: _Times, compute: Intervals, not_measured: dict[str, str]
    ) -> OverlapRecord:
        record = overlap(timeline)
        starved = intersect(times.starved, compute)
        starved_ms = length_ms(starved)
        comm = union(timeline.intervals(timeline.kind == Kind.COMM))
        starved_hidden_ms = length_ms(intersect(starved, comm))
        on_device = self._clock.is_device
        record = msgspec.structs.replace(
            record,
            stalled_ms=length_ms(times.stalled),
            starved_bound_ms=starved_ms if on_device else None,
            starved_hidden_bound_ms=starved_hidden_ms if on_device else None,
            host_bound=starved_ms > HOST_BOUND_SHARE * times.window_ms if on_device else None,
        )
        if on_device and self.calibration is not None:
            record = msgspec.structs.replace(record, calibrated=self.calibration.apply(record))
        reason = not_measured.get("overlap")
        if reason is None:
            return record
        # A sum that misses a part is not a sum.
        return msgspec.structs.replace(
            record,
            comm_ms=None, hidden_ms=None, exposed_ms=None, idle_ms=None, overlap_ratio=None,
            hidden_per_compute=None, compute_allreduce_ms=None, compute_reducescatter_ms=None,
            calibrated=None,
        )  # fmt: skip

    def _not_measured(self, step: Step) -> dict[str, str]:
        reasons: dict[str, str] = {}
        untimed = [call for call in step.calls if call.reason is not None]
        if untimed:
            what = f"{len(untimed)} of {len(step.calls)} collectives have no times ({untimed[0].reason})"
            reasons["overlap"] = what
        if self._clock.is_device:
            reasons["overlap.exposed_copy_ms"] = "events do not see copies"
        else:
            reasons["overlap.exposed_copy_ms"] = "there is no device"
            reasons["overlap.starved_bound_ms"] = "there is no device"
        for name in ("loss", "lr", "grad_norm"):
            if name not in step.scalars:
                reasons[name] = "not logged"
        if step.memory is None:
            reasons["memory"] = "there is no device"
        if step.tokens is None:
            reasons["tokens"] = "not given"
        return reasons

    def _collective(self, call: Call, start_run_ms: float) -> CollectiveRecord:
        start_ms = end_ms = duration_ms = None
        if call.start_run_ms is not None and call.end_run_ms is not None:
            start_ms, end_ms = call.start_run_ms - start_run_ms, call.end_run_ms - start_run_ms
            # A barrier moves no data: it has a duration and no bandwidth.
            duration_ms = end_ms - start_ms if call.bytes else None
        num_ranks = len(call.group.ranks)
        return CollectiveRecord(
            op=call.op,
            stream=call.stream,
            group=call.group.name,
            ranks=call.group.ranks,
            bytes=call.bytes,
            dtype=call.dtype,
            seq=call.seq,
            is_async=call.is_async,
            launch_ms=None if not call.launched_ns else self._launched_ms(call, start_run_ms),
            start_ms=start_ms,
            end_ms=end_ms,
            algbw_gb_s=algbw_gb_s(call.bytes, duration_ms),
            busbw_gb_s=busbw_gb_s(call.op, call.bytes, num_ranks, duration_ms),
            members=None
            if call.members is None
            else [
                CollectiveMember(op=member.op, bytes=member.bytes, dtype=member.dtype, peer=member.peer)
                for member in call.members
            ],
        )

    def _start_unix_ns(self, start_run_ms: float) -> tuple[int, float | None]:
        if self._device_clock is None:
            monotonic_ns: float = self._first_start_ns + start_run_ms * 1e6
            error_us: float | None = 1.0
        else:
            monotonic_ns = self._device_clock.monotonic_ns(start_run_ms)
            error_us = self._device_clock.error_us(start_run_ms)
        return int(monotonic_ns) + self._unix_minus_monotonic_ns, error_us

    def _recycle(self, step: Step) -> None:
        """All marks but the window's end, which is the next step's start."""
        marks = [step.start, step.body_end]
        marks += [mark for call in step.calls for mark in (call.start, call.end)]
        marks += [wait.before for wait in step.waits]
        marks += [mark for stall in step.stalls for mark in (stall.before, stall.after)]
        marks += [mark for wait in step.final_waits for mark in (wait.before, wait.after)]
        marks += [mark for used in step.ranges for mark in (used.start, used.end)]
        self._clock.recycle([m for m in marks if m is not None and m is not step.window_end])


def _rows(spans: list[tuple[float, float]]) -> Intervals:
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _scalar(step: Step, name: str) -> float | None:
    value = step.scalars.get(name)
    if value is None:
        return None
    read = getattr(value, "read", None)
    return float(read()) if read is not None else float(value)
