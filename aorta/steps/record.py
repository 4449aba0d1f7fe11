"""Fields that step records of every source share.

`noted_fields` and `collective_record` serve event_steps and kernel_steps. `partial_record` makes a record for
traces, which know less.
"""

import math
from collections.abc import Callable
from typing import Any

from aorta.records.schema import (
    CollectiveMember,
    CollectiveRecord,
    HostSpan,
    HostUse,
    MemoryRecord,
    StepRecord,
)
from aorta.steps.notes import CollectiveCall, HostNote, RecordedStep, ResolverSettings, Use
from aorta.timeline.collective import algbw_gb_s, busbw_gb_s
from aorta.timeline.overlap import rounded
from aorta.timeline.types import OverlapRecord, Source

LOGGED_FIELDS = ("loss", "lr", "grad_norm")
"""Logged values that have a field of their own in a record; all others go into `scalars`."""

NO_DETAILS = "kept in some steps"
"""Reason in `not_measured` of steps that are written without their details."""

NO_OVERLAP = OverlapRecord()

UNMEASURED: dict[str, Any] = {
    "epoch": 0, "clock_error_us": None, "step_ms": None, "between_steps_ms": None, "host_ms": None,
    "overlap": NO_OVERLAP, "num_collectives": 0,
}  # fmt: skip


def noted_fields(step: RecordedStep, settings: ResolverSettings) -> dict[str, Any]:
    """The fields of a step's record that do not depend on what timed it."""
    return dict(
        rank=settings.rank,
        world_size=settings.world_size,
        epoch=step.epoch,
        step=step.step,
        global_step=step.global_step,
        loss=step.scalars.get("loss"),
        lr=step.scalars.get("lr"),
        grad_norm=step.scalars.get("grad_norm"),
        scalars=other_scalars(step),
        tokens=step.tokens,
        host_ms=(step.host_end_ns - step.host_start_ns) / 1e6,
        instrument_ms=round(step.own_ns / 1e6, 4),
        num_collectives=len(step.calls) if step.num_calls is None else step.num_calls,
        modules=step.modules,
        host_use=host_use(step.use_at_start, step.use_at_end),
        memory=memory_record(step),
        device=step.device,
        run_id=settings.run_id,
        attempt=settings.attempt,
        rollbacks=step.rollbacks,
        gap=step.gap,
    )


def left_out_record(step: RecordedStep, settings: ResolverSettings, source: Source) -> StepRecord:
    """The record of a step that is not recorded: its times by the host's clock, and what the program logged.

    source: of the recorded steps beside it.
    """
    assert step.left_out is not None
    # `recorded` says that the rest was not measured; reasons for each of it would be half of such a line.
    not_measured = scalar_reasons(step) | dict.fromkeys(("overlap", "collectives"), step.left_out)
    not_measured.pop("memory", None)
    return StepRecord(
        **noted_fields(step, settings),
        source=source,
        is_recorded=False,
        start_unix_ns=step.start_ns + settings.unix_minus_monotonic_ns,
        clock_error_us=None if settings.on_device else 1.0,
        step_ms=rounded((step.window_end_ns - step.start_ns) / 1e6),
        between_steps_ms=rounded((step.window_end_ns - step.body_end_ns) / 1e6),
        overlap=NO_OVERLAP,
        host_spans=host_spans(step, lambda ns: (ns - step.start_ns) / 1e6),
        not_measured=not_measured,
    )


def partial_record(rank: int, world_size: int, global_step: int, **measured: Any) -> StepRecord:
    """A record of the fields in `measured`; all others are null or empty."""
    place = {"rank": rank, "world_size": world_size, "step": global_step, "global_step": global_step}
    return StepRecord(**{**UNMEASURED, **place, **measured})


