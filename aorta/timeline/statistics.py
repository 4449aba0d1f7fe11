"""Numbers of runs with honest intervals (estimate), and whether two runs differ by more than noise
(contrast).

Neighbouring steps resemble each other and the ranks of a step move together, so 50 steps of 8 ranks
are not 400 measurements, nor 50. What is resampled is blocks of whole steps, all ranks with them. On
runs of usual length blocks alone call noise a difference two to five times too often (they cut the
autocorrelation, and its estimate from few steps is too small), hence the corrections, each checked
by benchmarks/comparison.py:

1. The autocorrelation is estimated from ranks of the values (a rare slow step does not hide it),
   corrected for its bias in short series, and moved up by part of a standard error.
2. The standard error of the bootstrap is scaled by what blocks of that length lose of it, because they
   cut the correlation and because they vary about the mean of the very steps they are drawn from.
3. Intervals use Student's t with half the number of effective steps as degrees of freedom.
4. Where the level drifts as long as the run, or jumps between two states, blocks of the run do not tell
   what another run would give (aorta.timeline.noise_memory): the error then allows for the drift, or for
   the distance between the states, and says so.
5. A drift of the size of the noise does not show in a run, and moves its level all the same. Of single runs a
   second p-value and interval therefore hold what such drifts explain (aorta.timeline.noise_memory): what is
   within these alone is not told.
6. Runs of unlike length are also compared over the steps that both have: by how much that changes the
   difference, the error grows.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.noise_memory import (
    DRIFT_FREEDOM,
    SAME,
    Averaging,
    Floats,
    SlowPower,
    TwoStates,
    UnseenDrift,
    block_length,
    movement,
    persistence,
    slow_power,
    steps_that_tell,
    two_states,
    unseen_drift,
    variance_inflation,
)

Counts = NDArray[np.signedinteger[Any]]
ALPHA = 0.05
"""Rate of false alarms; intervals hold the true value in 1 - ALPHA of all cases."""
LEVEL = f"{100 * (1 - ALPHA):g} %"
"""1 - ALPHA as outputs print it beside an interval."""
POWER = 0.8
"""Share of comparisons in which a difference of the detectable size is seen."""
MIN_STEPS = 8
"""Fewer steps say nothing about their own spread."""
NUM_DRAWS = 500
"""Draws of the bootstrap for runs of usual length."""
MAX_RANKS = 64
"""Ranks that are resampled; of more, this many evenly spaced ones. Fewer ranks only widen the interval."""
MAX_WORK = 3e7
"""Rank-steps resampled per metric; longer runs get fewer draws."""
MIN_DRAWS = 100
MAX_KEPT_STEPS = 1000
"""Draws of longer runs are not kept for the next metric: those of this many steps take 1 MB."""
MIN_FREEDOM = 1.5
NEXT_ERROR = 0.7
"""Allowance for the error of the next run, which is itself an estimate: in four of five runs it is below
(1 + NEXT_ERROR / freedom) times this run's."""
NEXT_DRIFT = 1.1
"""The same factor for what drifts explain of the next pair of runs."""
UNLIKE_LENGTHS = 2
"""Ratio of the runs' lengths above which they are also compared over the steps that both have."""
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
    num_steps: int
    effective_steps: float
    """Independent steps that would tell as much."""
    block: int
    """Steps that were resampled together."""
    steady_error: float | None = None
    """Error without the allowance for a drift, which several runs tell by themselves. None: as error."""
    steady_freedom: float | None = None
    """Degrees of freedom of steady_error; None: as freedom."""
    next_error: float | None = None
    """Error that another such run stays below in four of five cases; None: as error."""
    caveat: str = ""
    """Why the error is larger than the noise of single steps explains."""
    slow: SlowPower | None = None
    """Slow cosines, which tell how large a hidden drift may be; None where the error allows for it
    already."""
    series: Floats | None = field(default=None, repr=False, compare=False)
    """The middle of the ranks by position in the run, NaN where a step was not measured or left out."""


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
    next_error: float
    """Error that another such comparison stays below in four of five cases."""
    num_runs: tuple[int, int] = (1, 1)
    caveats: tuple[str, ...] = ()
    """Why the error is larger than the noise of single steps explains."""
    withheld: str = ""
    """Why no claim can be made; '' where one can."""
    drift: UnseenDrift | None = field(default=None, repr=False, compare=False)
    """Differences that drifts which neither run shows would explain; None unless both sides are single
    runs."""
    slow: tuple[SlowPower, ...] = ()
    """Slow cosines of the two runs, where drift is given."""
    variances: tuple[float, float] = (0.0, 0.0)
    """Variances of the two sides."""

    @property
    def p_with_drift(self) -> float:
        """p-value of runs that may also differ by drifts which they do not show; at least p_value."""
        return self.p_value if self.drift is None else max(self.p_value, self.drift.p_value(self.difference))

    @property
    def widening_by_drift(self) -> float:
        """Factor by which intervals are wider that hold such drifts too; 1 where there are none."""
        if self.drift is None or self.error == 0:
            return 1.0
        return max(self.drift.width(ALPHA) / (_quantile(1 - ALPHA / 2, self.freedom) * self.error), 1.0)

    def intervals_with_drift(self) -> tuple[tuple[float, float], tuple[float, float] | None]:
        """difference_interval and ratio_interval, wide enough for such drifts."""
        factor, width = self.widening_by_drift, _quantile(1 - ALPHA / 2, self.freedom)
        half = factor * width * self.error
        ratio = _fieller(self.reference, self.candidate, *self.variances, factor * width)
        return (self.difference - half, self.difference + half), ratio

    def steps_that_tell(self, share: float = 1.0) -> int | None:
        """Steps of the shorter run with which this difference would be more than a drift explains."""
        if self.drift is None:
            return None
        return steps_that_tell(
            self.slow, float(self.drift.variances[0]), self.drift.freedom, self.difference, ALPHA * share
        )

    def detectable(self, share: float = 1.0) -> float:
        """The smallest true difference that is seen in POWER of such comparisons, when this metric has
        that share of the rate of false alarms.

        From the noncentral t distribution; the error at hand is taken for the median of its own.
        """
        called = _quantile(1 - ALPHA * share / 2, self.freedom)
        size = _often_exceeded(called, self.freedom) * self.next_error
        if self.drift is None:
            return size
        drift = self.drift
        called = drift.width(ALPHA * share) / float(np.sqrt(drift.variances[0]))
        return max(size, NEXT_DRIFT * _often_exceeded(called, drift.freedom) * drift.next_error)

    def explaining_spread(self) -> float | None:
        """Spread that explains single runs which are called different: the standard deviation between runs of
        the same thing, over the reference, at which this difference would be chance. None otherwise."""
        if max(self.num_runs) > 1 or self.p_with_drift > ALPHA or self.reference <= 0:
            return None
        missing = (self.difference / _quantile(1 - ALPHA / 2, self.freedom)) ** 2 - self.error**2
        return float(np.sqrt(max(missing, 0.0) / 2)) / self.reference


