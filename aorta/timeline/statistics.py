"""Is a difference between runs more than their noise? Medians over steps with honest intervals.

Neighbouring steps resemble each other and the ranks of a step move together, so 50 steps of 8 ranks
are not 400 measurements, nor 50. What is resampled is blocks of whole steps, all ranks with them. On
runs of usual length blocks alone call noise a difference two to five times too often (they cut the
autocorrelation, and its estimate from few steps is too small), hence three corrections, each checked
by benchmarks/false_alarms.py:

1. The autocorrelation is estimated from ranks of the values (a rare slow step does not hide it),
   corrected for its bias in short series, and moved up by half a standard error.
2. The standard error of the bootstrap is scaled by what blocks of that length lose of it, because they
   cut the correlation and because they vary about the mean of the very steps they are drawn from.
3. Intervals use Student's t with half the number of effective steps as degrees of freedom.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALPHA = 0.05
"""Rate of false alarms; intervals hold the true value in 1 - ALPHA of all cases."""
POWER = 0.8
"""How often a difference of the detectable size is seen."""
MIN_STEPS = 8
"""Fewer steps say nothing about their own spread."""
NUM_DRAWS = 500
MAX_RANKS = 64
"""Ranks that are resampled; of more, this many evenly spaced ones. Fewer ranks only widen the interval."""
MAX_WORK = 3e7
"""Rank-steps resampled per metric; longer runs get fewer draws."""
MIN_DRAWS = 100
MAX_PERSISTENCE = 0.97
CAUTION = 0.5
"""Standard errors by which the estimated persistence is moved up."""
MIN_FREEDOM = 1.5
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


def warmup_steps(step_ms: Floats) -> int:
    """How many leading steps WARMUP_RULE leaves out. step_ms is [rank, step]."""
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


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number from the steps of one run, and how far another such run of the same could be from it."""

    value: float
    error: float
    """Standard error."""
    freedom: float
    """Degrees of freedom of the error."""
    num_steps: int
    effective_steps: float
    """Independent steps that would tell as much."""
    block: int
    """Steps that were resampled together."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Candidate against reference."""

    reference: float
    candidate: float
    reference_interval: tuple[float, float]
    candidate_interval: tuple[float, float]
    difference: float
    difference_interval: tuple[float, float]
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    """Fieller's: it contains 1 exactly where difference_interval contains 0. None where the reference
    may be 0."""
    p_value: float
    error: float
    freedom: float

    def detectable(self, share: float = 1.0) -> float:
        """The smallest true difference that is seen in POWER of such comparisons, when this metric has
        that share of the rate of false alarms."""
        called = _quantile(1 - ALPHA * share / 2, self.freedom)
        return (called + _quantile(POWER, self.freedom)) * self.error


def estimate(values: Floats, statistic: Literal["median", "mean"] = "median") -> Estimate | None:
    """The statistic of the ranks' statistics over steps, of values [rank, step].

    The error is that of steps in which every rank has a value. None where these are fewer than
    MIN_STEPS or fewer than half.
    """
    complete = values[:, ~np.isnan(values).any(axis=0)]
    num_steps = complete.shape[1]
    if num_steps < MIN_STEPS or 2 * num_steps < values.shape[1] or len(values) == 0:
        return None
    of = np.nanmedian if statistic == "median" else np.nanmean
    value = float(of(of(values, axis=1)))
    centre = np.median(complete, axis=0) if statistic == "median" else complete.mean(axis=0)
    rho = persistence(centre)
    block = block_length(rho, num_steps)
    inflation = variance_inflation(rho, statistic)
    reproduced = variance_inflation(rho, statistic, block)
    # Blocks vary about the mean of these steps, not about the true one: a share block / num_steps less.
    reproduced = max(reproduced - inflation * block / num_steps, reproduced / 2)
    error = _bootstrap_error(complete, block, statistic) * float(np.sqrt(inflation / reproduced))
    effective = num_steps / inflation
    return Estimate(value, error, max(effective / 2, MIN_FREEDOM), num_steps, effective, block)


