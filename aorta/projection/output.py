"""A projection as plain data for JSON and as text: the step, its memory, and every operation (explain)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aorta.hardware.part import Hardware, RatioInterval, numbers
from aorta.projection.interval import with_anchor_bounds
from aorta.projection.memory import MemoryEstimate
from aorta.projection.model import Model
from aorta.projection.ops import AttentionOp, Elementwise, GemmOp, Op, Scan
from aorta.projection.plan import Plan, layout_text
from aorta.projection.prices import Priced, Pricer
from aorta.projection.step import Projection, build_stages, project

TERMS = {
    "elementwise": "norms, RoPE, activation, residuals, loss, permutation",
    "fp8_cast": "casts to FP8 and transposes",
    "attention": "attention products",
    "gemm": "GEMMs",
    "tp_comm": "collectives of tensor parallelism",
    "ep_comm": "exchange of tokens between experts",
    "cp_comm": "exchange of keys and values",
    "dp_comm": "gathers of weights and reductions of gradients",
    "pp_comm": "transfers between pipeline stages",
    "fsdp_copy": "copies around FSDP's buffers",
    "offload": "copies of activations to the host and back",
    "optimizer": "optimizer",
    "host": "launches by the host",
    "contention": "compute and communication slow each other down",
}
UNKNOWN_TERM = RatioInterval(low=0.5, high=1.5)
"""Uncertainty of the host's term and of contention: one factor each, from a handful of runs."""


def performance(projection: Projection, memory_estimate: MemoryEstimate | None = None) -> dict[str, Any]:
    """The answer, its range, and the parts that add up to it."""
    plan, tokens = projection.plan, projection.tokens_per_s_per_gpu
    peak = projection.hardware.compute.peak_flops[plan.dtype]
    scale = projection.step_s
    result = {
        "model": projection.model.name,
        "gpu": projection.hardware.name,
        "gpus": plan.world_size,
        "layout": layout_text(plan),
        "step_ms": scale * 1e3,
        "tokens_per_s_per_gpu": tokens,
        "interval": {
            "step_ms": [projection.low_s * 1e3, projection.high_s * 1e3],
            "tokens_per_s_per_gpu": list(projection.tokens_interval),
        },
        "model_tflops_per_gpu": projection.model_flops_per_s / 1e12,
        "mfu": projection.model_flops_per_s / peak,
        "model_flops_beside_published": _beside_published(projection.model),
        "breakdown": {f"{name}_ms": seconds * 1e3 for name, seconds in projection.breakdown_s.items()},
        "device_ms": projection.device_s * 1e3,
        "host_ms": projection.host_s * 1e3,
        "host_bound": projection.host_bound,
        "source": "projected",
        "widened_by": [
            {"reason": widening.reason, "factor": math.exp(widening.width), "measured": widening.measured}
            for widening in projection.widenings
        ],
    }
    result["known"] = all(widening.known for widening in projection.widenings)
    if projection.anchor is None:
        low_s, high_s = with_anchor_bounds(scale, projection.model, plan)
        result["with_one_measurement"] = {"step_ms": [low_s * 1e3, high_s * 1e3]}
    if memory_estimate is not None:
        result["memory_gib"] = memory_estimate.total_bytes / 2**30
        result["memory_least_gib"] = memory_estimate.least_bytes / 2**30
        result["memory_most_gib"] = memory_estimate.most_bytes / 2**30
        result["fits"] = memory_estimate.fits
        result["memory_verdict"] = memory_estimate.verdict
    return result


def _beside_published(model: Model) -> dict[str, Any] | None:
    """Own FLOPs per token beside those that the vendor counts; None where it states none."""
    pct = model.flops_beside_published_pct()
    if pct is None or model.flops_published is None:
        return None
    published = model.flops_published
    return {"pct": pct, "difference": published.difference, "source": published.source}


