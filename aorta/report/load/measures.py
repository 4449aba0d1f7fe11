"""Work per time, memory and telemetry: what people decide by, beside where the time of a step goes.

Tokens are those of the whole job: ranks of one tensor-parallel group work on the same ones, which run.json's
layout tells. Rates are of single steps, so that their intervals are found as those of times are. What is not
known is NaN here, and `reasons` says why.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from aorta.records.blocks import Numbers, fields_of
from aorta.records.schema import RunRecord
from aorta.report.load.arrays import Arrays
from aorta.report.metrics import of_operation, operations

Floats = NDArray[np.float64]

RATES = ("tokens_per_s_per_gpu", "tokens_per_s", "model_tflops_per_gpu", "mfu")
"""Work per time, the most telling first."""
MEMORY = ("peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes")
TELEMETRY = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "utilization_percent")
WORK = "tokens_per_step"
ENERGY = "energy_per_token_mj"
THROTTLED = "throttled"
OF_MEMORY = {
    "peak_allocated_bytes": "peak_memory_bytes",
    "reserved_bytes": "reserved_memory_bytes",
    "num_alloc_retries": "alloc_retries",
    "device_used_bytes": "device_memory_bytes",
}
OF_DEVICE = {**{name: name for name in TELEMETRY}, "memory_used_bytes": "device_memory_bytes"}
"""Metrics by the field of a line."""
MEASURES = (WORK, *RATES, ENERGY, *MEMORY, *TELEMETRY, THROTTLED)
"""Of every run, null where they are not known. Where the device said that something held its clocks down
there is also throttled.<reason>: 1 in steps for which it did, else 0."""
MEASURED = ("tokens", "alloc_retries", *MEMORY, *TELEMETRY)
"""Read from records as they are; none of them is negative."""
NOT_GIVEN = {
    "tokens": "the program gave recorder.step no tokens",
    "flops_per_token": "the FLOPs of a token are not known: give aorta.instrument flops_per_token",
    "peak_flops": "the peak rate of the device is not known",
    "power_w": "no telemetry in the records",
    "memory": "the records tell nothing of an allocator",
}


def of_records(records: Sequence[Numbers]) -> Iterator[tuple[str, Sequence[float | None]]]:
    """Metrics of work, memory and the device, a value per line; a later one of the same name replaces an
    earlier one in the lines that have it."""
    yield "tokens", [record.tokens for record in records]
    memory = _columns([record.memory for record in records], OF_MEMORY)
    yield from ((OF_MEMORY[name], values) for name, values in memory.items())
    devices = [record.device for record in records]
    device = _columns(devices, OF_DEVICE)
    if not device:
        return
    yield from ((OF_DEVICE[name], values) for name, values in device.items())
    throttling = [None if line is None else line.throttling for line in devices]
    if any(reasons is not None for reasons in throttling):
        yield THROTTLED, [None if reasons is None else float(bool(reasons)) for reasons in throttling]
        for reason in dict.fromkeys(reason for reasons in throttling for reason in reasons or ()):
            yield (
                of_operation(THROTTLED, reason),
                [1.0 if reasons is not None and reason in reasons else None for reasons in throttling],
            )


def _columns(parts: Sequence[Any], names: Iterable[str]) -> dict[str, Sequence[float | None]]:
    """Fields of a part that lines may lack; nothing where all do."""
    present = [part for part in parts if part is not None]
    if not present:
        return {}
    columns: dict[str, Sequence[float | None]] = {}
    for name, values in fields_of(present, tuple(names)).items():
        left = iter(values)
        columns[name] = (
            values if len(present) == len(parts) else [None if part is None else next(left) for part in parts]
        )
    return columns


def add_measures(metrics: Arrays, run: RunRecord | None, not_measured: dict[str, str]) -> dict[str, str]:
    """Completes metrics, which are [rank, step], by MEASURES; why any of them is null."""
    num_ranks = metrics.shape[0]
    unknown = np.broadcast_to(np.nan, metrics.shape)
    for name in [of_operation(THROTTLED, reason) for reason in operations(metrics, THROTTLED)]:
        metrics.derive(name, _zero_where_known, name, THROTTLED)
    total = metrics.pop("tokens", unknown).sum(axis=0) * distinct_share(run)
    metrics[WORK] = np.broadcast_to(total, metrics.shape)
    metrics.derive("tokens_per_s", lambda step_ms: _per_s(total, step_ms), "step_ms")
    metrics.derive("tokens_per_s_per_gpu", lambda per_s: per_s / num_ranks, "tokens_per_s")
    flops_per_token = (run.flops_per_token if run is not None else None) or np.nan
    metrics.derive(
        "model_tflops_per_gpu", lambda per_s: per_s * flops_per_token / 1e12, "tokens_per_s_per_gpu"
    )
    peak = run.peak_flops if run is not None else None
    peak_flops_per_s = peak.flops_per_s if peak is not None else np.nan
    metrics.derive("mfu", lambda tflops: tflops * 1e12 / peak_flops_per_s, "model_tflops_per_gpu")
    for name in (*MEMORY, *TELEMETRY, THROTTLED):
        if name not in metrics:
            metrics[name] = unknown
    if "alloc_retries" in metrics:  # counted since the process began
        metrics["alloc_retries"] = np.diff(metrics["alloc_retries"], axis=1, prepend=np.nan)
    energy_mj = _sum_of_products(metrics["power_w"], metrics["step_ms"])  # watts times milliseconds
    per_token = np.divide(energy_mj, total, out=np.full(total.shape, np.nan), where=total > 0)
    metrics[ENERGY] = np.broadcast_to(per_token, metrics.shape)
    return _reasons(metrics, run, not_measured)


def _zero_where_known(values: Floats, known: Floats) -> Floats:
    return np.where(np.isnan(values) & np.isfinite(known), 0.0, values)


def _per_s(work: Floats, step_ms: Floats) -> Floats:
    per_s = np.full(step_ms.shape, np.nan)
    np.divide(1e3 * work, step_ms, out=per_s, where=step_ms > 0)
    return per_s


def _sum_of_products(left: Floats, right: Floats) -> Floats:
    """Over ranks, one after the other."""
    total = np.zeros(left.shape[1])
    for left_of_rank, right_of_rank in zip(left, right, strict=True):
        total += left_of_rank * right_of_rank
    return total


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
    metrics: Mapping[str, Floats], run: RunRecord | None, not_measured: dict[str, str]
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