def median_interval(values: Floats) -> tuple[float, float, float]:
    """Median, and low and high of its 95 % bootstrap interval, of values that do not depend on each other.

    For ratios of neighbouring blocks, free of drift and persistence. For steps of a run see estimate().
    """
    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def persistence(series: Floats) -> float:
    """Lag-one correlation of the steps, on the side of caution; 0 for a series without spread.

    Of normal scores of ranks. Independent noise on top of a slow change lowers the correlation of
    neighbours but not its decay: the roots of the second and the third correlation count where those
    are above chance. The bias is Kendall's, -(1 + 3 rho) / n.
    """
    num = len(series)
    if np.ptp(series) <= SAME * float(np.abs(series).max()):
        return 0.0
    from scipy.special import ndtri

    scores = ndtri((_places(series) - 0.5) / num)
    scores -= scores.mean()
    power = float(scores @ scores)
    if power == 0:
        return 0.0
    lags = [float(scores[:-k] @ scores[k:]) / power for k in (1, 2, 3)]
    rho = lags[0] + (1 + 3 * lags[0]) / num
    for k in (2, 3):
        if lags[0] > 0 and lags[k - 1] > 2 / np.sqrt(num):  # alternating steps are no slow change
            rho = max(rho, (lags[k - 1] + k / num) ** (1 / k))
    rho = min(max(rho, 0.0), MAX_PERSISTENCE)
    return min(rho + CAUTION * float(np.sqrt((1 - rho * rho) / num)), MAX_PERSISTENCE)