class _Noise(NamedTuple):
    """Error of a run's number."""

    error: float
    inflation: float
    """Ratio of its variance to that of independent steps."""
    freedom: float


def estimate(
    values: Floats, statistic: Averaging = "median", positions: NDArray[np.int64] | None = None
) -> Estimate | None:
    """Statistic over ranks of each rank's statistic over steps, with its error. values is [rank, step].

    The error is that of steps in which every rank has a value. None where these are fewer than
    MIN_STEPS or fewer than half. positions: of the steps within the run, for runs of unlike length;
    0, 1, 2, ... where left out.
    """
    is_complete = ~np.isnan(values).any(axis=0)
    complete = values[:, is_complete]
    num_steps = complete.shape[1]
    if num_steps < MIN_STEPS or 2 * num_steps < values.shape[1] or len(values) == 0:
        return None
    reduce = np.nanmedian if statistic == "median" else np.nanmean
    value = float(reduce(reduce(values, axis=1)))
    centre = np.median(complete, axis=0) if statistic == "median" else complete.mean(axis=0)
    rho = persistence(centre)
    block = block_length(rho, num_steps)
    inflation = variance_inflation(rho, statistic)
    reproduced = variance_inflation(rho, statistic, block)
    # Blocks vary about the mean of these steps, not about the true one: a share block / num_steps less.
    reproduced = max(reproduced - inflation * block / num_steps, reproduced / 2)
    error = _bootstrap_error(complete, block, statistic) * float(np.sqrt(inflation / reproduced))
    alone = _Noise(error, inflation, max(num_steps / inflation / 2, MIN_FREEDOM))
    places = np.flatnonzero(is_complete) if positions is None else positions[is_complete]
    series = np.full(int(places[-1]) + 1, np.nan)
    series[places] = centre
    states = two_states(centre) if statistic == "median" else None
    noise, steady, following, caveat = _allowed_for(alone, centre, rho, statistic, states)
    return Estimate(
        value=value,
        error=noise.error,
        freedom=noise.freedom,
        num_steps=num_steps,
        effective_steps=num_steps / noise.inflation,
        block=block,
        steady_error=steady.error,
        steady_freedom=steady.freedom,
        next_error=following * (1 + NEXT_ERROR / noise.freedom),
        caveat=caveat,
        slow=slow_power(centre, alone.error**2 / alone.inflation, statistic) if states is None else None,
        series=series,
    )


