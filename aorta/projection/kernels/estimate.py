"""One predicted time: what bounds it, where it comes from, how far it may be off."""

import math
from collections.abc import Mapping

import msgspec

from aorta.errors import ProjectionError
from aorta.hardware import RatioInterval


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
