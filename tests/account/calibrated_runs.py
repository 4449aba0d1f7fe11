"""Runs of two ranks whose steps have calibrated numbers beside the raw ones, or times in some steps only."""

import random

import msgspec

from aorta.timeline.types import Calibrated
from tests.records.run_folders import run_record, step_record, step_timeline, write_run

NUM_STEPS = 21
"""The first is warm-up: 20 are judged."""
RAW = dict(compute=8.0, exposed=1.0, idle=1.0)
"""comm 4.5, hidden 3.5."""


def numbers(compute=8.0, comm=4.5, exposed=1.0, step=10.0):
    return Calibrated(
        compute_ms=compute,
        comm_ms=comm,
        hidden_ms=comm - exposed,
        exposed_ms=exposed,
        idle_ms=max(0.0, step - compute - exposed),
    )


def run_of(
    folder,
    calibrated=None,
    raw=None,
    num_steps=NUM_STEPS,
    source="events",
    lacks=lambda rank, step: False,
    host_bound=lambda rank, step: None,
    **changes,
):
    """Two ranks; every step with 0.5 % noise of its own, in the raw and in the calibrated numbers alike."""
    rng = random.Random(folder.name)
    records = []
    for step in range(num_steps):
        noise = rng.gauss(1, 0.005)
        for rank in (0, 1):
            parts = {name: value * noise for name, value in (RAW | (raw or {})).items()}
            line = step_timeline(gather=3.0 * noise, rank=rank, step=step, source=source, **parts)
            record = step_record(line, 2, **changes)
            overlap = msgspec.structs.replace(record.overlap, host_bound=host_bound(rank, step))
            record = msgspec.structs.replace(record, overlap=overlap)
            if calibrated is not None and not lacks(rank, step):
                scaled = {name: getattr(calibrated, name) * noise for name in calibrated.__struct_fields__}
                overlap = msgspec.structs.replace(record.overlap, calibrated=Calibrated(**scaled))
                record = msgspec.structs.replace(record, overlap=overlap)
            records.append(record)
    return write_run(folder, records, run_record(2))


def row_of(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}  ")]
    return line


REASON = "not timed in this step (recording.timed_every)"


def sparse_run(
    folder,
    calibrated=None,
    lacks=lambda rank, step: False,
    num_steps=32,
    every=4,
    noise=0.0,
    untimed_ms=10.0,
    calls=lambda step, timed: [],
    **changes,
):
    """Two ranks; every step of 10 ms, with relative noise of its own in all its times. Where it was not
    timed only its length is known, untimed_ms, and which collectives it called."""
    rng = random.Random(folder.name)
    records = []
    for step in range(num_steps):
        scale = rng.gauss(1, noise)
        for rank in (0, 1):
            line = step_timeline(8.0 * scale, 3.0 * scale, 1.0 * scale, 1.0 * scale, rank=rank, step=step)
            record = step_record(line, **{"collectives": calls(step, step % every == 0)} | changes)
            known = record.overlap
            if step % every:
                nothing = {name: {} if name.endswith("by_op") else None for name in known.__struct_fields__}
                record = msgspec.structs.replace(
                    record,
                    step_ms=untimed_ms * scale,
                    overlap=msgspec.structs.replace(known, **nothing),
                    streams={},
                    active_segments=None,
                    not_measured={"overlap": REASON},
                )
            elif calibrated is not None and not lacks(rank, step):
                scaled = {name: getattr(calibrated, name) * scale for name in calibrated.__struct_fields__}
                overlap = msgspec.structs.replace(known, calibrated=Calibrated(**scaled))
                record = msgspec.structs.replace(record, overlap=overlap)
            records.append(record)
    return write_run(folder, records, run_record())
