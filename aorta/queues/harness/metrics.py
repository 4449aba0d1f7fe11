"""Metrics of a point from what its ranks measured: the slowest rank decides, all ranks' work counts.

Overlap efficiency comes from interleaved legs: compute alone, communication alone, one after the other, and
overlapped.

    eta = (T_serial - T) / (T_serial - max(T_compute, T_comm))

1: the shorter one costs nothing. 0: as good as serial. Below 0: overlap loses.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from aorta.account.results.metrics import (
    mean_metric,
    median_metric,
    not_measured,
    quantile_metric,
    rate_metric,
)
from aorta.account.results.schema import Better, Interval, Metric, Point, RankRun, Status, Value
from aorta.errors import AortaError
from aorta.queues.harness.iterate import PointPlan
from aorta.queues.workload import ITERATION, DeviceWork
from aorta.timeline.arrays import Floats

NO_PIECES = "the workload marks no pieces, or they were not timed"
NEEDED = ("compute", "comm", "serial")
"""Legs that overlap efficiency is worked out from, beside the iteration itself."""
NUM_DRAWS = 2000
MIN_ROUNDS = 8
"""Rounds of legs below which a bootstrap interval would say nothing."""


def configuration(plan: PointPlan, device_type: str, world_size: int) -> dict[str, Value]:
    """Settings that a point is matched by. The number of iterations is not among them."""
    options = msgspec.to_builtins(plan.options)
    return {
        "workload": plan.workload.name,
        "streams": plan.streams,
        "sync_mode": plan.sync_mode,
        "size": plan.size,
        "seed": plan.seed,
        "device": device_type,
        "world_size": world_size,
        "options": options,
    }


def aggregate(
    plan: PointPlan, runs: Sequence[RankRun], device_type: str, switch: dict[str, Metric], has_group: bool
) -> Point:
    """The point, failed where a rank's results were wrong."""
    wrong = [f"rank {run.rank}: {run.check.detail}" for run in runs if not run.check.ok]
    status: Status = "failed" if wrong else "measured"
    collectives: Literal["real", "simulated", "none"] = "none"
    if plan.workload.uses_collectives:
        collectives = "real" if has_group else "simulated"
    iteration_ms = np.array([run.iteration_ms for run in runs])
    return Point(
        configuration=configuration(plan, device_type, len(runs)),
        status=status,
        reason=f"wrong results: {'; '.join(wrong)}" if wrong else None,
        metrics=metrics(plan, runs) | switch,
        source="threads" if device_type == "cpu" else "events",
        collectives=collectives,
        iterations=iteration_ms.shape[1],
        warmup=plan.warmup,
        skew_ms=median_metric(np.ptp(iteration_ms, axis=0), "ms") if len(runs) > 1 else None,
        ranks=list(runs),
        notes=_notes(plan, runs, device_type, collectives),
    )


def metrics(plan: PointPlan, runs: Sequence[RankRun]) -> dict[str, Metric]:
    """Metrics by name, in the order of a table."""
    slowest_ms = np.array([run.iteration_ms for run in runs]).max(axis=0)
    mean_ms = mean_metric(slowest_ms, "ms")
    device_s = max(run.device_ms for run in runs) / 1e3
    num = len(slowest_ms)
    rows = {
        "latency_mean_ms": mean_ms,
        "latency_p50_ms": median_metric(slowest_ms, "ms"),
        "latency_p95_ms": quantile_metric(slowest_ms, 0.95, "ms"),
        "latency_p99_ms": quantile_metric(slowest_ms, 0.99, "ms"),
    }
    for name, unit, values in (
        ("units_per_s", f"{plan.workload.unit}/s", sum(run.units for run in runs)),
        ("samples_per_s", "samples/s", sum(run.samples for run in runs)),
        ("operations_per_s", "operations/s", sum(run.operations for run in runs)),
    ):
        rows[name] = rate_metric(values, mean_ms, values * num / device_s, unit)
    if len(runs) > 1:  # a rank's share: what one GPU does, beside the sum of all
        rows["units_per_s_per_rank"] = _per_rank(rows["units_per_s"], len(runs))
    rows |= _device_bound(runs, mean_ms)
    enqueue_ms = np.array([run.enqueue_ms for run in runs]).max(axis=0)
    rows["host_enqueue_ms"] = median_metric(enqueue_ms, "ms")
    wall_ms = max(run.wall_ms for run in runs) / num
    rows["wall_per_iteration_ms"] = Metric(value=wall_ms, unit="ms", better="lower", num=num)
    rows |= _memory(runs) | _concurrency(runs) | overlap_metrics([run.leg_ms for run in runs])
    names = dict.fromkeys(name for run in runs for name in run.workload_metrics)
    for name in names:
        rows[name] = _workload_metric(name, [run.workload_metrics.get(name) for run in runs])
    return rows


