"""Lines of the steps that the overhead leaves out: many at once, and cheaply.

In a short loop nearly every step is one, so what a line of it takes is most of what aorta costs there. A line
differs from the one before in a few numbers: `bodies` puts these into a template, which it makes of a whole
record, so that both ways write the same.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from aorta.records.schema import StepRecord
from aorta.steps.notes import LeftOutStep, LeftOutSteps, Mark, RecordedStep, ResolverSettings
from aorta.steps.record import left_out_record
from aorta.steps.told import REPEATED, Told
from aorta.timeline.types import Source

MOST_TEMPLATES = 64
_CODES = {
    "step": b"%d", "global_step": b"%d", "start_unix_ns": b"%d", "step_ms": b"%.6f",
    "between_steps_ms": b"%.6f", "host_ms": b"%.6f", "host_use": b"[%.4f,%b]", "instrument_ms": b"%.4f",
}  # fmt: skip
"""Fields that differ from line to line, and how each is written, which is quicker than the shortest form of a
number; the times of host_spans are between them."""
_Kind = tuple[str, str, int | None]
"""A note of the host without its times."""
_ANY = LeftOutStep(0, 0, 0, 0, 0, 0, None, 0, [])


def as_steps(steps: LeftOutSteps) -> Iterator[RecordedStep]:
    """The same steps, each as a message of its own would be."""
    for place, step in enumerate(steps.steps):
        has_sample = place == 0 and steps.device is not None
        yield RecordedStep(
            global_step=step.global_step,
            step=step.global_step,
            epoch=0,
            tokens=None,
            start=Mark(step.start_ns),
            body_end=Mark(step.body_end_ns),
            window_end=Mark(step.end_ns),
            host_start_ns=step.start_ns,
            host_end_ns=step.body_end_ns,
            device=steps.device if has_sample else None,
            not_measured=steps.not_measured,
            rollbacks=step.rollbacks,
            host_notes=step.notes,
            use_at_start=(0, 0, 0),
            use_at_end=(0, step.cpu_ns, step.ready_ns),
            own_ns=step.own_ns,
            left_out=steps.reason,
        )


class LeftOutLines:
    """Makes the lines of one rank's steps."""

    def __init__(self, settings: ResolverSettings, source: Source) -> None:
        """source: of the recorded steps beside them."""
        self._settings, self._source = settings, source
        self._encode = msgspec.json.Encoder().encode
        self._of: LeftOutSteps | None = None
        """The steps, without these, that the templates are made for."""
        self._templates: dict[tuple[int, bool, tuple[_Kind, ...]], bytes] = {}
        """By rollbacks, whether it is the first of the steps, and what the host did."""

    def records(self, steps: LeftOutSteps) -> Iterator[StepRecord]:
        """The records, as `left_out_record` makes them and their lines have them."""
        told = Told()
        return (told.rest_of(left_out_record(step, self._settings, self._source)) for step in as_steps(steps))

    def bodies(self, steps: LeftOutSteps) -> list[bytes]:
        """The records as JSON."""
        offset_ns, templates = self._settings.unix_minus_monotonic_ns, self._templates
        of = msgspec.structs.replace(steps, steps=[])
        if of != self._of or len(templates) > MOST_TEMPLATES:
            self._of = of
            templates.clear()
        bodies: list[bytes] = []
        for step in steps.steps:
            start_ns, body_end_ns, end_ns, ready_ns = (
                step.start_ns, step.body_end_ns, step.end_ns, step.ready_ns,
            )  # fmt: skip
            kinds = tuple(
                [(note.kind, "" if note.kind in REPEATED else note.where, note.bytes) for note in step.notes]
            )
            key = (step.rollbacks, not bodies, kinds)
            template = templates.get(key)
            if template is None:
                template = templates[key] = self._made(*key)
            times_ms = [(ns - start_ns) / 1e6 for note in step.notes for ns in (note.start_ns, note.end_ns)]
            bodies.append(
                template
                % (
                    step.global_step,
                    step.global_step,
                    start_ns + offset_ns,
                    (end_ns - start_ns) / 1e6,
                    (end_ns - body_end_ns) / 1e6,
                    (body_end_ns - start_ns) / 1e6,
                    *times_ms,
                    step.cpu_ns / 1e6,
                    b"null" if ready_ns is None else b"%.4f" % (ready_ns / 1e6),
                    step.own_ns / 1e6,
                )
            )
        return bodies

    def _made(self, rollbacks: int, is_first: bool, kinds: tuple[_Kind, ...]) -> bytes:
        """A line with codes in place of what differs."""
        assert self._of is not None
        any_step = msgspec.structs.replace(_ANY, rollbacks=rollbacks)
        *_, record = self.records(msgspec.structs.replace(self._of, steps=[any_step] * (2 - is_first)))
        marks: dict[str, Any] = {name: f"<{name}>" for name in (*_CODES, "host_spans")}
        body = self._escaped(msgspec.structs.replace(record, **marks))
        for name, code in _CODES.items():
            body = body.replace(b'"<%b>"' % name.encode(), code)
        spans = b",".join(
            b"[%b,%%.4f,%%.4f,%b,%b]" % tuple(self._escaped(value) for value in kind) for kind in kinds
        )
        return body.replace(b'"<host_spans>"', b"[%b]" % spans)

    def _escaped(self, value: Any) -> bytes:
        return self._encode(value).replace(b"%", b"%%")
