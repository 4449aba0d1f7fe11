"""A projected step as a Timeline, so that reports draw it beside a measured one."""

from collections.abc import Iterator

from aorta.projection import pipeline
from aorta.projection.lanes import COMPUTE, Task, run
from aorta.projection.pricing import Pricer
from aorta.projection.step import Projection, build_stages, chunk_times, micro_batches
from aorta.timeline.types import Kind, Span, Timeline

MOST_SLOTS = 20_000


def to_timeline(projection: Projection, pricer: Pricer, step: int = 0) -> Timeline:
    """One rank's step: rank 0, or under pipeline parallelism the first stage.

    Without a pipeline every kernel is a span. With one, a span is a micro-batch's pass through a chunk.
    """
    pricer = pricer.with_plan(projection.plan)
    if projection.plan.pp > 1:
        spans = list(_pipeline_spans(projection, pricer))
    else:
        spans = [span for placed in placed_tasks(projection, pricer) for span in _spans(*placed)]
    step_ms = projection.step_s * 1e3
    optimizer_ms = projection.breakdown_s.get("optimizer", 0.0) * 1e3
    if optimizer_ms:
        spans.append(Span(step_ms - optimizer_ms, step_ms, Kind.COMPUTE, "", COMPUTE, "optimizer"))
    return Timeline.from_spans(spans, (0.0, step_ms), step=step, source="projected", sees_copies=False)


def placed_tasks(projection: Projection, pricer: Pricer) -> Iterator[tuple[Task, float, float]]:
    """Tasks of every micro-batch with start and end in seconds, without a pipeline."""
    plan = projection.plan
    lanes, _ = micro_batches(projection.stage, plan, pricer, plan.num_micro_batches)
    found = run(lanes.tasks, pricer.factors.contention)
    return zip(lanes.tasks, found.start_s, found.end_s, strict=True)


def _spans(task: Task, start: float, end: float) -> Iterator[Span]:
    if task.stream != COMPUTE:
        yield Span(start * 1e3, end * 1e3, Kind.COMM, task.op, task.stream, task.name)
        return
    stretch = (end - start) / task.seconds if task.seconds else 1.0
    at = start
    for name, category, seconds in task.parts:
        stop = at + seconds * stretch
        yield Span(at * 1e3, stop * 1e3, Kind.COMPUTE, category, COMPUTE, name)
        at = stop


def _pipeline_spans(projection: Projection, pricer: Pricer) -> Iterator[Span]:
    plan = projection.plan
    grid = build_stages(projection.model, plan, pricer)
    chunks = chunk_times(grid, plan, pricer)
    zero_bubble = plan.schedule == "zero-bubble"
    most = MOST_SLOTS // (2 * plan.pp * plan.vpp)
    shown = min(plan.num_micro_batches, max(plan.pp, most // plan.pp * plan.pp))
    for slot in pipeline.simulate(chunks, shown, 0.0, zero_bubble):
        if slot.rank == 0:
            name = f"{slot.kind} {slot.micro_batch} chunk {slot.chunk}"
            yield Span(slot.start_s * 1e3, slot.end_s * 1e3, Kind.COMPUTE, slot.kind, COMPUTE, name)
