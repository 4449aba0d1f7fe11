"""Makes folders of runs from Timelines, as an instrumented training leaves them."""

import random
import re
from pathlib import Path

from aorta.records.schema import RunRecord, StepRecord
from aorta.records.seal import sealed
from aorta.records.writer import RunFolder
from aorta.timeline.overlap import window_fields
from aorta.timeline.types import Kind, Span, Timeline


def sealed_again(data):
    """Lines that a test has changed, as a run would have written them."""
    bodies = [re.sub(rb',"line":[0-9]+,"crc32":"[0-9a-f]{8}"\}$', b"}", line) for line in data.splitlines()]
    return b"".join(sealed(body, number) for number, body in enumerate(bodies))


def step_timeline(compute=8.0, gather=3.0, exposed=1.0, idle=1.0, rank=0, step=0, source="events"):
    """One step: a gather that begins under compute and ends `exposed` after it, a scatter under compute."""
    spans = [
        Span(0, compute, Kind.COMPUTE),
        Span(1, 2.5, Kind.COMM, "reduce_scatter", "nccl"),
        Span(compute + exposed - gather, compute + exposed, Kind.COMM, "all_gather", "nccl"),
    ]
    window = (0.0, compute + exposed + idle)
    return Timeline.from_spans(
        spans, window, rank=rank, step=step, source=source, origin_unix_ns=(step + 1) * 10**12
    )


def step_record(timeline, world_size=2, **changes):
    fields = dict(
        rank=timeline.rank,
        world_size=world_size,
        epoch=0,
        step=timeline.step,
        global_step=timeline.step,
        loss=1.0,
        lr=None,
        grad_norm=None,
        tokens=1,
        source=timeline.source,
        start_unix_ns=timeline.origin_unix_ns,
        clock_error_us=2.0,
        step_ms=timeline.span_ms,
        between_steps_ms=0.5,
        host_ms=4.0,
        collectives=[],
        num_collectives=2,
    )
    return StepRecord(**(_fields_of(timeline) | fields | changes))


_FIELDS = {}


def _fields_of(timeline):
    """Those that the spans of its window give: tests make the same steps again and again."""
    arrays = (getattr(timeline, name) for name in ("start_ms", "end_ms", "kind", "stream", "op"))
    names = timeline.window_ms, timeline.streams, timeline.ops, timeline.compute_streams, timeline.sees_copies
    key = *names, *(array.tobytes() for array in arrays)
    if key not in _FIELDS:
        _FIELDS[key] = window_fields(timeline)
    return _FIELDS[key]


def run_record(world_size=2, **changes):
    fields = dict(
        started_unix_ns=1,
        finished_unix_ns=2,
        world_size=world_size,
        command=["train.py"],
        config={"training": {"precision": "bf16"}},
        model=None,
        layout=None,
        versions={},
        devices=[{"name": "Invented GPU"}] * world_size,
        environment={},
        clock_anchors=[],
        coverage={},
        placement="dedicated",
    )
    return RunRecord(**(fields | changes))


def write_run(folder: Path, records, run=None):
    writers = {}
    for record in records:
        if record.rank not in writers:
            writers[record.rank] = RunFolder(folder, record.rank)
        assert writers[record.rank].steps.write(record)
    if run is not None:
        next(iter(writers.values())).write_run(run)
    for writer in writers.values():
        writer.close()
    return folder


def noisy_run(folder: Path, num_steps=30, world_size=2, slowdown=1.0, seed=0, slow_first=True):
    """A run with noise and a slow first step; the numbers are invented."""
    rng = random.Random(seed)
    records = []
    for step in range(num_steps):
        compute = 34 * slowdown * rng.gauss(1, 0.01) + (260 if slow_first and step == 0 else 0)
        for rank in range(world_size):
            line = step_timeline(
                compute=compute,
                gather=12.0,
                exposed=max(0.5, rng.gauss(4 + rank, 0.4)),
                idle=max(0.2, rng.gauss(2, 0.2)),
                rank=rank,
                step=step,
            )
            records.append(step_record(line, world_size))
    return write_run(folder, records, run_record(world_size))
