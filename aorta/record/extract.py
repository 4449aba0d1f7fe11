"""Reads the marks of a closed step, once the device has passed them, so that it can be sent.

The sending thread calls `ready`, then `extract`. On a GPU this is all that is done in the training process:
one question to the device per mark. What the numbers mean is worked out elsewhere (aorta.steps).
"""

from typing import Any

import msgspec

from aorta.device.marks import MarkClock, NotPassedError
from aorta.record.host import Phases
from aorta.record.kernel_source import KernelSource
from aorta.record.scalars import read_scalars
from aorta.records.schema import DeviceRecord
from aorta.steps.notes import CallSequence, CollectiveCall, LearnedCalls, Mark, RecordedStep

MOST_LIKES = 32
"""Sequences of collectives that are remembered as sent."""
_NO_CALLS: dict[str, Any] = {"calls": [], "waits": [], "stalls": [], "final_waits": []}
_LEFT_BEHIND: dict[str, Any] = {"learned": None, "counts": None, "lost_futures": [], "logged": None}
"""What of a step is of use in its own process alone."""


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
        self._sequences: dict[int, tuple[list[CollectiveCall], int]] = {}
        """The latest calls that unseen steps were taken to have, by id, and the number that they have."""
        self._num_sequences = 0
        self.new_sequences: list[CallSequence] = []
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

    def extract(self, step: RecordedStep, telemetry: Telemetry) -> RecordedStep | None:
        """Return a step that is ready as it is sent, its marks read; None while something in it goes on.

        Another thread may still be about to add a note: what is returned has those of this moment. Gives the
        step's marks back to their clock, to be used again.
        """
        if step.left_out is not None:
            if step.logged is not None and self._clock.is_device:
                self._clock.recycle([step.logged])
            return _sent(step, telemetry, **_NO_CALLS)
        calls = _with_phases(step)
        if step.by_kernels:
            learned = None if step.learned is None else self._learned(step.learned)
            is_unknown = step.is_unseen and learned is None
            return _sent(
                step,
                telemetry,
                **_NO_CALLS | {"calls": calls},
                learned=learned,
                num_calls=0 if is_unknown else None,
            )
        start, window_end = step.start, step.window_end
        assert start is not None
        assert window_end is not None
        timed = [call if _is_timed(call) else _without_times(call) for call in calls]
        waits, stalls = list(step.waits), list(step.stalls)
        final_waits = [msgspec.structs.replace(wait) for wait in step.final_waits]
        marks = [mark for call in timed for mark in (call.start, call.end)]
        marks += [wait.start for wait in waits]
        for stall in stalls:
            marks += (stall.start,) if stall.end is stall.start else (stall.start, stall.end)
        marks += [mark for wait in final_waits for mark in (wait.start, wait.end)]
        read = [window_end, *(mark for mark in (step.body_end, *marks) if mark is not None)]
        try:
            distances_ms = self._clock.distances_ms(start, read)
        except NotPassedError:
            return None
        for mark, ms in zip(read, distances_ms, strict=True):
            mark.ms = ms
        last_end, self._last_end = self._last_end, window_end
        gap_ms = 0.0 if last_end is None or last_end is start else self._clock.distance_ms(last_end, start)
        if self._clock.is_device:
            # The window's end is still needed: the next step starts there, or at a distance from it.
            passed_marks = [start, *read] if last_end is None else [start, *read, last_end]
            self._clock.recycle([mark for mark in passed_marks if mark is not window_end])
        return _sent(
            step,
            telemetry,
            calls=timed,
            waits=waits,
            stalls=stalls,
            final_waits=final_waits,
            gap_ms=gap_ms,
            untimed=step.untimed or _unseen_waits(step),
        )

    def _learned(self, learned: LearnedCalls) -> LearnedCalls:
        """Return it as it is sent; the collectives go before it, unless they were sent."""
        calls = learned.calls
        if id(calls) not in self._sequences:
            if len(self._sequences) == MOST_LIKES:
                del self._sequences[next(iter(self._sequences))]
            self._num_sequences += 1
            self._sequences[id(calls)] = calls, self._num_sequences
            self.new_sequences.append(CallSequence(self._num_sequences, list(calls)))
        return LearnedCalls([], learned.first_numbers, self._sequences[id(calls)][1])


def host_only(step: RecordedStep, reason: str) -> RecordedStep:
    """Return what the host knows of a closed step that kernel records time. reason: why the rest is missing.

    The device is not asked, so scalars that are on their way from it are left out. Of the collectives only
    their number is kept.
    """
    scalars = {name: value for name, value in step.scalars.items() if isinstance(value, float)}
    missing = ("device", "collectives", *(name for name in step.scalars if name not in scalars))
    return msgspec.structs.replace(
        step,
        **_NO_CALLS,
        **_LEFT_BEHIND,
        scalars=scalars,
        host_notes=[],
        not_measured=dict.fromkeys(missing, reason),
        kernels_lost=reason,
        num_calls=len(step.calls if step.learned is None else step.learned.calls),
    )


def _sent(step: RecordedStep, telemetry: Telemetry, **read: Any) -> RecordedStep:
    """Return the step as it is sent, with `read` in place of what it holds."""
    return msgspec.structs.replace(
        step,
        **_LEFT_BEHIND | read,
        scalars=read_scalars(step.scalars),
        host_notes=list(step.host_notes),
        device=telemetry.device,
        not_measured=telemetry.not_measured,
    )


def _with_phases(step: RecordedStep) -> list[CollectiveCall]:
    """Return the calls of this moment, in each the phase of the step."""
    calls, phases = list(step.calls), Phases(step)
    for call in calls:
        call.phase = phases.of_call(call)
    return calls


def _is_timed(call: CollectiveCall) -> bool:
    return call.reason is None and call.start is not None and call.end is not None


def _without_times(call: CollectiveCall) -> CollectiveCall:
    return msgspec.structs.replace(call, start=None, end=None)


def _unseen_waits(step: RecordedStep) -> str | None:
    """Say why it is not known how long compute stood still; None: every wait was seen."""
    unseen = [call for call in step.lost_futures if not (call.waited or call.backward_waited)]
    if not unseen:
        return None
    return (
        f"the futures of {len(unseen)} collectives ({unseen[0].op}) were taken, and nobody was seen to wait "
        "for them"
    )
