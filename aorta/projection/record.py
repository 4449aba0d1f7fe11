"""A projected step as the records that a measured run leaves, so that the report reads it."""

import sys
import time
from pathlib import Path

from aorta.projection.collectives import busbw_factor
from aorta.projection.lanes import COMPUTE
from aorta.projection.memory import memory
from aorta.projection.pricing import Pricer
from aorta.projection.stage import STREAMS
from aorta.projection.step import Projection
from aorta.projection.timeline import placed_tasks, to_timeline
from aorta.records.schema import CollectiveRecord, MemoryRecord, RunRecord, StepRecord
from aorta.records.writer import RunFolder, move_aside
from aorta.timeline.overlap import active_segments, overlap, stream_uses
from aorta.timeline.types import Timeline

PROJECTED = "projected: nothing ran"


def write_record(folder: Path, projection: Projection, pricer: Pricer) -> Path:
    """run.json and one step of rank 0 in folder; what was there before is moved aside."""
    folder.mkdir(parents=True, exist_ok=True)
    move_aside(folder)
    timeline = to_timeline(projection, pricer)
    with RunFolder(folder, 0) as writer:
        writer.write_run(_run(projection))
        writer.steps.write(_step(projection, timeline, pricer))
    return folder


def _step(projection: Projection, timeline: Timeline, pricer: Pricer) -> StepRecord:
    plan = projection.plan
    used = memory(projection.model, plan, projection.hardware.memory.hbm_bytes)
    missing = dict.fromkeys(("loss", "lr", "grad_norm", "clock_error_us", "device"), PROJECTED)
    collectives = None
    if plan.pp == 1:
        collectives = _collectives(projection, pricer)
    else:
        missing["collectives"] = "inside the passes of the pipeline's chunks"
    return StepRecord(
        rank=0,
        world_size=plan.world_size,
        epoch=0,
        step=0,
        global_step=0,
        loss=None,
        lr=None,
        grad_norm=None,
        tokens=plan.global_batch_size * plan.seq_len // plan.dp,
        source="projected",
        start_unix_ns=timeline.origin_unix_ns,
        clock_error_us=None,
        step_ms=projection.step_s * 1e3,
        between_steps_ms=0.0,
        host_ms=projection.host_s * 1e3,
        streams=stream_uses(timeline),
        overlap=overlap(timeline),
        active_segments=active_segments(timeline),
        collectives=collectives,
        num_collectives=len(collectives or ()),
        memory=MemoryRecord(
            allocated_bytes=round(used.allocated_bytes),
            reserved_bytes=round(used.total_bytes),
            peak_allocated_bytes=round(used.allocated_bytes),
        ),
        not_measured=missing,
    )


def _collectives(projection: Projection, pricer: Pricer) -> list[CollectiveRecord]:
    pricer = pricer.with_plan(projection.plan)
    axes = {stream: axis for axis, stream in STREAMS.items() if axis != "edp"}
    counts: dict[str, int] = {}
    found: list[CollectiveRecord] = []
    for task, start_s, end_s in placed_tasks(projection, pricer):
        if task.stream == COMPUTE:
            continue
        axis = axes[task.stream]
        num_ranks, _ = pricer.placement(axis)
        seq = counts[axis] = counts.get(axis, -1) + 1
        rate = task.size_bytes / (end_s - start_s) / 1e9
        found.append(
            CollectiveRecord(
                op=task.op,
                stream=task.stream,
                group=axis,
                ranks=[member * pricer.stride(axis) for member in range(num_ranks)],
                bytes=round(task.size_bytes),
                dtype="bfloat16",
                seq=seq,
                start_ms=start_s * 1e3,
                end_ms=end_s * 1e3,
                algbw_gb_s=rate,
                busbw_gb_s=rate * busbw_factor(task.op, num_ranks),
            )
        )
    return found


def _run(projection: Projection) -> RunRecord:
    model, plan = projection.model, projection.plan
    shape = {
        "h": model.hidden,
        "f": model.experts.ffn if model.experts else model.ffn,
        "nh": model.num_heads,
        "nkv": model.num_kv_heads,
        "V": model.vocab_size,
        "L": model.num_layers,
        "recompute": plan.recompute == "full",
    }
    if model.experts:
        shape |= {"E": model.experts.num_experts, "k": model.experts.num_active}
    now = time.time_ns()
    return RunRecord(
        started_unix_ns=now,
        finished_unix_ns=now,
        world_size=plan.world_size,
        command=sys.argv,
        config=None,
        model=shape,
        layout={
            "world": plan.world_size,
            "dp": plan.dp,
            "tp": plan.tp,
            "ep": plan.ep,
            "mbs": plan.micro_batch_size,
            "seq": plan.seq_len,
            "grad_accum": plan.num_micro_batches,
            "compile": plan.stack == "compiled",
        },
        versions={},
        devices=[{"name": projection.hardware.title}],
        environment={},
        clock_anchors=[],
        coverage={},
        placement=None,
        not_measured={name: PROJECTED for name in ("versions", "environment", "clock_anchors", "coverage")},
    )
