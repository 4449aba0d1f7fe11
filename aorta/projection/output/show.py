"""Projections as plain data for JSON and as text."""

import math
from typing import Any

from aorta.hardware import Hardware
from aorta.projection.job.model import Model
from aorta.projection.job.plan import Plan, layout_text
from aorta.projection.memory import MemoryEstimate
from aorta.projection.step import Projection


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
    if memory_estimate is not None:
        result["memory_gib"] = memory_estimate.total_bytes / 2**30
        result["memory_least_gib"] = memory_estimate.least_bytes / 2**30
        result["fits"] = memory_estimate.fits
        result["memory_verdict"] = memory_estimate.verdict
    return result


def performance_text(result: dict[str, Any]) -> str:
    if "step_ms" not in result:
        return "\n\n".join(f"{mode}\n{performance_text(part)}" for mode, part in result.items())
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
    if "memory_gib" in result:
        verdict = _verdict(result["memory_verdict"], result["memory_least_gib"])
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
        "fits": memory_estimate.fits,
        "verdict": memory_estimate.verdict,
        "rank": memory_estimate.rank,
        "moment": memory_estimate.moment,
        "parts_gib": {name: size / 2**30 for name, size in memory_estimate.parts.items()},
    }


def memory_text(result: dict[str, Any]) -> str:
    fits = _verdict(result["verdict"], result["least_gib"])
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


def _verdict(verdict: str, least_gib: float) -> str:
    if verdict == "tight":
        return f"tight: {least_gib:.1f} GiB with what stacks can save"
    return "DOES NOT FIT" if verdict == "does not fit" else verdict


def _range(values: list[float], digits: int = 1) -> str:
    return f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"
