"""A projected step as a Timeline, so that reports draw it beside a measured one."""

from collections.abc import Iterator

from aorta.errors import ConfigError
from aorta.projection.pricing import Pricer
from aorta.projection.schedule import pipeline
from aorta.projection.schedule.chunk import chunk_tasks, chunk_times
from aorta.projection.schedule.issue import STREAMS
from aorta.projection.step import Projection, build_stages, micro_batches, transfer_s
from aorta.projection.work.lanes import COMPUTE, StreamTask, run
from aorta.timeline.types import Kind, Span, Timeline

MOST_TASKS = 200_000
"""Most tasks of one stage's step under a pipeline."""


def to_timeline(projection: Projection, pricer: Pricer, step: int = 0, stage: int = 0) -> Timeline:
    """One rank's step: all ranks are alike, under pipeline parallelism those of one stage.

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
    return Timeline.from_spans(spans, (0.0, step_ms), step=step, source="projected", sees_copies=False)


def placed_tasks(projection: Projection, pricer: Pricer) -> Iterator[tuple[StreamTask, float, float]]:
    """Tasks of every micro-batch with start and end in seconds, without a pipeline."""
    plan = projection.plan
    lanes, _ = micro_batches(projection.model, projection.stage, plan, pricer, plan.num_micro_batches)
    times = run(lanes.tasks, pricer.contention)
    return zip(lanes.tasks, times.start_s, times.end_s, strict=True)


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


def _pipeline_spans(projection: Projection, pricer: Pricer, stage: int) -> Iterator[Span]:
    """Every pass of a stage with the tasks inside it, and what of the gradients' exchange nothing hides."""
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
