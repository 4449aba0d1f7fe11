"""A projected step as a Timeline, and as the records of a measured run, so that the report reads it."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aorta.errors import ConfigError
from aorta.projection import pipeline
from aorta.projection.chunks import chunk_tasks, chunk_times
from aorta.projection.memory import memory
from aorta.projection.prices import Pricer
from aorta.projection.step import Projection, build_stages, micro_batches, transfer_s
from aorta.projection.streams import COMPUTE, STREAMS, StreamTask, run
from aorta.records.schema import NOTHING_NOTED, CollectiveRecord, MemoryRecord, RunRecord, StepRecord
from aorta.records.writer import RunFolder, move_aside
from aorta.steps.record import partial_record
from aorta.timeline.collective import busbw_factor
from aorta.timeline.overlap import window_fields
from aorta.timeline.types import Kind, Span, Timeline

PROJECTED = "projected: nothing ran"
"""Reason in a record for what only a run could measure."""
MOST_RANKS = 64
"""Reports want a file of every rank, so a projection of more than these is not written."""
MOST_TASKS = 200_000
"""Most tasks of one stage's step under a pipeline."""


def write_record(folder: Path, projection: Projection, pricer: Pricer) -> Path:
    """run.json and one step of every rank in folder; what was there before is moved aside."""
    plan = projection.plan
    if plan.world_size > MOST_RANKS:
        raise ConfigError(
            f"--log-dir writes a file per rank, for up to {MOST_RANKS} of them; this layout has "
            f"{plan.world_size}, project a smaller --dp"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        move_aside(folder)
    except OSError as error:
        raise ConfigError(f"--log-dir {folder}: cannot be written: {error.strerror}") from None
    pricer = pricer.with_plan(plan)
    ranks_per_stage = plan.world_size // plan.pp
    for stage in range(plan.pp):
        record = _step(projection, to_timeline(projection, pricer, stage=stage), pricer)
        for rank in range(stage * ranks_per_stage, (stage + 1) * ranks_per_stage):
            with RunFolder(folder, rank) as writer:
                if rank == 0:
                    writer.write_run(_run(projection))
                writer.steps.write(_record_of_rank(record, rank, pricer))
    return folder


def to_timeline(projection: Projection, pricer: Pricer, stage: int = 0) -> Timeline:
    """The step of a rank: all ranks are alike, under pipeline parallelism those of one stage.

    Every kernel is a span.
    """
    pricer = pricer.with_plan(projection.plan)
    if projection.plan.pp > 1:
        spans = list(_pipeline_spans(projection, pricer, stage))
    else:
        spans = [span for placed in placed_tasks(projection, pricer) for span in _spans(*placed)]
    step_ms = projection.step_s * 1e3
    optimizer_ms = projection.breakdown_s.get("optimizer", 0.0) * 1e3
    if optimizer_ms:
        spans.append(Span(step_ms - optimizer_ms, step_ms, Kind.COMPUTE, "", COMPUTE, "optimizer"))
    return Timeline.from_spans(spans, (0.0, step_ms), step=0, source="projected", sees_copies=False)


def placed_tasks(projection: Projection, pricer: Pricer) -> Iterator[tuple[StreamTask, float, float]]:
    """Tasks of every micro-batch with start and end in seconds, without a pipeline."""
    plan = projection.plan
    lanes, _ = micro_batches(projection.model, projection.stage, plan, pricer, plan.num_micro_batches)
    times = run(lanes.tasks, pricer.contention)
    return zip(lanes.tasks, times.start_s, times.end_s, strict=True)


def _pipeline_spans(projection: Projection, pricer: Pricer, stage: int) -> Iterator[Span]:
    """Draws every pass of a stage with its tasks, and the part of the gradients' exchange that is exposed."""
    model, plan = projection.model, projection.plan
    grid = build_stages(model, plan, pricer)
    chunks = chunk_times(model, grid, plan, pricer)
    passes = [chunk_tasks(chunk, plan, pricer) for chunk in grid[stage]]
    per_batch = sum(len(tasks) for pass_pair in passes for tasks in pass_pair)
    if per_batch * plan.num_micro_batches > MOST_TASKS:
        raise ConfigError(
            f"a step of {plan.num_micro_batches} micro-batches is too long to draw, "
            f"{max(1, MOST_TASKS // per_batch)} of them would work"
        )
    p2p_s = transfer_s(model, plan, pricer)
    zero_bubble = plan.schedule == "zero-bubble"
    for slot in pipeline.simulate(chunks, plan.num_micro_batches, p2p_s, zero_bubble):
        if slot.rank != stage:
            continue
        if slot.kind == "weight":
            yield Span(
                slot.start_s * 1e3, slot.end_s * 1e3, Kind.COMPUTE, "gemm", COMPUTE, "weight gradients"
            )
            continue
        placed = passes[slot.chunk][0 if slot.kind == "forward" else 1]
        length = max(end for _, _, end in placed)
        # Shorter than the pass alone where another one runs beside it, or without its weight gradients.
        stretch = (slot.end_s - slot.start_s) / length
        for task, start, end in placed:
            yield from _spans(task, slot.start_s + start * stretch, slot.start_s + end * stretch)
    exposed_ms = projection.breakdown_s.get("exposed_dp_comm", 0.0) * 1e3 if not plan.is_fsdp else 0.0
    if exposed_ms:
        end_ms = (projection.step_s - projection.breakdown_s.get("optimizer", 0.0)) * 1e3
        name = "what nothing hides of the gradients' exchange"
        yield Span(end_ms - exposed_ms, end_ms, Kind.COMM, "reduce_scatter", STREAMS["dp"], name)


def _spans(task: StreamTask, start: float, end: float) -> Iterator[Span]:
    if task.stream != COMPUTE:
        yield Span(start * 1e3, end * 1e3, Kind.COMM, task.op, task.stream, task.name)
        return
    stretch = (end - start) / task.seconds if task.seconds else 1.0
    part_start = start
    for name, category, seconds in task.parts:
        stop = part_start + seconds * stretch
        yield Span(part_start * 1e3, stop * 1e3, Kind.COMPUTE, category, COMPUTE, name)
        part_start = stop


def _step(projection: Projection, timeline: Timeline, pricer: Pricer) -> StepRecord:
    plan = projection.plan
    memory_estimate = memory(projection.model, plan, projection.hardware.memory.hbm_bytes)
    missing = dict.fromkeys(("loss", "lr", "grad_norm", "clock_error_us", "device"), PROJECTED)
    collectives = None
    if plan.pp == 1:
        collectives = _collectives(projection, pricer)
    else:
        missing["collectives"] = "inside the passes of the pipeline's chunks"
    return partial_record(
        0,
        plan.world_size,
        0,
        tokens=plan.global_batch_size * plan.seq_len // plan.dp,
        source="projected",
        start_unix_ns=timeline.origin_unix_ns,
        step_ms=projection.step_s * 1e3,
        between_steps_ms=0.0,
        host_ms=projection.host_s * 1e3,
        **window_fields(timeline),
        collectives=collectives,
        num_collectives=len(collectives or ()),
        memory=MemoryRecord(
            allocated_bytes=round(memory_estimate.allocated_bytes),
            reserved_bytes=round(memory_estimate.total_bytes),
            peak_allocated_bytes=round(memory_estimate.allocated_bytes),
        ),
        not_measured=missing,
    )


def _collectives(projection: Projection, pricer: Pricer) -> list[CollectiveRecord]:
    axes = {stream: axis for axis, stream in STREAMS.items() if axis != "edp"}
    counts: dict[str, int] = {}
    records: list[CollectiveRecord] = []
    for task, start_s, end_s in placed_tasks(projection, pricer):
        if task.stream == COMPUTE:
            continue
        axis = axes[task.stream]
        num_ranks, _ = projection.plan.mesh_axis(axis)
        seq = counts[axis] = counts.get(axis, -1) + 1
        rate = task.size_bytes / (end_s - start_s) / 1e9
        records.append(
            CollectiveRecord(
                op=task.op,
                stream=task.stream,
                group=axis,
                ranks=group_of(0, axis, pricer),
                bytes=round(task.size_bytes),
                dtype="bfloat16",
                seq=seq,
                start_ms=start_s * 1e3,
                end_ms=end_s * 1e3,
                algbw_gb_s=rate,
                busbw_gb_s=rate * busbw_factor(task.op, num_ranks),
            )
        )
    return records


def _record_of_rank(record: StepRecord, rank: int, pricer: Pricer) -> StepRecord:
    """The record of the step with the groups that the rank belongs to."""
    collectives = record.collectives
    if collectives is not None:
        groups = {collective.group: group_of(rank, collective.group, pricer) for collective in collectives}
        collectives = [
            msgspec.structs.replace(collective, ranks=groups[collective.group]) for collective in collectives
        ]
    return msgspec.structs.replace(record, rank=rank, collectives=collectives)


def group_of(rank: int, axis: str, pricer: Pricer) -> list[int]:
    size, stride = pricer.plan.mesh_axis(axis)
    first = rank - rank // stride % size * stride
    return [first + member * stride for member in range(size)]


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
    written_unix_ns = time.time_ns()
    return msgspec.structs.replace(
        NOTHING_NOTED,
        started_unix_ns=written_unix_ns,
        finished_unix_ns=written_unix_ns,
        world_size=plan.world_size,
        command=sys.argv,
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
        devices=[{"name": projection.hardware.title}],
        not_measured={name: PROJECTED for name in ("versions", "environment", "clock_anchors", "coverage")},
    )
