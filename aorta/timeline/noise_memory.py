"""Dependence of a run's steps on each other: their memory, drifts and states that show, and drifts that do
not.

statistics.py widens its errors by all of these.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Averaging = Literal["median", "mean"]
"""Statistics over steps."""
# Memory of steps
MAX_PERSISTENCE = 0.97
"""Largest persistence in runs of fewer than 2 / (1 - MAX_PERSISTENCE) steps; in longer ones 1 - 2 / n."""
CAUTION = 0.3
"""Standard errors by which the estimated persistence is moved up."""
LAGS = (1, 2, 3, 5, 8, 13, 21)
FIRST_LAGS, LAG_LENGTH = 3, 8
"""Lags that are looked at in every run; a later one where the run has LAG_LENGTH times as many steps."""
LAG_SURE = 2.25
"""Standard errors of chance above which a later lag counts; for the first lags 2."""
SAME = 1e-9
"""Relative difference below which two numbers are one."""
# Drifts and states that a run shows
SLOW_CURVES = 2
"""Cosines, of half a period and of a whole one, that a drift moves."""
RARE = 0.03
"""Share of runs without drift that move as far, for each of the two tests of it."""
DRIFT_CAUTION = 1.0
"""Standard errors by which the memory of the rest of the run is moved up before a drift is seen in it."""
DRIFT_VARIANCE = 10.0
"""Variance of the level of another such run, over that of the slow curves. A random walk from a common
start has pi^2 / 3; one whose beginning was left out as warm-up, or a ramp, up to three times as much."""
NEXT_UNIT, NEAR_UNIT, AT_UNIT = 12.0, 8.0, 2.0
"""Runs of fewer than NEAR_UNIT times 1 / (1 - persistence) steps may be drifting without standing out
against that memory; of fewer than AT_UNIT times, they are taken to. Of fewer than NEXT_UNIT times,
another run like them may."""
UNIT_VARIANCE = 30.0
"""DRIFT_VARIANCE of those runs."""
DRIFT_FREEDOM = 3.0
"""Degrees of freedom of an error that a drift makes."""
BIMODAL = 0.85
"""Share of the variance between two groups of steps above which they are two states. Of a normal
distribution the best split has 0.64, of a uniform one 0.75."""
LEAST_SHARE = 0.1
"""Smallest share of steps that is a state."""
# Drifts that a run does not show
NUM_CURVES = 3
"""Slow cosines that are looked at: a random walk has nine tenths of its power in these."""
NO_DRIFT = 0.5
"""Probability that there is none, before a look at the steps."""
USUAL_SIZE = 1.5
"""Scale of the half Cauchy distribution of sizes: where a random walk ends, over the noise of one step."""
LEVEL_VARIANCE = 5.0
"""Variance of the level of a run that drifts, over that of its slowest cosine. A random walk from a common
start has pi^2 / 3; one that had begun a fifth of the run earlier, in steps left out as warm-up, has 5."""
NUM_SIZES = 24
"""Sizes of a drift that are looked at."""
LEAST_SIZE, GREATEST_SIZE = 0.3, 100.0
"""Range of sizes that are looked at; the least is divided by the square root of the steps and moves
nothing."""
GREATEST_FREEDOM = 1e12
"""Degrees of freedom that stand for a normal distribution."""
NUM_NARROWINGS, NUM_PLACES = 4, 17
"""Search for an interval's end: narrowed this often, with so many places each time, to a part in 10,000."""
ADVISED = (1.5, 2, 3, 4, 6, 8, 12, 16)
"""Times as many steps that are looked at for how many would tell; more are no advice."""


class Movement(NamedTuple):
    """A drift of the level, in variances of the statistic of as many independent steps."""

    inflation: float
    """Amount to add to variance_inflation; 0 where no drift is seen."""
    expected: float
    """Amount for another run like it, which may stand out as a drift though this one did not."""


class SlowCurves(NamedTuple):
    """The slowest cosines of a run's scores."""

    ratios: Floats
    """Their power over what the memory of the faster ones explains; about 1 without a drift."""
    powers: Floats
    """Their power over that of independent steps with as much spread."""
    noise: float
    """Power of the first that the memory explains, over the same."""


