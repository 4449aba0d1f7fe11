"""Work per time, memory and telemetry: what people decide by, beside where the time of a step goes.

Tokens are those of the whole job: ranks of one tensor-parallel group work on the same ones, which run.json's
layout tells. Rates are of single steps, so that their intervals are found as those of times are. What is not
known is NaN here, and `reasons` says why.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from aorta.account.load.arrays import Arrays
from aorta.account.metrics import (
    CORES,
    COUNTED,
    ENERGY,
    MEMORY,
    PER_STEP,
    TELEMETRY,
    THROTTLED,
    WORK,
    metric_key,
    of_operation,
    operations,
)
from aorta.account.numbers import none_if_nan
from aorta.account.rows import ratio
from aorta.records.schema import GPU_KINDS, RunRecord
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.types import PARTS_MS

NOT_GIVEN = {
    "tokens": "the program gave recorder.step no tokens",
    "flops_per_token": "the FLOPs of a token are not known: give aorta.instrument flops_per_token",
    "peak_flops": "the peak rate of the device is not known",
    "power_w": "no telemetry in the records",
    "memory": "the records tell nothing of an allocator",
    CORES: "the records tell no CPU time of whole processes",
}
MAY_SHARE = "ranks may work on the same samples: no DDP or fully_shard was seen, and no layout was given"


def add_measures(
    metrics: Arrays, collectives_kept: Flags, run: RunRecord, not_measured: dict[str, str]
) -> None:
    """Completes the metrics by what a step without an operation has of it, by shares of the step and by
    MEASURES; not_measured by reasons why any of them is null. collectives_kept: [rank, step]."""
    _complete_operations(metrics, collectives_kept)
    for name in PER_STEP:
        if f"{name}_ms" in metrics:
            metrics.derive(f"{name}_per_step", ratio, f"{name}_ms", "step_ms")
    num_ranks = metrics.shape[0]
    unknown = np.broadcast_to(np.nan, metrics.shape)
    for name in [of_operation(THROTTLED, reason) for reason in operations(metrics, THROTTLED)]:
        metrics.derive(name, _zero_if_absent, name, THROTTLED)
    total = metrics.pop("tokens", unknown).sum(axis=0) * distinct_share(run)
    num_distinct = num_ranks * distinct_share(run) if num_ranks == 1 or _shows_replicas(run) else np.nan
    if run.tokens_per_step and not np.isfinite(total).any():
        total = np.full(total.shape, run.tokens_per_step * num_distinct)
        not_measured |= {"tokens": MAY_SHARE} if np.isnan(num_distinct) else {}
    if run.samples_per_step:
        samples = run.samples_per_step * num_distinct
        not_measured |= {"samples_per_s": MAY_SHARE} if np.isnan(num_distinct) else {}
        metrics.derive("samples_per_s", lambda ms: _per_s(np.full(ms.shape, samples), ms), "step_ms")
    metrics[WORK] = np.broadcast_to(total, metrics.shape)
    metrics.derive("tokens_per_s", lambda step_ms: _per_s(total, step_ms), "step_ms")
    metrics.derive("tokens_per_s_per_gpu", lambda per_s: per_s / num_ranks, "tokens_per_s")
    flops_per_token = run.flops_per_token or np.nan
    metrics.derive(
        "model_tflops_per_gpu", lambda per_s: per_s * flops_per_token / 1e12, "tokens_per_s_per_gpu"
    )
    flops_per_step = run.flops_per_step or np.nan
    if not np.isfinite(flops_per_token) and np.isfinite(flops_per_step):
        metrics.derive(
            "model_tflops_per_gpu", lambda ms: _per_s(np.full(ms.shape, flops_per_step / 1e12), ms), "step_ms"
        )
    peak_flops_per_s = np.nan if run.peak_flops is None else run.peak_flops.flops_per_s
    metrics.derive("mfu", lambda tflops: tflops * 1e12 / peak_flops_per_s, "model_tflops_per_gpu")
    for name in (*MEMORY, *TELEMETRY, THROTTLED, CORES):
        if name not in metrics:
            metrics[name] = unknown
    for name in COUNTED:
        if name in metrics:
            metrics[name] = np.diff(metrics[name], axis=1, prepend=np.nan)
    energy_mj = _sum_of_products(metrics["power_w"], metrics["step_ms"])  # watts times milliseconds
    metrics[ENERGY] = np.broadcast_to(ratio(energy_mj, total), metrics.shape)
    not_measured |= _reasons(metrics, run, not_measured)


def _complete_operations(metrics: Arrays, collectives_kept: Flags) -> None:
    """An operation that a step does not use took no time, where communication is known, and has no calls,
    where collectives were kept: in steps that were not timed too."""
    for name in list(metrics):
        key = metric_key(name)
        if key.operation and key.name in ("comm_ms", "exposed_ms"):
            metrics.derive(name, _zero_if_absent, name, "comm_ms")
    for op in operations(metrics, "count"):
        is_absent = np.isnan(metrics[of_operation("count", op)]) & collectives_kept
        for name in ("count", "bytes"):
            values = metrics[of_operation(name, op)]
            if is_absent.any():
                metrics[of_operation(name, op)] = np.where(is_absent, 0.0, values)


def _zero_if_absent(values: Floats, total: Floats) -> Floats:
    """0 for what is not there while the total that it is a part of is known."""
    is_absent = np.isnan(values) & ~np.isnan(total)
    return np.where(is_absent, 0.0, values) if is_absent.any() else values


def _per_s(work: Floats, step_ms: Floats) -> Floats:
    return ratio(1e3 * work, step_ms)


def _sum_of_products(left: Floats, right: Floats) -> Floats:
    """Over ranks, one after the other."""
    total = np.zeros(left.shape[1])
    for left_of_rank, right_of_rank in zip(left, right, strict=True):
        total += left_of_rank * right_of_rank
    return total


def distinct_share(run: RunRecord) -> float:
    """Part of all ranks' tokens that are different ones: 1 / tp, by the layout; 1 where it is not known."""
    sizes = [(run.layout or {}).get(key) for key in ("dp", "world")]
    num_replicas, world = (float(size) if _is_count(size) else 0.0 for size in sizes)
    return num_replicas / world if 0 < num_replicas <= world else 1.0


