"""Measures points one after the other and puts them into a document.

A point is a workload at one stream count. `measure_points` is what the commands call; for each point every
rank runs `measure_this_rank` (warm-up, timed iterations, pieces, check, legs), and the ranks' results become
one Point.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from aorta.account.results.metrics import not_measured
from aorta.account.results.schema import Document, Memory, Metric, Point, RankRun, Setting
from aorta.device.backend import accelerator, backend_of
from aorta.device.environment import (
    collect_devices,
    collect_environment,
    collect_versions,
    current_platform,
    environment_warnings,
)
from aorta.device.ranks import Ranks
from aorta.device.telemetry import TelemetrySampler
from aorta.errors import AortaError, RecordError
from aorta.queues.harness.iterate import PointPlan, WorkloadBench, set_up, time_legs
from aorta.queues.harness.metrics import aggregate, configuration, device_bound_ms, switch_metrics
from aorta.queues.harness.pieces import concurrency
from aorta.queues.options import check_groups

NO_HOST_MEMORY = "DefaultCPUAllocator"
"""Part of torch's message, a plain RuntimeError, when the host has too little memory."""
TELEMETRY_INTERVAL_S = 0.05
ALL_THREADS = _ExperimentalConfig(profile_all_threads=True)
"""Worker threads stand for streams on a CPU, and work in no thread that the profiler knows by itself."""
PROFILED_ITERATIONS = 5
"""Iterations that --profile traces, beside those that are timed."""


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

    What only setting up finds out (a size that no device holds) fails the point where there are
    others; it raises where there are none, or several ranks.
    """
    for plan in plans:
        reason = refusal(plan, ranks.device.type, ranks.world_size)
        if reason is not None:
            yield unmeasured(plan, ranks, "skipped", reason)
            continue
        if started is not None:
            started(plan)
        try:
            yield measure_point(plan, ranks, switch)
        except AortaError as error:
            if len(plans) == 1 or ranks.world_size > 1:
                raise
            yield unmeasured(plan, ranks, "failed", str(error))


def unmeasured(plan: PointPlan, ranks: Ranks, status: Literal["skipped", "failed"], reason: str) -> Point:
    """A point without numbers, which says why."""
    return Point(
        configuration=configuration(plan, ranks.device.type, ranks.world_size), status=status, reason=reason
    )


def measure_point(plan: PointPlan, ranks: Ranks, switch: bool = True) -> Point:
    """The same point on every rank. A workload that crashes is a failed point, its traceback on stderr, so
    that a sweep keeps the others; with several ranks it ends the run."""
    try:
        mine = measure_this_rank(plan, ranks)
    except AortaError:
        raise
    except Exception as error:
        if ranks.world_size > 1:
            raise  # the others wait in a collective: only the launcher can end them
        first_line = (str(error).splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError) or NO_HOST_MEMORY in first_line:
            reason = f"out of memory, give smaller sizes: {first_line}"
            return unmeasured(plan, ranks, "failed", reason)
        traceback.print_exc()
        return unmeasured(plan, ranks, "failed", f"{type(error).__name__}: {first_line}")
    runs: list[RankRun] = ranks.gather(mine)
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


def measure_this_rank(plan: PointPlan, ranks: Ranks) -> RankRun:
    """This rank's part of the point. All ranks must call it with the same plan."""
    with set_up(plan, ranks) as bench:
        return _run_and_collect(bench)


def _run_and_collect(bench: WorkloadBench) -> RankRun:
    plan, ranks, workload = bench.plan, bench.ranks, bench.workload
    bench.run(max(plan.warmup, 1), "per_iteration")
    num = _num_iterations(bench)
    gpu = None if ranks.device.type == "cpu" else accelerator()
    if gpu is not None:
        gpu.memory.reset_peak_memory_stats(ranks.device)
    index = None if gpu is None else ranks.device.index
    with TelemetrySampler(index, TELEMETRY_INTERVAL_S) as sampler:
        ranks.barrier()
        timed = bench.run(num)
        sample, sample_reason = sampler.latest(), sampler.reason
    memory = _memory(ranks.device)
    # Everything from here on may slow the host or the device: the numbers above are taken.
    traces = [str(profiled(bench, plan.profile_dir))] if plan.profile_dir else []
    measured = None
    if plan.piece_iterations:
        window = bench.run_pieces(plan.piece_iterations)
        alone = bench.run_pieces(plan.piece_iterations, alone=True, mode="per_iteration")
        measured = concurrency(window, alone)
    # Before the legs: they are other programs, and leave other results behind.
    checked = workload.validate_correctness()
    leg_ms = time_legs(bench)
    amount = workload.amount()
    device_name = backend_of(ranks.device).name(ranks.device)
    return RankRun(
        rank=ranks.rank,
        device=device_name,
        iteration_ms=timed.iteration_ms,
        enqueue_ms=timed.enqueue_ms,
        device_ms=timed.device_ms,
        wall_ms=timed.wall_ms,
        launch_bound=timed.launch_bound,
        operations=amount.operations,
        samples=amount.samples,
        units=amount.units,
        memory=memory,
        check=checked,
        concurrency=measured,
        leg_ms=leg_ms,
        workload_metrics=workload.metrics(),
        device_bound_ms=device_bound_ms(workload.device_work(), device_name),
        notes=workload.notes(),
        telemetry=sample,
        telemetry_reason=sample_reason,
        traces=traces,
    )


