"""One predicted time: what bounds it, where it comes from, how far it may be off.

The simplest prediction is here as well: an element-wise kernel, bound by memory.
"""

import math
from collections.abc import Mapping

import msgspec

from aorta.errors import ProjectionError
from aorta.hardware.part import Hardware, RatioInterval


class KernelEstimate(msgspec.Struct, frozen=True):
    """A predicted time. low_s and high_s hold about 80 % of the measurements this kind was compared with."""

    time_s: float
    bound: str
    """Limit of the time: compute, memory, latency, lds, link, nic, exp."""
    source: str
    """Model that made the estimate, and the part it is for."""
    low_s: float
    high_s: float
    details: dict[str, float] = {}
    """Of a collective: the parts of its time, and its bus bandwidth beside what the links allow."""


def estimate(
    time_s: float,
    bound: str,
    source: str,
    interval: RatioInterval,
    details: Mapping[str, float] | None = None,
) -> KernelEstimate:
    """An Estimate whose range is the interval's."""
    if not math.isfinite(time_s):
        raise ProjectionError(f"{source} gives a time of {time_s} s: a size or a rate is far out of range")
    assert time_s >= 0
    return KernelEstimate(
        time_s, bound, source, time_s * interval.low, time_s * interval.high, dict(details) if details else {}
    )


def memory_bound(
    hardware: Hardware, bytes_read: float, bytes_written: float, flops: float = 0.0
) -> KernelEstimate:
    """An element-wise kernel or copy: HBM traffic or vector arithmetic, and the launch.

    Nothing is assumed to be in a cache. The arithmetic is that of fp32.
    """
    traffic_s = (bytes_read + bytes_written) / hardware.memory.sustained_hbm_bytes_per_s
    compute_s = flops / hardware.compute.vector_flops
    launch_s = hardware.launch.kernel_s + hardware.launch.ramp_s
    work_s = max(traffic_s, compute_s)
    bound = "latency" if work_s < launch_s else "memory" if traffic_s >= compute_s else "compute"
    return estimate(
        launch_s + work_s,
        bound,
        "memory roofline",
        hardware.efficiency.memory_interval,
    )