def _per_rank(rate: Metric, num: int) -> Metric:
    if rate.value is None:
        return rate
    ends = rate.interval
    return msgspec.structs.replace(
        rate,
        value=rate.value / num,
        unit=f"{rate.unit} per rank",
        interval=ends
        and Interval(
            low=None if ends.low is None else ends.low / num,
            high=None if ends.high is None else ends.high / num,
        ),
        error=None if rate.error is None else rate.error / num,
    )


def _device_bound(runs: Sequence[RankRun], mean_ms: Metric) -> dict[str, Metric]:
    """The share of the device's peak that the iteration reached: its least possible time over its time."""
    bounds = [run.device_bound_ms for run in runs]
    least_ms = max((bound.value for bound in bounds if bound.value is not None), default=None)
    if least_ms is None or not mean_ms.value:
        return {"of_device_bound": not_measured("", bounds[0].reason or "no time", "higher")}
    return {"of_device_bound": Metric(value=least_ms / mean_ms.value, unit="", better="higher")}


def _memory(runs: Sequence[RankRun]) -> dict[str, Metric]:
    """Memory of the fullest rank."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "allocated_bytes", "reserved_bytes")
    return {name: _greatest(name, runs) for name in (*names, "device_used_bytes")}


def _greatest(name: str, runs: Sequence[RankRun]) -> Metric:
    values = [value for run in runs if (value := getattr(run.memory, name)) is not None]
    if not values:
        return not_measured("bytes", runs[0].memory.reason or "not reported", "lower")
    return Metric(value=float(max(values)), unit="bytes", better="lower")


def _concurrency(runs: Sequence[RankRun]) -> dict[str, Metric]:
    """Medians over ranks; means for communication, so that it is hidden and exposed time together."""
    measured = [run.concurrency for run in runs if run.concurrency is not None]
    if not measured:
        return {"achieved_concurrency": not_measured("pieces", NO_PIECES)}
    num = measured[0].iterations

    def median(values: Sequence[float], unit: str, better: Better = "neither") -> Metric:
        return Metric(value=float(np.median(values)), unit=unit, better=better, num=num)

    medians = {
        "achieved_concurrency": median([sample.achieved for sample in measured], "pieces"),
        "device_idle_share": median([sample.idle_share for sample in measured], "", "lower"),
    }
    bounds = [sample.placement_bound for sample in measured if sample.placement_bound is not None]
    if bounds:
        medians["placement_bound"] = median(bounds, "x")
    for name in measured[0].slowdown:
        values = [sample.slowdown[name] for sample in measured if name in sample.slowdown]
        medians[f"slowdown.{name}"] = median(values, "x", "lower")
    with_comm = [sample for sample in measured if sample.comm_ms_each]
    if with_comm:
        comm_ms = np.mean([sample.comm_ms_each for sample in with_comm], axis=0)
        hidden_ms = np.mean([sample.hidden_ms_each for sample in with_comm], axis=0)
        medians["comm_ms"] = mean_metric(comm_ms, "ms")
        medians["hidden_ms"] = mean_metric(hidden_ms, "ms", "neither")
        medians["exposed_ms"] = mean_metric(comm_ms - hidden_ms, "ms")
    return medians


def _workload_metric(name: str, values: Sequence[float | None]) -> Metric:
    """Median over ranks of a workload's own figure, whose name ends in its unit."""
    measured = [value for value in values if value is not None]
    units = {"ms": "ms", "us": "us", "bytes": "bytes", "gb_s": "GB/s"}
    unit = next((unit for suffix, unit in units.items() if name.endswith(f"_{suffix}")), "")
    if not measured:
        return not_measured(unit, "the workload did not measure it")
    return Metric(value=float(np.median(measured)), unit=unit)


def _notes(plan: PointPlan, runs: Sequence[RankRun], device_type: str, collectives: str) -> list[str]:
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    if device_type == "cpu":
        notes.append(
            "streams are worker threads on the CPU: orderings are real, timings do not predict a GPU"
        )
    if collectives == "simulated":
        notes.append("collectives are simulated: no process group (start with torchrun for real ones)")
    if any(run.launch_bound for run in runs):
        notes.append("launch-bound: the device waited for the host, so the times measure launching")
    if len(runs) > 1:
        notes.append(f"throughput adds up {len(runs)} ranks; units_per_s_per_rank is a rank's share")
    cut = len(runs[0].iteration_ms)
    if cut < plan.iterations:
        notes.append(f"{cut} of {plan.iterations} iterations fit into the time budget")
    return notes