def _allowed_for(
    noise: _Noise, centre: Floats, rho: float, statistic: Averaging, states: TwoStates | None
) -> tuple[_Noise, _Noise, float, str]:
    """Noise with drift and two states; noise without the drift; error of another such run; the caveat."""
    num_steps = len(centre)
    if states is not None:
        # As many independent steps as there are stretches in one state.
        freedom = min(noise.freedom, max(states.num_visits / 2, 1.0))
        noise = _Noise(noise.error, max(noise.inflation, num_steps / states.num_visits), freedom)
    drift = movement(centre, rho, statistic)
    total = noise.inflation + drift.inflation
    freedom = total**2 / (noise.inflation**2 / noise.freedom + drift.inflation**2 / DRIFT_FREEDOM)
    if states is not None:
        errors = [
            _error_between_states(centre, inflation, df)
            for inflation, df in (
                (total, freedom),
                (noise.inflation, noise.freedom),
                (noise.inflation + drift.expected, freedom),
            )
        ]
    else:
        scale = noise.error / np.sqrt(noise.inflation)
        errors = [
            float(scale * np.sqrt(i)) for i in (total, noise.inflation, noise.inflation + drift.expected)
        ]
    caveat = ""
    if states is not None:
        caveat = (
            f"its steps are in two states, {states.low:.4g} and {states.high:.4g}, and changed"
            f" {states.num_visits - 1} times: the interval allows for another share of them"
        )
    elif drift.inflation > 3 * noise.inflation:
        caveat = "its level drifts as long as the run lasts: the interval allows for that"
    steady = noise._replace(error=errors[1])
    return _Noise(errors[0], total, freedom), steady, errors[2], caveat


def _error_between_states(centre: Floats, inflation: float, freedom: float) -> float:
    """Error of a median that may fall into either of two states.

    From the steps that bound it, given that the share of steps below it is uncertain.

    Source: Woodruff, Journal of the American Statistical Association 47 (1952).
    """
    width = _quantile(1 - ALPHA / 2, freedom)
    share = 0.5 * float(np.sqrt(inflation / len(centre))) * width
    low, middle, high = np.quantile(centre, [max(0.5 - share, 0.0), 0.5, min(0.5 + share, 1.0)])
    return float(max(middle - low, high - middle)) / width


def _bootstrap_error(values: Floats, block: int, statistic: Averaging) -> float:
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


def _draw_counts(num_steps: int, block: int, num_draws: int) -> Counts:
    """Counts [draw, step] of each step in each draw."""
    make = _kept_draw_counts if num_steps <= MAX_KEPT_STEPS else _made_draw_counts
    return make(num_steps, block, num_draws)