def _num_iterations(bench: WorkloadBench) -> int:
    """Timed iterations within the budget: the same number on every rank."""
    plan = bench.plan
    if plan.budget_s is None:
        return plan.iterations
    began_s = time.perf_counter()
    bench.run(2, "per_iteration")
    return bench.affordable(plan.iterations, (time.perf_counter() - began_s) / 2)


def _memory(device: torch.device) -> Memory:
    if device.type == "cpu":
        return Memory(reason="no GPU")
    gpu = accelerator()
    free, total = gpu.free_and_total_bytes(device)
    return Memory(
        peak_allocated_bytes=gpu.memory.max_memory_allocated(device),
        peak_reserved_bytes=gpu.memory.max_memory_reserved(device),
        allocated_bytes=gpu.memory.memory_allocated(device),
        reserved_bytes=gpu.memory.memory_reserved(device),
        device_used_bytes=total - free,
    )


def trace_name(workload: str, streams: int, rank: int) -> str:
    """File name of a rank's trace: the readers of aorta.traces find the rank in it."""
    return f"{workload}_streams{streams}_rank{rank}.pt.trace.json"


def check_folder(folder: Path, name: str, overwrite: bool) -> None:
    """RecordError where a trace would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"--profile-dir {folder} is a file; name a folder")
    if (folder / name).exists() and not overwrite:
        raise RecordError(f"{folder / name} already exists; give another --profile-dir or --overwrite")


def profiled(bench: WorkloadBench, folder: Path) -> Path:
    """Runs further iterations under the profiler in the plan's sync mode; the trace that was written."""
    plan = bench.plan
    activities = [ProfilerActivity.CPU]
    if accelerator().is_available():
        activities.append(accelerator().profiler_activity())
    path = folder / trace_name(plan.workload.name, plan.streams, bench.ranks.rank)
    bench.ranks.barrier()
    label = record_function(f"{plan.workload.name}::{plan.sync_mode}")
    threads = ALL_THREADS if bench.ranks.device.type == "cpu" else None
    with profile(activities=activities, experimental_config=threads) as profiler, label:
        bench.run(PROFILED_ITERATIONS)
    if not any(event.name != label.name for event in profiler.events() or ()):
        raise RecordError(
            f"--profile: the profiler saw nothing of {plan.workload.name}, whose work is in other threads"
        )
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if not path.exists():  # a write that fails in Kineto is not raised
        raise RecordError(f"{path}: the profiler could not write it")
    return path


def setting(ranks: Ranks, num_streams: int) -> Setting:
    """Setting of this process, rank 0's."""
    on_cpu = ranks.device.type == "cpu"
    platform = "cpu" if on_cpu else current_platform()
    return Setting(
        platform=platform,
        devices=collect_devices(),
        world_size=ranks.world_size,
        backend=ranks.backend,
        versions=collect_versions(),
        environment=collect_environment(),
        queues=_queues(ranks.device),
        warnings=[] if on_cpu else environment_warnings(platform=platform, num_streams=num_streams),
    )


def _queues(device: torch.device) -> str:
    """Limit on hardware queues of this process, and whether it was set."""
    if device.type == "cpu":
        return "none: worker threads"
    limit = accelerator().queue_limit
    if limit is None:
        return "no limit is known"
    value = os.environ.get(limit.variable)
    if value is None:
        return f"{limit.variable} is not set (default {limit.default})"
    return f"{limit.variable}={value}"
