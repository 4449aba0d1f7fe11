"""A run of two ranks with times in some steps only."""

import random

import msgspec

from tests.records.run_folders import run_record, step_record, step_timeline, write_run

REASON = "not timed in this step (recording.timed_every)"


def row_of(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}  ")]
    return line


def sparse_run(
    folder,
    exposed=1.0,
    num_steps=32,
    every=4,
    noise=0.0,
    untimed_ms=10.0,
    calls=lambda step, timed: [],
    **changes,
):
    """Two ranks; every step of 10 ms, with relative noise of its own in all its times; 8 ms of compute. Where
    it was not timed only its length is known, untimed_ms (of the step), and which collectives
    it called."""
    rng = random.Random(folder.name)
    records = []
    for step in range(num_steps):
        scale = rng.gauss(1, noise)
        for rank in (0, 1):
            parts = [8.0 * scale, 3.0 * scale, exposed * scale, (2.0 - exposed) * scale]
            line = step_timeline(*parts, rank=rank, step=step)
            record = step_record(line, **{"collectives": calls(step, step % every == 0)} | changes)
            known = record.overlap
            if step % every:
                nothing = {name: {} if name.endswith("by_op") else None for name in known.__struct_fields__}
                record = msgspec.structs.replace(
                    record,
                    step_ms=(untimed_ms(step) if callable(untimed_ms) else untimed_ms) * scale,
                    overlap=msgspec.structs.replace(known, **nothing),
                    streams={},
                    active_segments=None,
                    not_measured={"overlap": REASON},
                )
            records.append(record)
    return write_run(folder, records, run_record())
