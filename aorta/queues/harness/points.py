"""Measures points one after the other and puts them into a document."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from aorta.device.ranks import Ranks
from aorta.errors import AortaError
from aorta.queues.harness.iterations.bench import PointPlan
from aorta.queues.harness.measure import measure
from aorta.queues.harness.metrics.aggregate import aggregate, configuration, skipped
from aorta.queues.harness.metrics.switch import switch_metrics
from aorta.queues.harness.setting import setting
from aorta.queues.options import check_groups
from aorta.results.metrics import not_measured
from aorta.results.schema import Document, Metric, Point, RankRun

NO_HOST_MEMORY = "DefaultCPUAllocator"
"""Part of torch's message, a plain RuntimeError, where the host has too little memory."""


def refusal(plan: PointPlan, device_type: str, world_size: int) -> str | None:
    """Reason why the workload cannot run at this point, in one line; None where it can."""
    workload = plan.workload
    if not workload.min_streams <= plan.streams <= workload.max_streams:
        return (
            f"{workload.name} uses {workload.min_streams} to {workload.max_streams} streams, "
            f"not {plan.streams} ({workload.stream_meaning})"
        )
    return workload.refusal(plan.streams, plan.options, device_type, world_size)


def check_plan(plan: PointPlan, world_size: int) -> None:
    """ConfigError for options that no stream count of this run can satisfy."""
    groups = getattr(plan.options, "process_groups", None)
    if groups is not None:
        check_groups(groups, world_size)


def measure_points(
    plans: Sequence[PointPlan],
    ranks: Ranks,
    switch: bool = True,
    started: Callable[[PointPlan], None] | None = None,
) -> Iterator[Point]:
    """One point for each plan, in order; those outside a workload's range are skipped, and say so.

    What only setting up finds out (no compiler, a size that no device holds) fails the point where there are
    others; it raises where there are none, or several ranks.
    """
    for plan in plans:
        reason = refusal(plan, ranks.device.type, ranks.world_size)
        if reason is not None:
            yield skipped(plan, ranks.device.type, ranks.world_size, reason)
            continue
        if started is not None:
            started(plan)
        try:
            yield measure_point(plan, ranks, switch)
        except AortaError as error:
            if len(plans) == 1 or ranks.world_size > 1:
                raise
            yield failed(plan, ranks, str(error))


def failed(plan: PointPlan, ranks: Ranks, reason: str) -> Point:
    return Point(
        configuration=configuration(plan, ranks.device.type, ranks.world_size), status="failed", reason=reason
    )


def measure_point(plan: PointPlan, ranks: Ranks, switch: bool = True) -> Point:
    """The same point on every rank. A workload that crashes is a failed point, its traceback on stderr, so
    that a sweep keeps the others; with several ranks it ends the run."""
    try:
        mine = measure(plan, ranks)
    except AortaError:
        raise
    except Exception as error:
        if ranks.world_size > 1:
            raise  # the others wait in a collective: only the launcher can end them
        first_line = (str(error).splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError) or NO_HOST_MEMORY in first_line:
            return failed(plan, ranks, f"out of memory, give smaller sizes: {first_line}")
        traceback.print_exc()
        return failed(plan, ranks, f"{type(error).__name__}: {first_line}")
    runs = [msgspec.convert(run, RankRun) for run in ranks.gather(msgspec.to_builtins(mine))]
    return aggregate(plan, runs, ranks.device.type, _switch(plan, ranks, switch), ranks.backend is not None)


def _switch(plan: PointPlan, ranks: Ranks, is_asked: bool) -> dict[str, Metric]:
    if not is_asked:
        return {"queue_switch_us": not_measured("us", "not asked for", "lower")}
    if not ranks.is_first:
        return {}
    return switch_metrics(ranks.device, plan.streams)


def document(points: Sequence[Point], ranks: Ranks) -> Document:
    """Document that is written to a file, and printed with --json."""
    counts = [point.configuration["streams"] for point in points]
    largest = max((count for count in counts if isinstance(count, int)), default=1)
    return Document(
        kind="queues",
        created_unix_ns=time.time_ns(),
        setting=setting(ranks, largest),
        points=list(points),
    )
