"""Makes plain numbers (RawStep) of a closed step's marks, once the device has passed them.

The sending thread calls `ready`, then `extract`. On a GPU this is all that is done in the training process:
one question to the device per mark. What the numbers mean is worked out elsewhere (aorta.steps).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from aorta.device.marks import Mark, MarkClock, NotPassedError
from aorta.record.calls import CollectiveCall, LearnedCalls, RecordedStep
from aorta.record.host import Phases, use_ms
from aorta.record.kernel_source import KernelSource
from aorta.record.scalars import read_scalars
from aorta.records.schema import DeviceRecord
from aorta.steps.raw import (
    CallId,
    RawCall,
    RawGroup,
    RawMark,
    RawMember,
    RawSequence,
    RawStep,
)

MOST_LIKES = 32
"""Sequences of collectives that are remembered as sent."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of the device that go into a step's record beside its own numbers."""

    device: DeviceRecord | None = None
    not_measured: dict[str, str] = {}


class Extractor:
    """Reads the closed steps of one recorder, in order."""

    def __init__(
        self, clock: MarkClock, kernels: KernelSource | None = None, first_mark: Mark | None = None
    ) -> None:
        """first_mark: the run's first mark, from which EventSteps counts the device's time."""
        self._clock = clock
        self._kernels = kernels
        self._sequences: dict[int, tuple[RecordedStep, RawSequence]] = {}
        """The latest steps that unseen ones were like, by their ids, and what was sent of them."""
        self._num_sequences = 0
        self.new_sequences: list[RawSequence] = []
        """Sequences that the steps extracted since refer to: to be sent before them, and cleared."""
        self._last_end: Mark | None = first_mark
        """End of the window before; this step starts there, unless the recorder was paused."""

    def ready(self, step: RecordedStep, is_late: bool) -> bool:
        """True once the step's window has ended on the device and every call has an end to ask for.

        Never blocks. Asks the device about one mark only; `extract` asks the others for their times and
        returns None where one is missing. is_late: wait no longer for ends that only a wait would tell.
        """
        assert step.window_end is not None
        if step.left_out is not None:
            return step.logged is None or self._clock.passed(step.logged)
        if step.by_kernels:
            assert self._kernels is not None
            return step.kernels_lost is not None or self._kernels.has_passed(step.window_end.number)
        if not self._clock.passed(step.window_end):
            return False
        for call in step.calls:
            if call.reason is None and call.end is None:
                if call.ends_unseen:  # only a wait in the same step would have told its end
                    call.reason = "not waited for within its step"
                elif not is_late:
                    return False
                else:
                    call.reason = "never waited for"
        return True

    def extract(self, step: RecordedStep, telemetry: Telemetry) -> RawStep | None:
        """Return the numbers of a step that is ready; None while something in it goes on.

        Gives the step's marks back to their clock, to be used again.
        """
        start, body_end, window_end = step.start, step.body_end, step.window_end
        assert start is not None
        assert body_end is not None
        assert window_end is not None
        if step.left_out is not None:
            return self._left_out(step, telemetry)
        notes = _Notes(step)
        if step.by_kernels:
            return self._by_kernels(step, notes, telemetry)
        marks = [window_end, body_end, *notes.marks()]
        try:
            distances_ms = self._clock.distances_ms(start, marks)
        except NotPassedError:
            return None
        window_ms, body_ms = distances_ms[:2]
        assert window_ms is not None
        assert body_ms is not None
        # Called once per mark, in the order of _Notes.marks; a bound __next__ costs no Python frame.
        raw = iter([(ms, mark.host_ns) for ms, mark in zip(distances_ms, marks, strict=True)][2:]).__next__
        groups = {id(call.group): call.group for call in notes.calls}
        index = {group: i for i, group in enumerate(groups)}
        result = RawStep(
            **_host_numbers(step),
            window_ms=window_ms,
            body_ms=body_ms,
            groups=[RawGroup(group.key, group.name, group.ranks) for group in groups.values()],
            calls=[
                _raw_call_by_marks(call, index[id(call.group)], raw, timed, notes)
                for call, timed in zip(notes.calls, notes.timed, strict=True)
            ],
            waits=[(raw(), _call_id(wait.call)) for wait in notes.waits] if notes.waits else [],
            stalls=[
                (stall_start := raw(), stall_start if stall.end is stall.start else raw())
                for stall in notes.stalls
            ]
            if notes.stalls
            else [],
            final_waits=[
                (raw(), raw() if ended else None, [_call_id(call) for call in wait.calls])
                for wait, ended in zip(notes.final_waits, notes.ended, strict=True)
            ]
            if notes.final_waits
            else [],
            scalars=read_scalars(step.scalars),
            **msgspec.structs.asdict(telemetry),
            gap_ms=self._gap_ms(start),
            untimed=step.untimed or _unseen_waits(step),
            modules=list(notes.modules),
            host_notes=list(step.host_notes),
        )
        # The window's end is still needed: the next step starts there, or at a distance from it.
        last_end, self._last_end = self._last_end, window_end
        if self._clock.is_device:
            passed_marks = [start, *marks] if last_end is None else [start, *marks, last_end]
            self._clock.recycle([mark for mark in passed_marks if mark is not window_end])
        return result

    def _by_kernels(self, step: RecordedStep, notes: "_Notes", telemetry: Telemetry) -> RawStep:
        """Return the host's numbers of a step whose times are in the kernel records."""
        groups = {id(call.group): call.group for call in notes.calls}
        index = {group: i for i, group in enumerate(groups)}
        return RawStep(
            is_unseen=step.is_unseen,
            learned=None if step.learned is None else self._learned(step.learned),
            num_calls=0 if step.is_unseen and step.learned is None else None,
            **_numbers_without_times(step),
            groups=[RawGroup(group.key, group.name, group.ranks) for group in groups.values()],
            calls=[_raw_call_by_kernels(call, index[id(call.group)], notes) for call in notes.calls],
            scalars=read_scalars(step.scalars),
            **msgspec.structs.asdict(telemetry),
            kernels_lost=step.kernels_lost,
            modules=list(notes.modules),
            host_notes=list(step.host_notes),
        )

    def _learned(self, learned: LearnedCalls) -> tuple[int, list[int]]:
        """Return what RawStep.learned holds."""
        if id(learned.like) not in self._sequences:
            if len(self._sequences) == MOST_LIKES:
                del self._sequences[next(iter(self._sequences))]
            self._num_sequences += 1
            sequence = _sequence(self._num_sequences, learned.like)
            self._sequences[id(learned.like)] = learned.like, sequence
            self.new_sequences.append(sequence)
        sequence = self._sequences[id(learned.like)][1]
        return sequence.number, [learned.first_numbers.get(group.key, 0) for group in sequence.groups]

    def _left_out(self, step: RecordedStep, telemetry: Telemetry) -> RawStep:
        """Return what is known of a step that is not recorded: the host's times, and what was logged."""
        if step.logged is not None and self._clock.is_device:
            self._clock.recycle([step.logged])
        return RawStep(
            **_numbers_without_times(step),
            scalars=read_scalars(step.scalars),
            **msgspec.structs.asdict(telemetry),
            left_out=step.left_out,
            host_notes=list(step.host_notes),
        )

    def _gap_ms(self, start: Mark) -> float:
        last = self._last_end
        return 0.0 if last is None or last is start else self._clock.distance_ms(last, start)