def collective_record(
    call: CollectiveCall,
    places: dict[str, int],
    launch_ms: float | None,
    start_ms: float | None,
    end_ms: float | None,
    **measured: Any,
) -> CollectiveRecord:
    """The record of a call with the times of its marks or kernels, in ms after the step's start.

    A barrier (0 bytes) moves no data: it has times and no bandwidth. places: module_places of its step.
    """
    group = call.group
    duration_ms = None if start_ms is None or end_ms is None or not call.bytes else end_ms - start_ms
    members = call.members
    return CollectiveRecord(
        op=call.op,
        stream=call.stream,
        group=group.name,
        ranks=group.ranks,
        bytes=call.bytes,
        dtype=call.dtype,
        seq=call.seq,
        is_async=call.is_async,
        launch_ms=launch_ms,
        start_ms=start_ms,
        end_ms=end_ms,
        algbw_gb_s=algbw_gb_s(call.bytes, duration_ms),
        busbw_gb_s=busbw_gb_s(call.op, call.bytes, len(group.ranks), duration_ms),
        members=None
        if members is None
        else [CollectiveMember(op=m.op, bytes=m.bytes, dtype=m.dtype, peer=m.peer) for m in members],
        module=None if call.module is None else places[call.module],
        phase=call.phase,
        **measured,
    )


def module_places(step: RecordedStep) -> dict[str, int]:
    return {module: place for place, module in enumerate(step.modules)}


def scalar_reasons(step: RecordedStep) -> dict[str, str]:
    """`not_measured` of the values that the program gives: loss, lr, grad_norm, tokens, memory."""
    reasons = dict(step.not_measured)
    for name in LOGGED_FIELDS:
        if name not in step.scalars:
            reasons.setdefault(name, "not logged")
    for name, value in step.scalars.items():
        if not math.isfinite(value):
            field = name if name in LOGGED_FIELDS else f"scalars.{name}"
            reasons[field] = f"not finite: {value}"  # JSON has no such number
    if step.memory is None:
        reasons["memory"] = "torch's allocator is not the one in use"
    if step.tokens is None:
        reasons["tokens"] = "not given"
    return reasons


def other_scalars(step: RecordedStep) -> dict[str, float]:
    """Logged values without a field of their own that JSON can hold."""
    return {
        name: value
        for name, value in step.scalars.items()
        if name not in LOGGED_FIELDS and math.isfinite(value)
    }


def memory_record(step: RecordedStep) -> MemoryRecord | None:
    if step.memory is None:
        return None
    allocated, reserved, peak, num_retries, num_frees = step.memory
    forward, backward, optimizer = step.phase_peaks or (None, None, None)
    return MemoryRecord(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_allocated_bytes=peak,
        num_alloc_retries=num_retries,
        num_device_frees=num_frees,
        forward_bytes=forward,
        backward_bytes=backward,
        optimizer_bytes=optimizer,
    )


def host_spans(
    step: RecordedStep, host_ms: Callable[[int], float], *, with_window: bool = False
) -> list[HostSpan]:
    """The step's host notes. host_ms: turns monotonic ns into ms since the step's start.

    with_window: and first the window as the host went through it, where the device's is another.
    """
    notes = step.host_notes
    if with_window:
        notes = [HostNote("step", step.start_ns, step.window_end_ns, ""), *notes]
    return [
        HostSpan(
            note.kind,
            round(host_ms(note.start_ns), 4),
            round(host_ms(note.end_ns), 4),
            note.where,
            note.bytes,
        )
        for note in notes
    ]


def host_use(begin: Use | None, end: Use | None) -> HostUse | None:
    """Use of the cores between two readings; None where one is missing, or of another thread."""
    if begin is None or end is None or begin[0] != end[0]:
        return None
    faults = None if begin[4] is None or end[4] is None else end[4] - begin[4]
    cpu_ms = round((end[1] - begin[1]) / 1e6, 4)
    ready_ms, process_ms, system_ms = (_ms_between(begin[place], end[place]) for place in (2, 3, 5))
    return HostUse(cpu_ms, ready_ms, process_ms, faults, system_ms)


def _ms_between(begin_ns: int | None, end_ns: int | None) -> float | None:
    return None if begin_ns is None or end_ns is None else ms_of_ns(end_ns - begin_ns)


def ms_of_ns(ns: int | None) -> float | None:
    """As a line has them."""
    return None if ns is None else round(ns / 1e6, 4)