def block_length(rho: float, num_steps: int) -> int:
    """Steps that are resampled together: Politis and White's for a series with this persistence.

    l = (3 n / 2 (2 rho / (1 - rho^2))^2)^(1/3) for circular blocks; at most a quarter of the steps.

    Source: Politis and White, Econometric Reviews 23 (2004), with the correction of Patton, Politis
    and White (2009).
    """
    best = (1.5 * num_steps * (2 * rho / (1 - rho * rho)) ** 2) ** (1 / 3)
    return int(min(max(round(best), 1), max(num_steps // 4, 1)))


def variance_inflation(rho: float, statistic: Literal["median", "mean"], block: int | None = None) -> float:
    """Variance of a statistic of correlated steps over that of independent ones; at least 1.

    With a block length: the part that blocks of that length reproduce. A median depends on which
    steps lie above it; of a normal series with correlation r these signs correlate by 2/pi asin(r).
    """
    lags = np.arange(1, 1000)
    correlation = rho**lags
    if statistic == "median":
        correlation = 2 / np.pi * np.arcsin(correlation)
    if block is not None:
        correlation = correlation * np.clip(1 - lags / block, 0, None)
    return float(1 + 2 * correlation.sum())


def contrast(reference: Sequence[Estimate], candidate: Sequence[Estimate]) -> Contrast:
    """Compare two sides of one or more runs each.

    A side's number is the mean of its runs' numbers. With one run on each side the error is that
    within the runs, and so is the claim. With more, runs are the unit: their spread, pooled over
    both sides, is the error, though never less than the error within the runs. That is the variance of
    resampling runs first and then blocks of their steps, without the share (k - 1) / k by which k
    resampled runs fall short.
    """
    r, c = (float(np.mean([run.value for run in runs])) for runs in (reference, candidate))
    spread, freedom = _run_spread(reference, candidate)
    variances = [_variance(runs, spread) for runs in (reference, candidate)]
    tiny = (SAME * max(abs(r), abs(c))) ** 2
    variance = sum(variances)
    difference = c - r
    if freedom is None:
        freedom = _welch(variances, (reference[0].freedom, candidate[0].freedom))
    width = _quantile(1 - ALPHA / 2, freedom)
    error = float(np.sqrt(variance))
    if variance <= tiny:
        p_value = 1.0 if difference * difference <= tiny else 0.0
    else:
        p_value = _two_sided(difference / error, freedom)
    return Contrast(
        reference=r,
        candidate=c,
        reference_interval=side(reference)[1],
        candidate_interval=side(candidate)[1],
        difference=difference,
        difference_interval=(difference - width * error, difference + width * error),
        ratio=c / r if r > 0 else None,
        ratio_interval=_fieller(r, c, variances[0], variances[1], width),
        p_value=p_value,
        error=error,
        freedom=freedom,
    )


def side(runs: Sequence[Estimate]) -> tuple[float, tuple[float, float]]:
    """The number of one side alone, and its interval."""
    value = float(np.mean([run.value for run in runs]))
    spread = float(np.var([run.value for run in runs], ddof=1)) if len(runs) > 1 else None
    return value, _around(value, _variance(runs, spread), _freedom(runs))


def holm(p_values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """p-values after allowing for their number: calling those at most ALPHA raises a false alarm
    anywhere among them in at most ALPHA of all cases, however they depend on each other.

    weights: shares of the rate of false alarms, chosen before looking; equal where left out.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979), section 4 for weights.
    """
    shares = [1.0] * len(p_values) if weights is None else list(weights)
    adjusted = [0.0] * len(p_values)
    left, greatest = sum(shares), 0.0
    for i in sorted(range(len(p_values)), key=lambda i: p_values[i] / shares[i]):
        greatest = max(greatest, min(1.0, left / shares[i] * p_values[i]))
        adjusted[i] = greatest
        left -= shares[i]
    return adjusted


def _bootstrap_error(values: Floats, block: int, statistic: Literal["median", "mean"]) -> float:
    """Standard deviation of the statistic over draws of blocks of steps; circular, so that every step
    is drawn equally often. Seeded: a report made twice is the same."""
    num_ranks, num_steps = values.shape
    if num_ranks > MAX_RANKS:
        values = values[np.linspace(0, num_ranks - 1, MAX_RANKS).round().astype(int)]
    num_draws = int(min(max(MAX_WORK / values.size, MIN_DRAWS), NUM_DRAWS))
    drawn = _draw_counts(num_steps, block, num_draws)
    if statistic == "mean":
        return float((drawn @ values.mean(axis=0) / num_steps).std(ddof=1))
    medians = np.array([_drawn_medians(row, drawn) for row in values])
    return float(np.median(medians, axis=0).std(ddof=1))


def _draw_counts(num_steps: int, block: int, num_draws: int) -> NDArray[np.int32]:
    """[draw, step]: how often each step is in each draw."""
    rng = np.random.default_rng(0)
    num_blocks = -(-num_steps // block)
    starts = rng.integers(0, num_steps, (num_draws, num_blocks))
    counts = np.zeros((num_draws, num_steps), dtype=np.int32)
    rows = np.arange(num_draws)
    for i in range(num_blocks):
        for offset in range(min(block, num_steps - i * block)):
            counts[rows, (starts[:, i] + offset) % num_steps] += 1
    return counts


def _drawn_medians(row: Floats, drawn: NDArray[np.int32]) -> Floats:
    """Median of every draw of one rank's steps."""
    order = np.argsort(row, kind="stable")
    reached = np.cumsum(drawn[:, order], axis=1)
    half = len(row) / 2
    low, high = (reached < half).sum(axis=1), (reached <= half).sum(axis=1)
    ordered = row[order]
    result: Floats = (ordered[low] + ordered[high]) / 2
    return result


def _run_spread(
    reference: Sequence[Estimate], candidate: Sequence[Estimate]
) -> tuple[float | None, float | None]:
    """Variance between runs of one side, pooled, and its degrees of freedom; None for single runs."""
    freedom = len(reference) + len(candidate) - 2
    if freedom == 0:
        return None, None
    squares = sum(len(runs) * float(np.var([run.value for run in runs])) for runs in (reference, candidate))
    return squares / freedom, float(freedom)


def _variance(runs: Sequence[Estimate], spread: float | None) -> float:
    within = float(np.mean([run.error**2 for run in runs]))
    return max(within, spread or 0.0) / len(runs)


def _freedom(runs: Sequence[Estimate]) -> float:
    return runs[0].freedom if len(runs) == 1 else float(len(runs) - 1)


def _welch(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    parts = sum(v * v / f for v, f in zip(variances, freedoms, strict=True))
    return sum(variances) ** 2 / parts if parts > 0 else min(freedoms)


def _around(value: float, variance: float, freedom: float) -> tuple[float, float]:
    width = _quantile(1 - ALPHA / 2, freedom) * float(np.sqrt(variance))
    return value - width, value + width


def _fieller(r: float, c: float, var_r: float, var_c: float, width: float) -> tuple[float, float] | None:
    """All ratios q for which c - q r is within width standard errors of 0."""
    a = r * r - width * width * var_r
    if r <= 0 or a <= 0:
        return None
    root = float(np.sqrt(max((c * r) ** 2 - a * (c * c - width * width * var_c), 0.0)))
    return (c * r - root) / a, (c * r + root) / a


def _places(series: Floats) -> Floats:
    """1 for the least, n for the greatest; equal values share the mean of their places."""
    _, which, counts = np.unique(series, return_inverse=True, return_counts=True)
    places: Floats = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return places


def _quantile(probability: float, freedom: float) -> float:
    """Of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _two_sided(t: float, freedom: float) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(t)))
