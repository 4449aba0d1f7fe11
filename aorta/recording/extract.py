"""From a closed step's marks to plain numbers, once the device has passed them.

This is all that is done beside the training loop in its own process on a GPU: one question to the
device per mark. What the numbers mean is worked out elsewhere (aorta.resolve).
"""

from collections.abc import Callable

import msgspec

from aorta.device.marks import Mark, MarkClock
from aorta.recording.calls import Call, Group, Step
from aorta.recording.scalars import read_scalars
from aorta.records.schema import DeviceRecord
from aorta.resolve.raw import CallId, RawCall, RawGroup, RawMark, RawMember, RawStep


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into a step's record beside its own numbers."""

    device: DeviceRecord | None = None
    rocm_smi_output: str | None = None
    not_measured: dict[str, str] = {}


class Extractor:
    def __init__(self, clock: MarkClock) -> None:
        self._clock = clock
        self._last_end: Mark | None = None
        """Where the window of the step before ended: this step's start, unless the recorder was paused."""

    def ready(self, step: Step, closing: bool) -> bool:
        """Whether the device has passed every mark of the step. Never blocks."""
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

    def extract(self, step: Step, telemetry: Telemetry) -> RawStep:
        """The numbers of a step that is ready. Gives the step's marks back to their clock."""
        start, body_end, window_end = step.start, step.body_end, step.window_end
        assert start is not None
        assert body_end is not None
        assert window_end is not None
        distance_ms = self._clock.distance_ms
        on_device = self._clock.is_device
        used: list[Mark] = [start, body_end]

        def raw(mark: Mark) -> RawMark:
            used.append(mark)
            if mark.event is None and on_device:
                return (None, mark.host_ns)
            return (distance_ms(start, mark), mark.host_ns)

        groups: dict[str, int] = {}
        listed: list[RawGroup] = []
        for call in step.calls:
            if call.group.key not in groups:
                groups[call.group.key] = len(listed)
                listed.append(_raw_group(call.group))
        result = RawStep(
            global_step=step.global_step,
            step=step.step,
            epoch=step.epoch,
            tokens=step.tokens,
            start_ns=start.host_ns,
            window_ms=distance_ms(start, window_end),
            body_ms=distance_ms(start, body_end),
            body_end_ns=body_end.host_ns,
            window_end_ns=window_end.host_ns,
            host_ms=(step.host_end_ns - step.host_start_ns) / 1e6,
            groups=listed,
            calls=[_raw_call(call, groups[call.group.key], raw) for call in step.calls],
            waits=[(raw(wait.before), _call_id(wait.call)) for wait in step.waits],
            stalls=[(raw(stall.before), raw(stall.after)) for stall in step.stalls],
            final_waits=[
                (raw(w.before), None if w.after is None else raw(w.after), [_call_id(c) for c in w.calls])
                for w in step.final_waits
            ],
            ranges=[(r.name, raw(r.start), raw(r.end)) for r in step.ranges if r.end is not None],
            scalars=read_scalars(step.scalars),
            memory=step.memory,
            device=telemetry.device,
            rocm_smi_output=telemetry.rocm_smi_output,
            not_measured=telemetry.not_measured,
            gap_ms=self._gap_ms(start, used),
        )
        # The window's end is still needed: the next step starts there, or at a distance from it.
        self._clock.recycle([mark for mark in used if mark is not window_end])
        self._last_end = window_end
        return result

    def _gap_ms(self, start: Mark, used: list[Mark]) -> float:
        last = self._last_end
        if last is None or last is start:
            return 0.0
        used.append(last)
        return self._clock.distance_ms(last, start)


def _call_id(call: Call) -> CallId:
    return (call.group.key, call.seq)


def _raw_group(group: Group) -> RawGroup:
    return RawGroup(group.key, group.name, group.ranks)


def _raw_call(call: Call, group: int, raw: Callable[[Mark], RawMark]) -> RawCall:
    members = None
    if call.members is not None:
        members = [RawMember(m.op, m.bytes, m.dtype, m.peer) for m in call.members]
    timed = call.reason is None and call.start is not None and call.end is not None
    return RawCall(
        group,
        call.op,
        call.stream,
        call.bytes,
        call.dtype,
        call.seq,
        call.is_async,
        call.blocks,
        raw(call.start) if timed and call.start is not None else None,
        call.launched_ns,
        raw(call.end) if timed and call.end is not None else None,
        call.reason,
        members,
        call.on_compute,
    )