def host_only(step: RecordedStep, reason: str) -> RawStep:
    """Return what the host knows of a closed step that kernel records time. reason: why the rest is missing.

    The device is not asked, so scalars that are on their way from it are left out. Of the collectives only
    their number is kept.
    """
    scalars = {name: value for name, value in step.scalars.items() if isinstance(value, float)}
    missing = ("device", "collectives", *(name for name in step.scalars if name not in scalars))
    return RawStep(
        **_numbers_without_times(step),
        scalars=scalars,
        not_measured=dict.fromkeys(missing, reason),
        kernels_lost=reason,
        num_calls=len(step.calls if step.learned is None else step.learned.like.calls),
    )


def _numbers_without_times(step: RecordedStep) -> dict[str, Any]:
    """Return the fields of a RawStep that kernel records time: the host's numbers, and its marks' numbers."""
    assert step.start is not None
    assert step.body_end is not None
    assert step.window_end is not None
    return _host_numbers(step) | {
        "window_ms": 0.0,
        "body_ms": 0.0,
        "kernel_marks": (step.start.number, step.body_end.number, step.window_end.number),
    }


def _host_numbers(step: RecordedStep) -> dict[str, Any]:
    """Return the fields of a RawStep that the host knows, whatever times the device."""
    assert step.start is not None
    assert step.body_end is not None
    assert step.window_end is not None
    return {
        "global_step": step.global_step,
        "step": step.step,
        "epoch": step.epoch,
        "tokens": step.tokens,
        "start_ns": step.start.host_ns,
        "body_end_ns": step.body_end.host_ns,
        "window_end_ns": step.window_end.host_ns,
        "host_ms": (step.host_end_ns - step.host_start_ns) / 1e6,
        "memory": step.memory,
        "phase_peaks": step.phase_peaks,
        "rollbacks": step.rollbacks,
        "gap": step.gap,
        "host_use": use_ms(step.use_at_start, step.use_at_end),
        "own_ms": step.own_ns / 1e6,
        "is_detailed": step.is_detailed,
    }