def overlap_metrics(leg_ms: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Metric]:
    """Metrics of every rank's legs; the slowest rank of each round counts. {} where there are no legs."""
    names = list(leg_ms[0])
    if not names:
        return {}
    slowest = {name: np.array([legs[name] for legs in leg_ms]).max(axis=0) for name in names}
    rows = {f"leg_{name}_ms": median_metric(values, "ms") for name, values in slowest.items()}
    if not all(name in slowest for name in NEEDED):
        return rows
    return rows | efficiency(slowest[ITERATION], *(slowest[name] for name in NEEDED))


def efficiency(together: Floats, compute: Floats, comm: Floats, serial: Floats) -> dict[str, Metric]:
    """Efficiency, time gained over serial, and what is left exposed, each with a bootstrap interval.

    All arguments hold one time per round, in ms. Rounds are resampled whole.
    """
    num = len(together)
    all_ms = np.stack([together, compute, comm, serial])
    t, c, m, s = (float(value) for value in np.median(all_ms, axis=1))
    drawn = np.random.default_rng(0).integers(0, num, (NUM_DRAWS, num))
    draws = np.median(all_ms[:, drawn], axis=2)
    dt, dc, dm, ds = draws
    room = ds - np.maximum(dc, dm)
    few = f"no interval: {num} rounds, {MIN_ROUNDS} are needed" if num < MIN_ROUNDS else None

    def metric(value: float, values: Floats, unit: str, higher: bool) -> Metric:
        low, high = np.percentile(values, [2.5, 97.5])
        return Metric(
            value=value,
            unit=unit,
            better="higher" if higher else "lower",
            interval=None if few else Interval(low=float(low), high=float(high)),
            error=None if few else float(values.std(ddof=1)),
            freedom=None if few else max((num - 1) / 2, 1.5),
            num=num,
            reason=few,
        )

    if float(np.percentile(room, 2.5)) <= 0:
        eta = not_measured("", "serial and the longer leg are within noise: nothing to gain", "higher")
    else:
        eta = metric((s - t) / (s - max(c, m)), (ds - dt) / room, "", True)
    return {
        "overlap_efficiency": eta,
        "gained_ms": metric(s - t, ds - dt, "ms", True),
        "exposed_over_compute_ms": metric(t - c, dt - dc, "ms", False),
        "overlap_bound_ms": metric(max(c, m), np.maximum(dc, dm), "ms", False),
    }


def device_bound_ms(work: DeviceWork | None, device: str) -> Metric:
    """Arithmetic at the data sheet's rate of the matrix units; null with the reason where the workload or
    aorta/hardware/parts does not say.

    device: as the driver names it.
    """
    if work is None:
        return not_measured("ms", "the workload does not state its arithmetic")
    try:
        from aorta.hardware.names import hardware_name_of
        from aorta.hardware.part import load_hardware
    except ImportError as error:
        return not_measured("ms", f"rates of GPUs cannot be read: {error}")
    name = hardware_name_of(device)
    if name is None:
        return not_measured("ms", f"no file of a GPU has rates of {device}")
    try:
        hardware = load_hardware(name)
    except AortaError as error:
        return not_measured("ms", str(error))
    missing = [dtype for dtype in work.flops if dtype not in hardware.compute.peak_flops]
    if missing:
        return not_measured("ms", f"the rate of {name} is not known for {', '.join(missing)}")
    compute_s = sum(flops / hardware.compute.peak_flops[dtype] for dtype, flops in work.flops.items())
    return Metric(value=1e3 * compute_s, unit="ms", better="neither")


def switch_metrics(device: torch.device, streams: int) -> dict[str, Metric]:
    """Cost of a change of stream in a chain of kernels that goes around this many streams, over staying on
    one; null with a reason where the device has no clock to read. It depends on the number of streams, all
    but one of which wait at any time: docs/queues.md."""
    if device.type == "cpu":
        return {"queue_switch_us": not_measured("us", "needs a GPU", "lower")}
    if streams < 2:
        return {"queue_switch_us": not_measured("us", "one stream has nothing to switch to", "lower")}
    from aorta.queues.probe.switch import measure_switch

    cost = measure_switch(device, streams)
    if cost.per_switch_us is None:
        return {"queue_switch_us": not_measured("us", cost.reason or "not measured", "lower")}
    interval = None
    if cost.interval_us is not None:
        interval = Interval(low=cost.interval_us[0], high=cost.interval_us[1])
    rows = {
        "queue_switch_us": Metric(
            value=cost.per_switch_us,
            unit="us",
            better="lower",
            interval=interval,
            reason=cost.reason,
            source=f"chain around {streams} streams; compare at equal numbers only",
        )
    }
    if cost.same_stream_us is not None:
        rows["same_stream_us"] = Metric(value=cost.same_stream_us, unit="us", better="lower")
    if cost.clock_tick_ns is not None:
        rows["clock_tick_ns"] = Metric(value=cost.clock_tick_ns, unit="ns")
    return rows