def _shows_replicas(run: RunRecord) -> bool:
    """Whether it is known which ranks work on the same samples: by the layout, or by wrappers that give each
    rank its own. Ranks that communicate without these may share a model."""
    layout, program = run.layout or {}, run.program or {}
    told = all(_is_count(layout.get(key)) for key in ("dp", "world"))
    return told or any(program.get(name) for name in ("wrappers", "units"))


def memory_limit_bytes(run: RunRecord) -> float | None:
    """Memory of the smallest device of the run; None where run.json lists no GPU."""
    sizes = [
        float(row["memory_bytes"])
        for row in run.devices
        if row.get("kind") in GPU_KINDS and _is_count(row.get("memory_bytes"))
    ]
    return min(sizes, default=None)


def num_local_ranks(run: RunRecord) -> int:
    """Ranks on a machine: as its launcher said, or one for each GPU, or all."""
    told = noted_modes(run).get("num_local_ranks")
    devices = sum(row.get("kind") in GPU_KINDS for row in run.devices)
    return int(told) if _is_count(told) else max(min(run.world_size, devices or run.world_size), 1)


class UsableCores(NamedTuple):
    """That a rank's process may use, by its mask and its container's limit."""

    num: int
    num_ranks: int
    """That share them."""
    others: float | None
    """Of these, that other processes had on average over the run; None: not measured."""


