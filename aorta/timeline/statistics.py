"""Numbers of a run or a side with honest intervals: estimate(), side(), contrast(); and what is left out as
warm-up.

Neighbouring steps resemble each other and the ranks of a step move together, so 50 steps of 8 ranks are not
400 measurements, nor 50. What a series tells of its own error is aorta.timeline.noise; two sides are compared
step by step in aorta.timeline.ratio, and where only their numbers are left, by contrast().
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from aorta.timeline.arrays import Floats
from aorta.timeline.noise import error_of_mean

Averaging = Literal["median", "mean"]
"""Statistics over steps."""
ALPHA = 0.05
"""Rate of false alarms; intervals hold the true value in 1 - ALPHA of all cases."""
LEVEL = f"{100 * (1 - ALPHA):g} %"
"""1 - ALPHA as outputs print it beside an interval."""
MIN_STEPS = 8
"""Fewer steps say nothing about their own spread."""
SAME = 1e-9
"""Relative difference below which two numbers are one."""
WARMUP_FACTOR = 1.2
WARMUP_WINDOW = 5
WARMUP_DEVIATIONS = 1.5
WARMUP_LEAST = 0.01
WARMUP_SHARE = 3
WARMUP_RULE = (
    "leading steps are left out until one takes at most"
    f" {WARMUP_FACTOR} x the median of the run's second half and the running median of"
    f" {WARMUP_WINDOW} steps has settled to within {WARMUP_DEVIATIONS} standard deviations of it"
    f" (from the median deviation, at least {100 * WARMUP_LEAST:.0f} %), on the slowest rank;"
    f" at least one, at most 1 in {WARMUP_SHARE}; none of fewer than 3"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number from the steps of one run, and how far another such run of the same could be from it."""

    value: float
    error: float
    """Standard error."""
    freedom: float
    """Degrees of freedom of the error."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Candidate against reference, of numbers that are not taken step by step."""

    reference: float
    candidate: float
    difference: float
    difference_interval: tuple[float, float]
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    """On a scale of ratios, so that neither end is below 0. None where a side is not above 0."""
    p_value: float


def estimate(values: Floats, statistic: Averaging = "median") -> Estimate | None:
    """Statistic over ranks of each rank's statistic over steps, with its error. values is [rank, step].

    The error is that of steps in which every rank has a value. None where these are fewer than
    MIN_STEPS or fewer than half. That of a median goes by the share of steps below it, whatever their
    distribution is.

    Source: Woodruff, Journal of the American Statistical Association 47 (1952), for medians.
    """
    complete = values[:, ~np.isnan(values).any(axis=0)]
    num_steps = complete.shape[1]
    if num_steps < MIN_STEPS or 2 * num_steps < values.shape[1] or len(values) == 0:
        return None
    reduce = np.nanmedian if statistic == "median" else np.nanmean
    value = float(reduce(reduce(values, axis=1)))
    centre = np.median(complete, axis=0) if statistic == "median" else complete.mean(axis=0)
    if np.ptp(centre) <= SAME * float(np.abs(centre).max()):
        return Estimate(value, 0.0, float(num_steps))
    series = centre - centre.mean() if statistic == "mean" else np.sign(centre - np.median(centre)) / 2
    error = error_of_mean(series)
    half = float(error.width(ALPHA))
    if statistic == "median":
        low, middle, high = np.quantile(centre, [max(0.5 - half, 0.0), 0.5, min(0.5 + half, 1.0)])
        half = float(max(middle - low, high - middle))
    freedom = float(error.freedoms[0])
    return Estimate(value, half / _quantile(1 - ALPHA / 2, freedom), freedom)


def contrast(reference: Sequence[Estimate], candidate: Sequence[Estimate]) -> Contrast:
    """Two sides of one or more runs each.

    A side's number is the mean of its runs' numbers. With one run on each side the error is that within
    the runs. With more, runs are the unit: their spread, pooled over both sides, is the error, though never
    less than the error within the runs.
    """
    r, c = (float(np.mean([run.value for run in runs])) for runs in (reference, candidate))
    freedom = float(len(reference) + len(candidate) - 2)
    spread = None
    if freedom:
        squares = (len(runs) * float(np.var([run.value for run in runs])) for runs in (reference, candidate))
        spread = sum(squares) / freedom
    variances = [_variance(runs, spread) for runs in (reference, candidate)]
    if not freedom:
        freedom = _welch(variances, (reference[0].freedom, candidate[0].freedom))
    error, width = float(np.sqrt(sum(variances))), _quantile(1 - ALPHA / 2, freedom)
    difference = c - r
    if error <= SAME * max(abs(r), abs(c)):
        p_value = 1.0 if abs(difference) <= SAME * max(abs(r), abs(c)) else 0.0
    else:
        p_value = _two_sided(difference / error, freedom)
    ratio = interval = None
    if r > 0 and c > 0:
        ratio = c / r
        half = width * float(np.sqrt(variances[0] / r**2 + variances[1] / c**2))
        interval = (ratio * float(np.exp(-half)), ratio * float(np.exp(half)))
    around = (difference - width * error, difference + width * error)
    return Contrast(r, c, difference, around, ratio, interval, p_value)


def side(runs: Sequence[Estimate]) -> tuple[float, tuple[float, float]]:
    """The number of one side alone, and its interval."""
    value = float(np.mean([run.value for run in runs]))
    spread = float(np.var([run.value for run in runs], ddof=1)) if len(runs) > 1 else None
    freedom = runs[0].freedom if len(runs) == 1 else float(len(runs) - 1)
    half = _quantile(1 - ALPHA / 2, freedom) * float(np.sqrt(_variance(runs, spread)))
    return value, (value - half, value + half)


def _variance(runs: Sequence[Estimate], spread: float | None) -> float:
    within_run = float(np.mean([run.error**2 for run in runs]))
    return max(within_run, spread or 0.0) / len(runs)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values after allowing for their number: calling those at most ALPHA raises a false alarm
    anywhere among them in at most ALPHA of all cases, however they depend on each other.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    adjusted = [0.0] * len(p_values)
    greatest = 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        greatest = max(greatest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = greatest
    return adjusted


def warmup_steps(step_ms: Floats) -> int:
    """Number of leading steps that WARMUP_RULE leaves out; step_ms is [rank, step]."""
    num_steps = step_ms.shape[1]
    if num_steps < 3:
        return 0
    slowest = np.where(np.isnan(step_ms), -np.inf, step_ms).max(axis=0)
    later = slowest[num_steps // 2 :]
    usual = float(np.median(later))
    if not np.isfinite(usual):
        return 1
    deviation = 1.4826 * float(np.median(np.abs(later - usual)))
    settled = usual + max(WARMUP_DEVIATIONS * deviation, WARMUP_LEAST * usual)
    num = 1
    while num < num_steps // WARMUP_SHARE and (
        slowest[num] > WARMUP_FACTOR * usual or np.median(slowest[num : num + WARMUP_WINDOW]) > settled
    ):
        num += 1
    return num


def _welch(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    parts = sum(v * v / f for v, f in zip(variances, freedoms, strict=True))
    return sum(variances) ** 2 / parts if parts > 0 else min(freedoms)


def _quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _two_sided(t: float, freedom: float) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(t)))