def _sequence(number: int, like: RecordedStep) -> RawSequence:
    """Return the collectives of a step that was seen, for those that are like it."""
    notes = _Notes(like)
    groups = {id(call.group): call.group for call in notes.calls}
    index = {group: i for i, group in enumerate(groups)}
    num_of_group: Counter[int] = Counter()
    calls = []
    for call in notes.calls:
        group = index[id(call.group)]
        raw = _raw_call_by_kernels(call, group, notes)
        calls.append(msgspec.structs.replace(raw, seq=num_of_group[group], launched_ns=0))
        num_of_group[group] += 1
    return RawSequence(
        number,
        [RawGroup(group.key, group.name, group.ranks) for group in groups.values()],
        calls,
        list(notes.modules),
    )


class _Notes:
    """A closed step's notes at one moment: another thread may still be about to add some."""

    def __init__(self, step: RecordedStep) -> None:
        self.calls = list(step.calls)
        self.timed = [c.reason is None and c.start is not None and c.end is not None for c in self.calls]
        self.waits = list(step.waits)
        self.stalls = list(step.stalls)
        self.final_waits = list(step.final_waits)
        self.ended = [wait.end is not None for wait in self.final_waits]
        self.modules: dict[str, int] = {}
        self.phases = Phases(step)

    def module(self, call: CollectiveCall) -> int | None:
        """Return the index of the call's module among the step's modules."""
        if call.module is None:
            return None
        return self.modules.setdefault(call.module, len(self.modules))

    def marks(self) -> list[Mark]:
        """Return every mark that has a time, in the order in which a RawStep holds them."""
        if not (self.calls or self.waits or self.stalls or self.final_waits):
            return []
        marks: list[Mark | None] = []
        for call, timed in zip(self.calls, self.timed, strict=True):
            if timed:
                marks += (call.start, call.end)
        marks += [wait.start for wait in self.waits]
        for stall in self.stalls:
            marks += (stall.start,) if stall.end is stall.start else (stall.start, stall.end)
        for wait, ended in zip(self.final_waits, self.ended, strict=True):
            marks += (wait.start, wait.end) if ended else (wait.start,)
        return marks  # type: ignore[return-value]  # those that may be None were left out


def _unseen_waits(step: RecordedStep) -> str | None:
    """Say why it is not known how long compute stood still; None: every wait was seen."""
    if not step.lost_futures:
        return None
    unseen = [call for call in step.lost_futures if not (call.waited or call.backward_waited)]
    if not unseen:
        return None
    return (
        f"the futures of {len(unseen)} collectives ({unseen[0].op}) were taken, and nobody was seen to wait "
        "for them"
    )


def _call_id(call: CollectiveCall) -> CallId:
    return (call.group.key, call.seq)


def _members(call: CollectiveCall) -> list[RawMember] | None:
    if call.members is None:
        return None
    return [RawMember(m.op, m.bytes, m.dtype, m.peer) for m in call.members]


def _raw_call_by_kernels(call: CollectiveCall, group: int, notes: _Notes) -> RawCall:
    """Return a call without times, which its kernels have; a call of CPU tensors has its own, by the host."""
    if call.start is not None and call.end is not None:
        return _raw_call(call, group, notes, (None, call.start.host_ns), (None, call.end.host_ns))
    return _raw_call(call, group, notes, None, None)


def _raw_call_by_marks(
    call: CollectiveCall, group: int, raw: Callable[[], RawMark], timed: bool, notes: _Notes
) -> RawCall:
    start = raw() if timed else None
    end = raw() if timed else None
    return _raw_call(call, group, notes, start, end, blocks=call.blocks, on_compute=call.on_compute)


def _raw_call(
    call: CollectiveCall,
    group: int,
    notes: _Notes,
    start: RawMark | None,
    end: RawMark | None,
    *,
    blocks: bool = False,
    on_compute: bool = False,
) -> RawCall:
    return RawCall(
        group=group,
        op=call.op,
        stream=call.stream,
        bytes=call.bytes,
        dtype=call.dtype,
        seq=call.seq,
        is_async=call.is_async,
        blocks=blocks,
        start=start,
        launched_ns=call.launched_ns,
        end=end,
        reason=call.reason,
        members=_members(call),
        on_compute=on_compute,
        module=notes.module(call),
        phase=notes.phases.of_call(call),
    )