class TwoStates(NamedTuple):
    """Two groups that the steps of a run fall into."""

    low: float
    high: float
    """Medians of the two groups."""
    num_visits: int
    """Stretches of steps in one of them; at least 2."""


class SlowPower(NamedTuple):
    """Slow cosines of one run."""

    ratios: tuple[float, ...]
    """Their power over what the memory of the faster ones explains; about 1 without a drift."""
    num_steps: int
    variance: float
    """Variance of the level by a drift whose slowest cosine has as much power as the noise has there."""


class UnseenDrift(NamedTuple):
    """Sizes of a drift that two runs leave possible."""

    weights: Floats
    """Probability of each size; the first is none."""
    variances: Floats
    """Variance of the difference with each."""
    freedom: float
    next_error: float
    """Error without a drift that another such comparison stays below in four of five cases."""

    def p_value(self, difference: float) -> float:
        """Share of pairs of runs with noise and such drifts alone that differ by as much."""
        return float(self._p_values(np.array([abs(difference)]))[0])

    def _p_values(self, differences: Floats) -> Floats:
        from scipy.special import stdtr

        # A size that is given has no degrees of freedom to lose.
        freedoms = np.minimum(self.freedom * (self.variances / self.variances[0]) ** 2, GREATEST_FREEDOM)
        tails: Floats = stdtr(freedoms, -differences[:, None] / np.sqrt(self.variances))
        result: Floats = 2 * (tails @ self.weights)
        return result

    def width(self, alpha: float) -> float:
        """The difference that is exceeded in alpha of all cases."""
        low, high = 0.0, float(np.sqrt(self.variances[0]))
        while self.p_value(high) > alpha:
            low, high = high, 4 * high
        for _ in range(NUM_NARROWINGS):
            places = np.linspace(low, high, NUM_PLACES)
            first = max(int(np.argmax(self._p_values(places) <= alpha)), 1)
            low, high = float(places[first - 1]), float(places[first])
        return high


# ---- memory of steps ---------------------------------------------------------------------------


def persistence(series: Floats) -> float:
    """Lag-one correlation of the steps, on the side of caution; 0 for a series without spread.

    Of normal scores of ranks. Independent noise on top of a slow change lowers the correlation of
    neighbours but not its decay: the roots of later correlations count where those are above chance. The
    bias is Kendall's, -(1 + 3 rho) / n.
    """
    scores = normal_scores(series)
    return 0.0 if scores is None else _persistence(scores, LAGS, CAUTION)


def normal_scores(series: Floats) -> Floats | None:
    """Normal scores of the values' ranks, about 0; None for a series without spread."""
    if np.ptp(series) <= SAME * float(np.abs(series).max()):
        return None
    from scipy.special import ndtri

    scores: Floats = ndtri((_places(series) - 0.5) / len(series))
    scores -= scores.mean()
    return scores if float(scores @ scores) > 0 else None


def _places(series: Floats) -> Floats:
    """1 for the least, n for the greatest; equal values share the mean of their places."""
    _, inverse, counts = np.unique(series, return_inverse=True, return_counts=True)
    places: Floats = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return places


def _persistence(scores: Floats, lags: tuple[int, ...], caution: float) -> float:
    """persistence() of scores, from these lags, moved up by caution standard errors."""
    num = len(scores)
    power = float(scores @ scores)
    if power == 0:
        return 0.0
    first = float(scores[:-1] @ scores[1:]) / power
    rho = first + (1 + 3 * first) / num
    for lag in lags[1:]:
        is_early = lag <= FIRST_LAGS
        if first <= 0 or not (is_early or LAG_LENGTH * lag <= num):
            continue  # alternating steps are no slow change
        later = float(scores[:-lag] @ scores[lag:]) / power
        if later > (2.0 if is_early else LAG_SURE) / np.sqrt(num):
            rho = max(rho, (later + lag / num) ** (1 / lag))
    limit = max(MAX_PERSISTENCE, 1 - 2 / num)
    rho = min(max(rho, 0.0), limit)
    return min(rho + caution * float(np.sqrt((1 - rho * rho) / num)), limit)


