"""One workload at one stream count on this rank: warmed up, timed, checked, its pieces and legs timed."""

import time

import torch

from aorta.device.ranks import Ranks
from aorta.device.telemetry import TelemetrySampler
from aorta.queues.harness.concurrency.piece_statistics import concurrency, summaries
from aorta.queues.harness.iterations.bench import PointPlan, WorkloadBench, bench
from aorta.queues.harness.iterations.legs import time_legs
from aorta.queues.harness.iterations.profiling import profiled
from aorta.queues.harness.metrics.bound import device_bound_ms
from aorta.results.schema import Checked, Memory, RankRun

TELEMETRY_INTERVAL_S = 0.05
NOT_CALIBRATED = "pieces are not calibrated; --profile traces the kernels themselves"


def measure(plan: PointPlan, ranks: Ranks) -> RankRun:
    """Everything that this rank can say about the point. All ranks must call it with the same plan."""
    with bench(plan, ranks) as ready:
        return _measure(ready)


def _measure(ready: WorkloadBench) -> RankRun:
    plan, ranks, workload = ready.plan, ready.ranks, ready.workload
    ready.run(max(plan.warmup, 1), "per_iteration")
    num = _affordable(ready)
    _reset_memory(ranks.device)
    index = ranks.device.index if ranks.device.type == "cuda" else None
    with TelemetrySampler(index, TELEMETRY_INTERVAL_S) as sampler:
        ranks.barrier()
        timed = ready.run(num)
        sample, sample_reason = sampler.latest(), sampler.reason
    memory = _memory(ranks.device)
    traces = [str(path) for path in profiled(ready)] if plan.profile_dir else []
    measured = None
    if plan.piece_iterations:
        window = ready.run_pieces(plan.piece_iterations)
        alone = ready.run_pieces(plan.piece_iterations, alone=True, mode="per_iteration")
        measured = concurrency(window, alone)
    check = workload.validate_correctness()
    leg_ms = time_legs(ready)
    amount = workload.amount()
    return RankRun(
        rank=ranks.rank,
        device=_device_name(ranks.device),
        iteration_ms=timed.iteration_ms,
        enqueue_ms=timed.enqueue_ms,
        device_ms=timed.device_ms,
        wall_ms=timed.wall_ms,
        launch_bound=timed.launch_bound,
        operations=amount.operations,
        samples=amount.samples,
        units=amount.units,
        memory=memory,
        check=Checked(ok=check.ok, detail=check.detail),
        concurrency=measured,
        pieces=summaries(workload.context.pieces),
        leg_ms=leg_ms,
        workload_metrics=workload.metrics(),
        device_bound_ms=device_bound_ms(workload.device_work(), _device_name(ranks.device)),
        notes=workload.notes(),
        telemetry=sample,
        telemetry_reason=sample_reason,
        traces=traces,
        calibration_reason=NOT_CALIBRATED,
    )


def _affordable(ready: WorkloadBench) -> int:
    """Timed iterations within the budget: the same number on every rank."""
    plan = ready.plan
    if plan.budget_s is None:
        return plan.iterations
    began_s = time.perf_counter()
    ready.run(2, "per_iteration")
    return ready.affordable(plan.iterations, (time.perf_counter() - began_s) / 2)


def _reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> Memory:
    if device.type != "cuda":
        return Memory(reason="no GPU")
    free, total = torch.cuda.mem_get_info(device)
    return Memory(
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
        allocated_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        device_used_bytes=total - free,
        device_total_bytes=total,
    )


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    name: str = torch.cuda.get_device_name(device)
    return name
