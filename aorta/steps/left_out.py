"""Records of the steps that the overhead leaves out: many at once, and cheaply.

In a short loop nearly every step is one, so what a line of it takes is most of what aorta costs there. It
differs from the one before in a few numbers, so these alone are put into the record of that one.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from aorta.records.schema import DeviceRecord, HostSpan, HostUse, StepRecord
from aorta.steps.notes import LeftOutStep, LeftOutSteps, Mark, RecordedStep, ResolverSettings
from aorta.steps.record import left_out_record, ms_of_ns
from aorta.steps.told import REPEATED, Told
from aorta.timeline.types import Source


def left_out_records(steps: LeftOutSteps, settings: ResolverSettings, source: Source) -> Iterator[StepRecord]:
    """The records of neighbouring steps as `left_out_record` makes them and their lines have them.

    source: of the recorded steps beside them.
    """
    told, offset_ns = Told(), settings.unix_minus_monotonic_ns
    last: StepRecord | None = None
    for place, step in enumerate(steps.steps):
        if last is None or place == 1 or last.rollbacks != step.rollbacks:
            whole = _recorded(step, steps, None if place else steps.device)
            last = told.rest_of(left_out_record(whole, settings, source))
        else:
            start_ns = step.start_ns
            last = replace(
                last,
                step=step.global_step,
                global_step=step.global_step,
                start_unix_ns=start_ns + offset_ns,
                step_ms=(step.end_ns - start_ns) / 1e6,
                between_steps_ms=(step.end_ns - step.body_end_ns) / 1e6,
                host_ms=(step.body_end_ns - start_ns) / 1e6,
                host_spans=[
                    HostSpan(
                        note.kind,
                        round((note.start_ns - start_ns) / 1e6, 4),
                        round((note.end_ns - start_ns) / 1e6, 4),
                        "" if note.kind in REPEATED else note.where,
                        note.bytes,
                    )
                    for note in step.notes
                ],
                host_use=HostUse(
                    round(step.cpu_ns / 1e6, 4), ms_of_ns(step.ready_ns), ms_of_ns(step.process_ns)
                ),
                instrument_ms=round(step.own_ns / 1e6, 4),
            )
        yield last


def _recorded(step: LeftOutStep, steps: LeftOutSteps, device: DeviceRecord | None) -> RecordedStep:
    """One of the steps, as a message of its own would be."""
    return RecordedStep(
        global_step=step.global_step,
        step=step.global_step,
        epoch=0,
        tokens=None,
        start=Mark(step.start_ns),
        body_end=Mark(step.body_end_ns),
        window_end=Mark(step.end_ns),
        host_start_ns=step.start_ns,
        host_end_ns=step.body_end_ns,
        device=device,
        not_measured=steps.not_measured,
        rollbacks=step.rollbacks,
        host_notes=step.notes,
        use_at_start=(0, 0, 0, 0, None, None),
        use_at_end=(0, step.cpu_ns, step.ready_ns, step.process_ns, None, None),
        own_ns=step.own_ns,
        left_out=steps.reason,
    )
