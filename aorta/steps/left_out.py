"""Lines of the steps that the overhead leaves out: many at once, and cheaply.

In a short loop nearly every step is one, so what a line of it takes is most of what aorta costs there. A line
differs from the one before in a few numbers: `bodies` puts these into a template, which it makes of a whole
record, so that both ways write the same.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from aorta.records.schema import StepRecord
from aorta.steps.raw import LeftOutStep, LeftOutSteps, RawStep, ResolverSettings
from aorta.steps.record import left_out_record
from aorta.timeline.types import Source

_CODES = {
    "step": b"%d", "global_step": b"%d", "start_unix_ns": b"%d", "step_ms": b"%a", "between_steps_ms": b"%a",
    "host_ms": b"%a", "host_spans": b"%b", "host_use": b"[%a,%b]", "instrument_ms": b"%a",
}  # fmt: skip
"""Fields that differ from line to line, in their order there, and how each is written."""
_ANY = LeftOutStep(0, 0, 0, 0, 0, 0, None, 0, [])


def raw_steps(steps: LeftOutSteps) -> Iterator[RawStep]:
    """The same steps, each as a message of its own would be."""
    for step in steps.steps:
        yield RawStep(
            global_step=step.global_step,
            step=step.global_step,
            epoch=0,
            tokens=None,
            start_ns=step.start_ns,
            window_ms=0.0,
            body_ms=0.0,
            body_end_ns=step.body_end_ns,
            window_end_ns=step.end_ns,
            host_ms=(step.body_end_ns - step.start_ns) / 1e6,
            groups=[],
            calls=[],
            waits=[],
            stalls=[],
            final_waits=[],
            ranges=[],
            scalars={},
            memory=None,
            device=steps.device,
            rocm_smi_output=steps.rocm_smi_output,
            not_measured=steps.not_measured,
            rollbacks=step.rollbacks,
            host_notes=step.notes,
            host_use=(step.cpu_ns / 1e6, None if step.ready_ns is None else step.ready_ns / 1e6),
            own_ms=step.own_ns / 1e6,
            left_out=steps.reason,
        )


class LeftOutLines:
    """Makes the lines of one rank's steps."""

    def __init__(self, settings: ResolverSettings, source: Source) -> None:
        """source: of the recorded steps beside them."""
        self._settings, self._source = settings, source
        self._encode = msgspec.json.Encoder().encode
        self._of: tuple[LeftOutSteps, int] | None = None
        """The steps, and their rollbacks, that the template is made for."""
        self._template = b""

    def records(self, steps: LeftOutSteps) -> Iterator[StepRecord]:
        """The records, as `left_out_record` makes them."""
        return (left_out_record(step, self._settings, self._source) for step in raw_steps(steps))

    def bodies(self, steps: LeftOutSteps) -> list[bytes]:
        """The records as JSON."""
        offset_ns, encode = self._settings.unix_minus_monotonic_ns, self._encode
        bodies = []
        for step in steps.steps:
            number, start_ns, body_end_ns, end_ns = (
                step.global_step, step.start_ns, step.body_end_ns, step.end_ns,
            )  # fmt: skip
            ready_ns = step.ready_ns
            spans = [
                (
                    note.kind,
                    round((note.start_ns - start_ns) / 1e6, 4),
                    round((note.end_ns - start_ns) / 1e6, 4),
                    note.where,
                    note.bytes,
                )
                for note in step.notes
            ]
            bodies.append(
                self._template_for(steps, step.rollbacks)
                % (
                    number,
                    number,
                    start_ns + offset_ns,
                    (end_ns - start_ns) / 1e6,
                    (end_ns - body_end_ns) / 1e6,
                    (body_end_ns - start_ns) / 1e6,
                    encode(spans),
                    round(step.cpu_ns / 1e6, 4),
                    b"null" if ready_ns is None else b"%a" % round(ready_ns / 1e6, 4),
                    round(step.own_ns / 1e6, 4),
                )
            )
        return bodies

    def _template_for(self, steps: LeftOutSteps, rollbacks: int) -> bytes:
        if self._of is None or not _are_alike(self._of, (steps, rollbacks)):
            self._of = steps, rollbacks
            self._template = self._made(steps, rollbacks)
        return self._template

    def _made(self, steps: LeftOutSteps, rollbacks: int) -> bytes:
        """A line with codes in place of what differs."""
        any_step = msgspec.structs.replace(_ANY, rollbacks=rollbacks)
        (record,) = self.records(msgspec.structs.replace(steps, steps=[any_step]))
        marks: dict[str, Any] = {name: f"<{name}>" for name in _CODES}
        body = self._encode(msgspec.structs.replace(record, **marks)).replace(b"%", b"%%")
        for name, code in _CODES.items():
            body = body.replace(b'"<%b>"' % name.encode(), code)
        return body


def _are_alike(one: tuple[LeftOutSteps, int], other: tuple[LeftOutSteps, int]) -> bool:
    """True where the lines of both differ in the fields of _CODES alone."""
    if one[0] is other[0]:
        return one[1] == other[1]
    empty = (msgspec.structs.replace(steps, steps=[]) for steps, _ in (one, other))
    return one[1] == other[1] and next(empty) == next(empty)
