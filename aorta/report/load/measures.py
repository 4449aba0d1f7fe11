"""Work per time, memory and telemetry: what people decide by, beside where the time of a step goes.

Tokens are those of the whole job: ranks of one tensor-parallel group work on the same ones, which run.json's
layout tells. Rates are of single steps, so that their intervals are found as those of times are. What is not
known is NaN here, and `reasons` says why.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import RunRecord, StepRecord
from aorta.report.metrics import of_operation, operations

Floats = NDArray[np.float64]

RATES = ("tokens_per_s_per_gpu", "tokens_per_s", "model_tflops_per_gpu", "mfu")
"""Work per time, the most telling first."""
MEMORY = ("peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes")
TELEMETRY = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "utilization_percent")
WORK = "tokens_per_step"
ENERGY = "energy_per_token_mj"
THROTTLED = "throttled"
MEASURES = (WORK, *RATES, ENERGY, *MEMORY, *TELEMETRY, THROTTLED)
"""Of every run, null where they are not known. Where the device said that something held its clocks down
there is also throttled.<reason>: 1 in steps for which it did, else 0."""
MEASURED = ("tokens", "alloc_retries", *MEMORY, *TELEMETRY)
"""Read from records as they are; none of them can be less than nothing."""
NOT_GIVEN = {
    "tokens": "the program gave recorder.step no tokens",
    "flops_per_token": "the FLOPs of a token are not known: give aorta.instrument flops_per_token",
    "peak_flops": "the peak rate of the device is not known",
    "power_w": "no telemetry in the records",
    "memory": "the records tell nothing of an allocator",
}


def of_record(record: StepRecord) -> Iterator[tuple[str, float | None]]:
    """What a line tells of work, memory and the device."""
    yield "tokens", record.tokens
    if record.memory is not None:
        yield "peak_memory_bytes", record.memory.peak_allocated_bytes
        yield "reserved_memory_bytes", record.memory.reserved_bytes
        yield "alloc_retries", record.memory.num_alloc_retries
        yield "device_memory_bytes", record.memory.device_used_bytes
    device = record.device
    if device is None:
        return
    for name in TELEMETRY:
        yield name, getattr(device, name)
    if device.memory_used_bytes is not None:
        yield "device_memory_bytes", device.memory_used_bytes
    if device.throttling is not None:
        yield THROTTLED, float(bool(device.throttling))
        for reason in device.throttling:
            yield of_operation(THROTTLED, reason), 1.0


def add_measures(
    metrics: dict[str, Floats], run: RunRecord | None, not_measured: dict[str, str]
) -> dict[str, str]:
    """Completes metrics, which are [rank, step], by MEASURES; why any of them is null."""
    step_ms = metrics["step_ms"]
    num_ranks = len(step_ms)
    unknown = np.full(step_ms.shape, np.nan)
    tokens = metrics.pop("tokens", unknown)
    for name in [of_operation(THROTTLED, reason) for reason in operations(metrics, THROTTLED)]:
        metrics[name] = np.where(
            np.isnan(metrics[name]) & np.isfinite(metrics[THROTTLED]), 0.0, metrics[name]
        )
    total = tokens.sum(axis=0) * distinct_share(run)
    metrics[WORK] = np.broadcast_to(total, step_ms.shape).copy()
    per_s = np.divide(1e3 * metrics[WORK], step_ms, out=unknown.copy(), where=step_ms > 0)
    metrics["tokens_per_s"] = per_s
    metrics["tokens_per_s_per_gpu"] = per_s / num_ranks
    flops_per_token = run.flops_per_token if run is not None else None
    metrics["model_tflops_per_gpu"] = per_s / num_ranks * (flops_per_token or np.nan) / 1e12
    peak = run.peak_flops if run is not None else None
    metrics["mfu"] = (
        metrics["model_tflops_per_gpu"] * 1e12 / (peak.flops_per_s if peak is not None else np.nan)
    )
    for name in (*MEMORY, *TELEMETRY, THROTTLED):
        metrics.setdefault(name, unknown.copy())
    if "alloc_retries" in metrics:  # counted since the process began
        metrics["alloc_retries"] = np.diff(metrics["alloc_retries"], axis=1, prepend=np.nan)
    energy_mj = (metrics["power_w"] * step_ms).sum(axis=0)  # watts times milliseconds
    per_token = np.divide(energy_mj, total, out=np.full(total.shape, np.nan), where=total > 0)
    metrics[ENERGY] = np.broadcast_to(per_token, step_ms.shape).copy()
    return _reasons(metrics, run, not_measured)


def distinct_share(run: RunRecord | None) -> float:
    """Part of all ranks' tokens that are different ones: 1 / tp, by the layout; 1 where it is not known."""
    layout = run.layout if run is not None else None
    sizes = [(layout or {}).get(key) for key in ("dp", "world")]
    num_replicas, world = (float(size) if _is_count(size) else 0.0 for size in sizes)
    return num_replicas / world if 0 < num_replicas <= world else 1.0


def memory_limit_bytes(run: RunRecord | None) -> float | None:
    """Memory of the smallest device of the run; None where run.json lists no GPU."""
    sizes = [
        float(row["memory_bytes"])
        for row in (run.devices if run is not None else ())
        if row.get("kind") in ("cuda", "hip") and _is_count(row.get("memory_bytes"))
    ]
    return min(sizes, default=None)


def peak_text(run: RunRecord | None) -> str:
    """'989 TFLOP/s bf16, NVIDIA H200 SXM 141 GB (NVIDIA H200 data sheet, dense rates, 2024-11)'; '' where the
    peak is not known."""
    peak = run.peak_flops if run is not None else None
    if peak is None:
        return ""
    return f"{peak.flops_per_s / 1e12:,.0f} TFLOP/s {peak.precision}, {peak.hardware} ({peak.origin})"


def _reasons(
    metrics: dict[str, Floats], run: RunRecord | None, not_measured: dict[str, str]
) -> dict[str, str]:
    of_run = run.not_measured if run is not None else {}
    tokens, flops, peak = (
        not_measured.get(name) or of_run.get(name) or NOT_GIVEN[name]
        for name in ("tokens", "flops_per_token", "peak_flops")
    )
    device = not_measured.get("device") or NOT_GIVEN["power_w"]
    memory = not_measured.get("memory") or NOT_GIVEN["memory"]
    has_tokens, has_flops = (np.isfinite(metrics[name]).any() for name in (WORK, "model_tflops_per_gpu"))
    causes = {
        WORK: tokens,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens,
        "model_tflops_per_gpu": flops if has_tokens else tokens,
        "mfu": tokens if not has_tokens else flops if not has_flops else peak,
        ENERGY: tokens if not has_tokens else device,
        "peak_memory_bytes": memory,
        "reserved_memory_bytes": memory,
        "device_memory_bytes": device,
        **dict.fromkeys((*TELEMETRY, THROTTLED), device),
    }
    return {name: reason for name, reason in causes.items() if not np.isfinite(metrics[name]).any()}


def _is_count(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