def _made_draw_counts(num_steps: int, block: int, num_draws: int) -> Counts:
    rng = np.random.default_rng(0)
    num_blocks = -(-num_steps // block)
    starts = rng.integers(0, num_steps, (num_draws, num_blocks))
    counts: Counts = np.zeros((num_draws, num_steps), dtype=np.int16 if num_steps < 2**15 else np.int32)
    rows = np.arange(num_draws)
    for i in range(num_blocks):
        for offset in range(min(block, num_steps - i * block)):
            counts[rows, (starts[:, i] + offset) % num_steps] += 1
    counts.flags.writeable = False
    return counts


# Metrics of a run have one number of steps and few lengths of blocks; drawing is a fifth of an estimate.
_kept_draw_counts = functools.lru_cache(maxsize=16)(_made_draw_counts)


def _drawn_medians(row: Floats, drawn: Counts) -> Floats:
    """Median of every draw of one rank's steps."""
    order = np.argsort(row, kind="stable")
    reached = np.cumsum(drawn[:, order], axis=1, dtype=drawn.dtype)
    half = len(row) / 2
    low, high = (reached < half).sum(axis=1), (reached <= half).sum(axis=1)
    ordered = row[order]
    result: Floats = (ordered[low] + ordered[high]) / 2
    return result


class _Unlike(NamedTuple):
    """Allowance for runs of unlike length; the default: none."""

    shift: float = 0.0
    """Change of the difference if it is taken over the steps that all runs have."""
    shorter: int = 0
    withheld: str = ""


def contrast(reference: Sequence[Estimate], candidate: Sequence[Estimate]) -> Contrast:
    """Comparison of two sides of one or more runs each.

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
    if freedom is None:
        freedom = _welch(variances, (reference[0].freedom, candidate[0].freedom))
    unlike = _unlike_length(reference, candidate)
    if unlike.shift:
        variances[unlike.shorter] += unlike.shift**2
    variance = sum(variances)
    drift, slow = _unseen_drift(reference, candidate, unlike, tiny)
    difference = c - r
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
        next_error=_next_error(reference, candidate, error),
        num_runs=(len(reference), len(candidate)),
        caveats=tuple(dict.fromkeys(_caveats(reference, candidate, unlike, error))),
        withheld=unlike.withheld,
        drift=drift,
        slow=slow,
        variances=(variances[0], variances[1]),
    )


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
    errors = [run.error if spread is None or run.steady_error is None else run.steady_error for run in runs]
    within_run = float(np.mean([error**2 for error in errors]))
    return max(within_run, spread or 0.0) / len(runs)


def _next_error(reference: Sequence[Estimate], candidate: Sequence[Estimate], error: float) -> float:
    """Error of the next run: of single runs from their own steps, of several from their number."""
    if len(reference) + len(candidate) > 2:
        return error
    errors = [run.error if run.next_error is None else run.next_error for run in (*reference, *candidate)]
    return max(error, float(np.hypot(errors[0], errors[1])))


def _unlike_length(reference: Sequence[Estimate], candidate: Sequence[Estimate]) -> _Unlike:
    """Allowance for unlike lengths.

    Whatever settles slowly weighs more on a short run than on a long one; over the same positions it weighs
    alike on both.
    """
    sides = (reference, candidate)
    series = [[run.series for run in runs if run.series is not None] for runs in sides]
    if any(len(run_series) < len(runs) for run_series, runs in zip(series, sides, strict=True)):
        return _Unlike()
    ends = [min(len(series_of_run) for series_of_run in run_series) for run_series in series]
    if max(ends) <= UNLIKE_LENGTHS * min(ends):
        return _Unlike()
    start = max(
        int(np.argmax(~np.isnan(series_of_run))) for run_series in series for series_of_run in run_series
    )
    window = slice(start, min(ends))
    shifts = []
    for run_series in series:
        run_shifts = []
        for series_of_run in run_series:
            common = series_of_run[window][~np.isnan(series_of_run[window])]
            if len(common) < MIN_STEPS:
                return _Unlike(
                    withheld="of unlike length: the shorter run ends before the longer one has settled"
                )
            run_shifts.append(float(np.median(common)) - float(np.nanmedian(series_of_run)))
        shifts.append(float(np.mean(run_shifts)))
    return _Unlike(shifts[1] - shifts[0], int(np.argmin(ends)))


def _unseen_drift(
    reference: Sequence[Estimate], candidate: Sequence[Estimate], unlike: _Unlike, tiny: float
) -> tuple[UnseenDrift | None, tuple[SlowPower, ...]]:
    """Differences that drifts which neither run shows would explain, and the slow cosines that tell it.

    None unless both sides are single runs.
    """
    runs = (*reference, *candidate)
    slow = tuple(run.slow for run in runs if run.slow is not None)
    if len(runs) > 2 or not slow:
        return None, ()
    errors = [run.error if run.steady_error is None else run.steady_error for run in runs]
    freedoms = [run.freedom if run.steady_freedom is None else run.steady_freedom for run in runs]
    variance = sum(error**2 for error in errors) + unlike.shift**2
    if variance <= tiny:
        return None, ()
    following = [error * (1 + NEXT_ERROR / freedom) for error, freedom in zip(errors, freedoms, strict=True)]
    freedom = _welch([error**2 for error in errors], freedoms)
    next_error = float(np.sqrt(max(sum(error**2 for error in following), variance)))
    return unseen_drift(slow, variance, freedom, next_error), slow


def _caveats(
    reference: Sequence[Estimate], candidate: Sequence[Estimate], unlike: _Unlike, error: float
) -> Iterator[str]:
    for name, runs in (("reference", reference), ("candidate", candidate)):
        for run in runs:
            if run.caveat and (len(reference) + len(candidate) == 2 or "states" in run.caveat):
                yield f"{name}: {run.caveat}"
    if abs(unlike.shift) > error / 2:
        yield (
            "the runs are of unlike length, and over the steps that both have the difference is another by"
            f" {unlike.shift:+.4g}: the interval allows for that"
        )


def side(runs: Sequence[Estimate]) -> tuple[float, tuple[float, float]]:
    """The number of one side alone, and its interval."""
    value = float(np.mean([run.value for run in runs]))
    spread = float(np.var([run.value for run in runs], ddof=1)) if len(runs) > 1 else None
    return value, _around(value, _variance(runs, spread), _freedom(runs))


def _freedom(runs: Sequence[Estimate]) -> float:
    return runs[0].freedom if len(runs) == 1 else float(len(runs) - 1)


def _around(value: float, variance: float, freedom: float) -> tuple[float, float]:
    width = _quantile(1 - ALPHA / 2, freedom) * float(np.sqrt(variance))
    return value - width, value + width


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


def median_interval(values: Floats) -> tuple[float, float, float]:
    """Median, and low and high of its 95 % bootstrap interval, of values that do not depend on each other.

    For ratios of neighbouring blocks, free of drift and persistence. For steps of a run see estimate().
    """
    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def _welch(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    parts = sum(v * v / f for v, f in zip(variances, freedoms, strict=True))
    return sum(variances) ** 2 / parts if parts > 0 else min(freedoms)


def _fieller(r: float, c: float, var_r: float, var_c: float, width: float) -> tuple[float, float] | None:
    """All ratios q for which c - q r is within width standard errors of 0."""
    a = r * r - width * width * var_r
    if r <= 0 or a <= 0:
        return None
    root = float(np.sqrt(max((c * r) ** 2 - a * (c * c - width * width * var_c), 0.0)))
    return (c * r - root) / a, (c * r + root) / a


def _quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _often_exceeded(called: float, freedom: float) -> float:
    """True difference, in errors, that is seen as more than `called` errors in POWER of all cases."""
    from scipy.special import gammaincinv, nctdtrinc

    away = float(nctdtrinc(freedom, 1 - POWER, called))
    return away / float(np.sqrt(2 * gammaincinv(freedom / 2, 0.5) / freedom))


def _two_sided(t: float, freedom: float) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(t)))