def performance_text(result: dict[str, Any]) -> str:
    interval = result["interval"]
    lines = [
        f"{result['model']}   {result['gpus']} x {result['gpu']}   {result['layout']}",
        "",
        f"{'step':24s}{result['step_ms']:12.1f} ms   {_range(interval['step_ms'])}",
        f"{'tokens/s/GPU':24s}{result['tokens_per_s_per_gpu']:12.0f}      "
        f"{_range(interval['tokens_per_s_per_gpu'], 0)}",
        f"{'model TFLOP/s/GPU':24s}{result['model_tflops_per_gpu']:12.0f}      "
        f"{result['mfu'] * 100:.1f} % of the data sheet's peak",
    ]
    beside = result["model_flops_beside_published"]
    if beside and beside["difference"]:
        lines.append(f"{'':24s}{beside['pct']:+.1f} % FLOPs beside the vendor's: {beside['difference']}")
    if not result["known"]:
        lines.insert(3, f"{'':24s}not known: the range is what such models were off by at first, see below")
    if "memory_gib" in result:
        verdict = _verdict(result["memory_verdict"], result["memory_least_gib"], result["memory_most_gib"])
        lines.append(f"{'memory':24s}{result['memory_gib']:12.1f} GiB  {verdict}")
    lines.append("")
    total = result["step_ms"]
    for name, value in sorted(result["breakdown"].items(), key=lambda item: -item[1]):
        if value:
            lines.append(f"{name.removesuffix('_ms'):24s}{value:12.2f} ms{value / total * 100:8.1f} %")
    lines += ["", "the interval holds about seven of eight runs; it is wide for:"]
    for widening in sorted(result["widened_by"], key=lambda widening: -widening["factor"]):
        never = "" if widening["measured"] else "   never measured"
        lines.append(f"  {(widening['factor'] - 1) * 100:5.1f} %  {widening['reason']}{never}")
    if "with_one_measurement" in result:
        low, high = (value / result["step_ms"] - 1 for value in result["with_one_measurement"]["step_ms"])
        own_low, own_high = (value / result["step_ms"] - 1 for value in interval["step_ms"])
        if high - low < own_high - own_low:
            lines.append(
                f"one measured node (--measured RUN) would make {own_low:+.0%}..{own_high:+.0%} about "
                f"{low:+.0%}..{high:+.0%}"
            )
    if result["host_bound"]:
        lines.append(
            f"\nhost-bound: launching takes {result['host_ms']:.1f} ms, "
            f"the device {result['device_ms']:.1f} ms"
        )
    return "\n".join(lines)


def memory(memory_estimate: MemoryEstimate, model: Model, plan: Plan, hardware: Hardware) -> dict[str, Any]:
    return {
        "model": model.name,
        "gpu": hardware.name,
        "gpus": plan.world_size,
        "layout": layout_text(plan),
        "total_gib": memory_estimate.total_bytes / 2**30,
        "capacity_gib": memory_estimate.capacity_bytes / 2**30,
        "least_gib": memory_estimate.least_bytes / 2**30,
        "most_gib": memory_estimate.most_bytes / 2**30,
        "fits": memory_estimate.fits,
        "verdict": memory_estimate.verdict,
        "rank": memory_estimate.rank,
        "moment": memory_estimate.moment,
        "parts_gib": {name: size / 2**30 for name, size in memory_estimate.parts.items()},
    }


def memory_text(result: dict[str, Any]) -> str:
    fits = _verdict(result["verdict"], result["least_gib"], result["most_gib"])
    lines = [
        f"{result['model']}   {result['gpus']} x {result['gpu']}   {result['layout']}",
        "",
        f"{'total':24s}{result['total_gib']:10.1f} GiB   of {result['capacity_gib']:.1f}: {fits}",
        f"{'fullest':24s}pipeline rank {result['rank']}, at the {result['moment']}",
        "",
    ]
    for name, size in sorted(result["parts_gib"].items(), key=lambda item: -item[1]):
        if size:
            lines.append(f"{name:24s}{size:10.2f} GiB")
    return "\n".join(lines)


def _verdict(verdict: str, least_gib: float, most_gib: float) -> str:
    name = "DOES NOT FIT" if verdict == "does not fit" else verdict
    return f"{name}: {least_gib:.1f} to {most_gib:.1f} GiB, by what the stack saves and copies"


def _range(values: list[float], digits: int = 1) -> str:
    return f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"


def explain(model: Model, plan: Plan, pricer: Pricer) -> dict[str, Any]:
    """The projection with one row per operation of each unit."""
    projection = project(model, plan, pricer)
    rows = list(_rows(projection, pricer))
    result = performance(projection)
    result["operations"] = rows
    result["factors"] = msgspec.structs.asdict(pricer.factors)
    result["hardware_numbers"] = dict(numbers(pricer.hardware))
    result["ablation"] = ablations(model, plan, pricer, projection, rows)
    return result


def _rows(projection: Projection, pricer: Pricer) -> Any:
    """Operations of the whole step, equal units joined. Times are as if alone on the device."""
    plan = projection.plan
    pricer = pricer.with_plan(plan)
    if plan.pp > 1:
        grid = build_stages(projection.model, plan, pricer)
        units = [unit for row in grid for stage in row for unit in stage.units]
    else:
        units = list(projection.stage.units)
    counts: dict[tuple[str, int], int] = {}
    distinct = {}
    for unit in units:
        key = (unit.name, len(unit.backward))
        counts[key] = counts.get(key, 0) + 1
        distinct[key] = unit
    for key, unit in distinct.items():
        for priced in (*unit.forward, *unit.backward):
            row = _row(unit.name, priced, counts[key], plan.num_micro_batches)
            if isinstance(priced.op, AttentionOp):
                row["source"] = row["source"].replace(pricer.family, pricer.attention_library)
            yield row


