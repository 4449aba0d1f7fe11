"""Projections as plain data for JSON and as text."""

import math
from typing import Any

from aorta.hardware import Hardware
from aorta.projection.memory import Memory
from aorta.projection.model import Model
from aorta.projection.plan import Plan, layout_text
from aorta.projection.step import Projection


def performance(projection: Projection, used: Memory | None = None) -> dict[str, Any]:
    """The answer, its range, and the parts that add up to it."""
    plan, tokens = projection.plan, projection.tokens_per_s_per_gpu
    peak = projection.hardware.compute.peak_flops[plan.dtype]
    scale = projection.step_s
    found = {
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
            {"reason": one.reason, "factor": math.exp(one.width), "measured": one.measured}
            for one in projection.widenings
        ],
    }
    if used is not None:
        found["memory_gib"] = used.total_bytes / 2**30
        found["memory_least_gib"] = used.least_bytes / 2**30
        found["fits"] = used.fits
        found["memory_verdict"] = used.verdict
    return found


def performance_text(found: dict[str, Any]) -> str:
    if "step_ms" not in found:
        return "\n\n".join(f"{mode}\n{performance_text(part)}" for mode, part in found.items())
    interval = found["interval"]
    lines = [
        f"{found['model']}   {found['gpus']} x {found['gpu']}   {found['layout']}",
        "",
        f"{'step':24s}{found['step_ms']:12.1f} ms   {_range(interval['step_ms'])}",
        f"{'tokens/s/GPU':24s}{found['tokens_per_s_per_gpu']:12.0f}      "
        f"{_range(interval['tokens_per_s_per_gpu'], 0)}",
        f"{'model TFLOP/s/GPU':24s}{found['model_tflops_per_gpu']:12.0f}      "
        f"{found['mfu'] * 100:.1f} % of the data sheet's peak",
    ]
    if "memory_gib" in found:
        verdict = _verdict(found["memory_verdict"], found["memory_least_gib"])
        lines.append(f"{'memory':24s}{found['memory_gib']:12.1f} GiB  {verdict}")
    lines.append("")
    total = found["step_ms"]
    for name, value in sorted(found["breakdown"].items(), key=lambda item: -item[1]):
        if value:
            lines.append(f"{name.removesuffix('_ms'):24s}{value:12.2f} ms{value / total * 100:8.1f} %")
    lines += ["", "the interval holds about seven of eight runs; it is wide for:"]
    for one in sorted(found["widened_by"], key=lambda one: -one["factor"]):
        never = "" if one["measured"] else "   never measured"
        lines.append(f"  {(one['factor'] - 1) * 100:5.1f} %  {one['reason']}{never}")
    if found["host_bound"]:
        lines.append(
            f"\nhost-bound: launching takes {found['host_ms']:.1f} ms, the device {found['device_ms']:.1f} ms"
        )
    return "\n".join(lines)


def memory(used: Memory, model: Model, plan: Plan, hardware: Hardware) -> dict[str, Any]:
    return {
        "model": model.name,
        "gpu": hardware.name,
        "gpus": plan.world_size,
        "layout": layout_text(plan),
        "total_gib": used.total_bytes / 2**30,
        "capacity_gib": used.capacity_bytes / 2**30,
        "least_gib": used.least_bytes / 2**30,
        "fits": used.fits,
        "verdict": used.verdict,
        "rank": used.rank,
        "moment": used.moment,
        "parts_gib": {name: size / 2**30 for name, size in used.parts.items()},
    }


def memory_text(found: dict[str, Any]) -> str:
    fits = _verdict(found["verdict"], found["least_gib"])
    lines = [
        f"{found['model']}   {found['gpus']} x {found['gpu']}   {found['layout']}",
        "",
        f"{'total':24s}{found['total_gib']:10.1f} GiB   of {found['capacity_gib']:.1f}: {fits}",
        f"{'fullest':24s}pipeline rank {found['rank']}, at the {found['moment']}",
        "",
    ]
    for name, size in sorted(found["parts_gib"].items(), key=lambda item: -item[1]):
        if size:
            lines.append(f"{name:24s}{size:10.2f} GiB")
    return "\n".join(lines)


def _verdict(verdict: str, least_gib: float) -> str:
    if verdict == "tight":
        return f"tight: {least_gib:.1f} GiB with what stacks can save"
    return "DOES NOT FIT" if verdict == "does not fit" else verdict


def _range(values: list[float], digits: int = 1) -> str:
    return f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"