def block_length(rho: float, num_steps: int) -> int:
    """Steps that are resampled together: Politis and White's for a series with this persistence.

    l = (3 n / 2 (2 rho / (1 - rho^2))^2)^(1/3) for circular blocks; at most a quarter of the steps.

    Source: Politis and White, Econometric Reviews 23 (2004), with the correction of Patton, Politis
    and White (2009).
    """
    best = (1.5 * num_steps * (2 * rho / (1 - rho * rho)) ** 2) ** (1 / 3)
    return int(min(max(round(best), 1), max(num_steps // 4, 1)))


def variance_inflation(rho: float, statistic: Averaging, block: int | None = None) -> float:
    """Variance of a statistic of correlated steps over that of independent ones; at least 1.

    With a block length: the part that blocks of that length reproduce. A median depends on which
    steps lie above it; of a normal series with correlation r these signs correlate by 2/pi asin(r).
    """
    lags = np.arange(1, max(1000, int(7 / (1 - rho))))
    correlation = rho**lags
    if statistic == "median":
        correlation = 2 / np.pi * np.arcsin(correlation)
    if block is not None:
        correlation = correlation * np.clip(1 - lags / block, 0, None)
    return float(1 + 2 * correlation.sum())


# ---- drifts and states that a run shows ---------------------------------------------------------


def movement(series: Floats, rho: float, statistic: Averaging) -> Movement:
    """Variance that a drift adds of the series' level, where one is seen. rho: persistence(series).

    The cosines are the principal parts of a random walk (Karhunen and Loeve).
    """
    scores = normal_scores(series)
    num = len(series)
    if scores is None or num <= 2 * SLOW_CURVES + 1:
        return Movement(0.0, 0.0)
    from scipy.special import chdtri

    slow = slow_curves(scores, SLOW_CURVES, DRIFT_CAUTION)
    if slow is None:
        return Movement(0.0, 0.0)
    beyond = max(slow.ratios.sum() / chdtri(SLOW_CURVES, RARE), slow.ratios[0] / chdtri(1, RARE))
    drift_seen = DRIFT_VARIANCE * float(np.clip(beyond - 1, 0, 1))
    near = (rho - (1 - NEAR_UNIT / num)) * num / (NEAR_UNIT - AT_UNIT)
    near_next = (rho - (1 - NEXT_UNIT / num)) * num / (NEXT_UNIT - NEAR_UNIT)
    moved = float(slow.powers.sum()) * (1.0 if statistic == "mean" else 2 / np.pi)
    variance = max(drift_seen, UNIT_VARIANCE * float(np.clip(near, 0, 1)))
    expected = max(variance, DRIFT_VARIANCE * float(np.clip(near_next, 0, 1)))
    return Movement(variance * moved, expected * moved)


def slow_curves(scores: Floats, num_curves: int, caution: float = 0.0) -> SlowCurves | None:
    """The slowest cosines of scores about 0; None where the others are nothing.

    Their power is held against that of the others, by the spectrum of an autoregressive process whose memory
    is estimated without the first SLOW_CURVES (so that a drift does not explain itself) and moved up by
    caution standard errors.
    """
    from scipy.fft import dct, idct

    num = len(scores)
    waves: Floats = dct(scores, norm="ortho")
    power = waves[1:] ** 2
    faster = waves.copy()
    faster[: SLOW_CURVES + 1] = 0.0
    fast_part: Floats = idct(faster, norm="ortho")
    memory = _persistence(fast_part, LAGS[:FIRST_LAGS], caution)
    memory = min(memory + (SLOW_CURVES + 1) * (1 + memory) / num, MAX_PERSISTENCE)
    spectrum = (1 - memory**2) / (1 - 2 * memory * np.cos(np.pi * np.arange(1, num) / num) + memory**2)
    scale = float((power[SLOW_CURVES:] / spectrum[SLOW_CURVES:]).mean())
    if scale == 0.0:
        return None
    usual = float(power.sum() / (num - 1))
    return SlowCurves(
        ratios=power[:num_curves] / spectrum[:num_curves] / scale,
        powers=power[:num_curves] / usual,
        noise=scale * float(spectrum[0]) / usual,
    )


def two_states(series: Floats) -> TwoStates | None:
    """The two groups that the steps fall into, None where they do not."""
    num = len(series)
    ordered = np.sort(series)
    deviations = ordered - ordered.mean()
    total = float(deviations @ deviations)
    sizes = np.arange(1, num)
    inside = (sizes >= LEAST_SHARE * num) & (sizes <= (1 - LEAST_SHARE) * num)
    if total <= (SAME * float(np.abs(series).max())) ** 2 * num or not inside.any():
        return None
    between = np.where(inside, np.cumsum(deviations)[:-1] ** 2 * num / (sizes * (num - sizes)), 0.0)
    cut = int(np.argmax(between))
    if between[cut] <= BIMODAL * total:
        return None
    is_high = series > (ordered[cut] + ordered[cut + 1]) / 2
    changes = int(np.count_nonzero(is_high[1:] != is_high[:-1]))
    return TwoStates(float(np.median(ordered[: cut + 1])), float(np.median(ordered[cut + 1 :])), changes + 1)


# ---- drifts that a run does not show ------------------------------------------------------------


def slow_power(series: Floats, noise_variance: float, statistic: Averaging) -> SlowPower | None:
    """Slow cosines of a run's steps; None for steps without spread, or too few. noise_variance: of the
    statistic, if the steps did not depend on each other."""
    scores = normal_scores(series)
    if scores is None or len(series) <= 2 * NUM_CURVES + 1:
        return None
    slow = slow_curves(scores, NUM_CURVES)
    if slow is None:
        return None
    # The statistic moves with the level; a mean of independent steps varies by 2 / pi of their median.
    mean_variance = noise_variance * (1.0 if statistic == "mean" else 2 / np.pi)
    return SlowPower(tuple(slow.ratios.tolist()), len(series), LEVEL_VARIANCE * mean_variance * slow.noise)


def unseen_drift(
    runs: Sequence[SlowPower], variance: float, freedom: float, next_error: float
) -> UnseenDrift:
    """Drifts of one size in the runs, whose difference has this variance and freedom without any."""
    sizes = np.geomspace(LEAST_SIZE / np.sqrt(max(run.num_steps for run in runs)), GREATEST_SIZE, NUM_SIZES)
    density = sizes / (1 + (sizes / USUAL_SIZE) ** 2)  # of the logarithm of the size
    prior = np.concatenate([[NO_DRIFT], (1 - NO_DRIFT) * density / density.sum()])
    powers = np.concatenate([[0.0], (sizes / np.pi) ** 2])
    likelihood = np.log(prior)
    variances = np.full(len(prior), variance)
    order = np.arange(1, NUM_CURVES + 1)
    for run in runs:
        power = run.num_steps * powers
        spread = 1 + power[:, None] / order**2
        likelihood -= 0.5 * (np.log(spread) + np.array(run.ratios) / spread).sum(axis=1)
        variances += run.variance * power
    weights = np.exp(likelihood - likelihood.max())
    return UnseenDrift(weights / weights.sum(), variances, freedom, next_error)


def steps_that_tell(
    runs: Sequence[SlowPower], variance: float, freedom: float, difference: float, alpha: float
) -> int | None:
    """Steps of the shorter run with which such a difference would be more than a drift explains, if the runs
    then show none; None where that takes too many."""
    for factor in ADVISED:
        longer = [
            SlowPower((1.0,) * NUM_CURVES, round(factor * run.num_steps), run.variance / factor)
            for run in runs
        ]
        drift = unseen_drift(longer, variance / factor, factor * freedom, 0.0)
        if drift.p_value(difference) <= alpha:
            return 10 * round(factor * min(run.num_steps for run in runs) / 10 + 0.5)
    return None
