"""Metrics with intervals from the iterations of all ranks."""

import importlib.util
import math
from typing import Literal

import numpy as np

from aorta.account.results.schema import Better, Interval, Metric
from aorta.timeline.arrays import Floats
from aorta.timeline.noise import NORMAL_95, inflation
from aorta.timeline.statistics import MIN_STEPS, side
from aorta.timeline.statistics import estimate as estimate_of


def not_measured(unit: str, reason: str, better: Better = "neither") -> Metric:
    return Metric(value=None, unit=unit, better=better, reason=reason)


def mean_metric(values: Floats, unit: str, better: Better = "lower") -> Metric:
    """Mean of a series, with the interval that allows for neighbours resembling each other."""
    return _estimated(values, "mean", unit, better)


def median_metric(values: Floats, unit: str) -> Metric:
    """Median, as mean_metric; less is better."""
    return _estimated(values, "median", unit, "lower")


def _estimated(values: Floats, statistic: Literal["mean", "median"], unit: str, better: Better) -> Metric:
    num = len(values)
    if num == 0:
        return not_measured(unit, "no iterations", better)
    value = float(values.mean() if statistic == "mean" else np.median(values))
    if reason := _no_interval(num):
        return Metric(value=value, unit=unit, better=better, num=num, reason=reason)
    run_estimate = estimate_of(values.reshape(1, -1), statistic)
    assert run_estimate is not None
    low, high = side([run_estimate])[1]
    if values.min() >= 0:  # a time: what lies below 0 is the approximation's
        low = max(low, 0.0)
    return Metric(
        value=value, unit=unit, better=better, interval=Interval(low=low, high=high),
        error=run_estimate.error, freedom=run_estimate.freedom, num=num,
    )  # fmt: skip


def rate_metric(per_iteration: float, mean_ms: Metric, value_per_s: float, unit: str) -> Metric:
    """Throughput per second of that much per iteration; its interval is that of the mean iteration."""
    if per_iteration == 0:
        return not_measured(unit, "the workload has none", "higher")
    interval, error = None, None
    if mean_ms.interval is not None and mean_ms.error is not None and mean_ms.value:
        low_ms, high_ms = mean_ms.interval.low, mean_ms.interval.high
        share = value_per_s / (1e3 * per_iteration / mean_ms.value)
        interval = Interval(
            low=share * 1e3 * per_iteration / high_ms if high_ms else None,
            high=share * 1e3 * per_iteration / low_ms if low_ms and low_ms > 0 else None,
        )
        error = value_per_s * mean_ms.error / mean_ms.value
    return Metric(
        value=value_per_s, unit=unit, better="higher", interval=interval, error=error,
        freedom=mean_ms.freedom, num=mean_ms.num, reason=mean_ms.reason,
    )  # fmt: skip


def quantile_metric(values: Floats, share: float, unit: str) -> Metric:
    """A quantile, linearly interpolated, with the distribution-free interval of order statistics.

    How many iterations lie below the true quantile is binomial; iterations that resemble their neighbours
    count for fewer. A side beyond the extreme iterations is None: so few say nothing about it.
    """
    num = len(values)
    if num == 0:
        return not_measured(unit, "no iterations", "lower")
    value = float(np.percentile(values, 100 * share))
    if reason := _no_interval(num):
        return Metric(value=value, unit=unit, better="lower", num=num, reason=reason)
    effective = max(int(num / float(inflation(values - values.mean()))), 1)
    low_place, high_place = binomial_places(effective, share)
    ordered = np.sort(values)
    # The k-th of `effective` independent iterations stands at k / effective of those that there are.
    low = float(ordered[math.floor((low_place - 1) / effective * num)]) if low_place >= 1 else None
    high = None
    if high_place <= effective:
        high = float(ordered[min(math.ceil(high_place / effective * num), num) - 1])
    error = (high - low) / (2 * NORMAL_95) if low is not None and high is not None else None
    sides = [name for name, bound in (("lower", low), ("upper", high)) if bound is None]
    unbound = f"no {' and no '.join(sides)} bound from {effective} independent iterations"
    return Metric(
        value=value,
        unit=unit,
        better="lower",
        interval=Interval(low=low, high=high),
        error=error,
        freedom=None if error is None else max(effective / 2, 1.5),
        num=num,
        reason=unbound if sides else None,
    )


def binomial_places(num: int, share: float) -> tuple[int, int]:
    """Places i <= j of order statistics (from 1) with at most 2.5 % chance each that the quantile lies below
    the i-th or above the j-th; 0 and num + 1 where no iteration is far enough out."""
    from scipy.special import bdtr

    cumulative = bdtr(np.arange(num + 1), num, share)
    # P(quantile < x_(i)) = P(at most i - 1 lie below it); P(quantile > x_(j)) = P(at least j lie below it).
    low = int(np.searchsorted(cumulative, 0.025, side="right"))
    high = int(np.searchsorted(cumulative, 0.975, side="left")) + 1
    return low, high


def _no_interval(num: int) -> str | None:
    if num < MIN_STEPS:
        return f"no interval: {num} iterations, {MIN_STEPS} are needed"
    if importlib.util.find_spec("scipy") is None:
        return "no interval: scipy is not installed"
    return None