def usable_cores(run: RunRecord, of_mean_rank: float = 1.0) -> UsableCores | None:
    """None where nobody counted them. Ranks that are bound to cores have masks of their own, of which one is
    known. of_mean_rank: what the mean rank has of them over the one that counted its own."""
    modes = noted_modes(run)
    num = modes.get("num_cores")
    if not _is_count(num):
        return None
    of_machine = {row.get("num_usable_cpus") for row in run.devices if row.get("kind") == "cpu"}
    num_ranks = num_local_ranks(run) if modes.get("shares_cores", num in of_machine) else 1
    idle, own = modes.get("idle_cores"), modes.get("own_cores")
    if not isinstance(idle, int | float) or not isinstance(own, int | float):
        return UsableCores(int(num), num_ranks, None)
    return UsableCores(int(num), num_ranks, max(num - idle - own * of_mean_rank * num_ranks, 0.0))


def noted_program(run: RunRecord) -> Mapping[str, Any]:
    """What was read of the program in its process; nothing where nobody watched."""
    return run.program or {}


def noted_modes(run: RunRecord) -> Mapping[str, Any]:
    """Settings of torch and Python in the process, of these; nothing where nobody watched."""
    modes = noted_program(run).get("modes")
    return modes if isinstance(modes, Mapping) else {}


def num_threads(run: RunRecord) -> int:
    """Of torch, in a rank's operators; 1 where nobody watched."""
    return noted_modes(run).get("num_threads") or 1


def peak_text(run: RunRecord) -> str:
    """'989 TFLOP/s bf16, NVIDIA H200 SXM 141 GB (NVIDIA H200 data sheet, dense rates, 2024-11)'; '' where the
    peak is not known."""
    peak = run.peak_flops
    if peak is None:
        return ""
    return f"{peak.flops_per_s / 1e12:,.0f} TFLOP/s {peak.precision}, {peak.hardware} ({peak.origin})"


def _reasons(metrics: Mapping[str, Floats], run: RunRecord, not_measured: dict[str, str]) -> dict[str, str]:
    of_run = run.not_measured
    tokens, flops, peak = (
        not_measured.get(name) or of_run.get(name) or NOT_GIVEN[name]
        for name in ("tokens", "flops_per_token", "peak_flops")
    )
    # Without an error's own words.
    flops = re.sub(r":? \w*(?:Error|Exception): [\s\S]*", "", of_run.get("flops_per_step", flops))
    device = not_measured.get("device") or NOT_GIVEN["power_w"]
    memory = not_measured.get("memory") or NOT_GIVEN["memory"]
    has_tokens, has_flops = (np.isfinite(metrics[name]).any() for name in (WORK, "model_tflops_per_gpu"))
    causes = {
        WORK: tokens,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens,
        "model_tflops_per_gpu": flops if has_tokens or "flops_per_step" in of_run else tokens,
        "mfu": peak if has_flops else flops if has_tokens or "flops_per_step" in of_run else tokens,
        ENERGY: tokens if not has_tokens else device,
        "peak_memory_bytes": memory,
        "reserved_memory_bytes": memory,
        "device_memory_bytes": device,
        **dict.fromkeys((*TELEMETRY, THROTTLED), device),
        CORES: NOT_GIVEN[CORES],
    }
    return {name: reason for name, reason in causes.items() if not np.isfinite(metrics[name]).any()}


def _is_count(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def totals_of_ranks(
    ranks: Sequence[int], metrics: Mapping[str, Floats], num_collectives: Ints
) -> dict[int, dict[str, float | int | None]]:
    """Over every step read, warm-up included.

    Step windows meet and do not overlap, and a step's numbers are clipped to its window, so that
    their sum is the set arithmetic over all windows together.
    """
    sums = {
        name: [none_if_nan(row.sum()) for row in metrics["step_ms" if name == "span_ms" else name]]
        for name in ("span_ms", *PARTS_MS)
    }
    return {
        rank: {
            **{name: of_ranks[i] for name, of_ranks in sums.items()},
            "num_kernels": None,  # records do not count kernels
            "num_collectives": int(num_collectives[i].sum()),
        }
        for i, rank in enumerate(ranks)
    }