def _row(unit: str, priced: Priced, count: int, num_micro_batches: int) -> dict[str, Any]:
    estimate = priced.estimate
    return {
        "unit": unit,
        "count": count,
        "operation": priced.op.name,
        "phase": priced.op.phase,
        "category": priced.category,
        "size": _size(priced.op),
        "us": priced.seconds * 1e6,
        "interval_us": [estimate.low_s * 1e6, estimate.high_s * 1e6],
        "interval_share": [estimate.low_s / estimate.time_s, estimate.high_s / estimate.time_s]
        if estimate.time_s
        else [1.0, 1.0],
        "step_ms": priced.seconds * 1e3 * count * num_micro_batches,
        "bound": estimate.bound,
        "source": estimate.source,
    }


def _size(op: Op) -> str:
    if isinstance(op, GemmOp):
        batch = f"{op.batch} x " if op.batch > 1 else ""
        calls = f" x {op.launches} calls" if op.launches > 1 else ""
        return f"{batch}{op.m} x {op.n} x {op.k} {op.layout} {op.dtype}{calls}"
    if isinstance(op, AttentionOp):
        heads = f"{op.num_heads}/{op.num_kv_heads} heads"
        return f"{op.batch} x {op.seq_q} x {op.seq_kv}, {heads} of {op.qk_dim}/{op.v_dim}"
    if isinstance(op, Elementwise):
        return f"{(op.bytes_read + op.bytes_written) / 1e6:.1f} MB {op.access}"
    if isinstance(op, Scan):
        return f"{op.flops / 1e9:.1f} GFLOP, {op.size_bytes / 1e6:.1f} MB"
    return f"{op.op} {op.size_bytes / 1e6:.1f} MB over {op.axis}"


def ablations(
    model: Model, plan: Plan, pricer: Pricer, projection: Projection, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The step with one term switched off at a time. Terms overlap, so the savings need not add up.

    The interval of a saving is that of the term's own operations (rows), about 80 % of what was measured.
    """
    savings = []
    for term, meaning in TERMS.items():
        ablated = project(model, plan, pricer.without_term(term))
        saved_ms = (projection.step_s - ablated.step_s) * 1e3
        interval = term_interval(term, rows, pricer)
        if term == "contention" or ablated.step_s != projection.step_s:
            savings.append(
                {
                    "term": term,
                    "meaning": meaning,
                    "step_ms": ablated.step_s * 1e3,
                    "saves_ms": saved_ms,
                    "interval_ms": sorted((saved_ms * interval.low, saved_ms * interval.high)),
                }
            )
    return sorted(savings, key=lambda row: -float(row["saves_ms"]))


def term_interval(term: str, rows: Sequence[Mapping[str, Any]], pricer: Pricer) -> RatioInterval:
    """The intervals of the term's operations by their share of its time; of the kind where it has none."""
    term_rows = [row for row in rows if row["category"] == term and row["us"] > 0]
    efficiency = pricer.hardware.efficiency
    if not term_rows:
        if term.endswith("_comm"):
            return efficiency.collective.interval
        return efficiency.memory_interval if term in ("optimizer", "fsdp_copy") else UNKNOWN_TERM
    time_us = sum(row["us"] * row["count"] for row in term_rows)
    low, high = (
        sum(row["us"] * row["count"] * row["interval_share"][end] for row in term_rows) / time_us
        for end in (0, 1)
    )
    return RatioInterval(low=low, high=high)


def explain_text(result: dict[str, Any]) -> str:
    lines = [performance_text(result), ""]
    lines += ["operations (one micro-batch of one unit, alone on the device)", ""]
    for row in result["operations"]:
        lines.append(
            f"{row['unit']:10s}x{row['count']:<4d}{row['operation']:26s}{row['phase']:10s}"
            f"{row['us']:10.1f} us  {row['bound']:8s}{row['size']:46s}{row['source']}"
        )
    lines += ["", "the step without one term", ""]
    for row in result["ablation"]:
        change = f"{row['step_ms']:12.1f} ms{-row['saves_ms']:+12.1f} ms"
        low, high = (f"{-value:+.1f}" for value in row["interval_ms"][::-1])
        lines.append(f"{row['term']:14s}{change}   {low:>10s} to {high:10s}{row['meaning']}")
    return "\n".join(lines)
