"""Drifts that two single runs cannot show, and what of their difference these would explain.

The slope of a run is known to its standard error, and half of its range moves the level by 1.7 errors of the
level. So a run that shows no drift may still have one of the size of its own noise, whatever test is used,
and no threshold between drift and none helps. What the steps do tell is how likely each size of a drift is:

1. Before a look at the steps, some drift and none are as likely, and its size over the noise of one step has
   a half Cauchy distribution: about that of a step's noise, up to any size.
2. A drift is a random walk, whose slow cosines have known variances (Karhunen and Loeve). The slowest cosines
   of both runs, over what the memory of the faster ones explains, are the likelihood of each size.
3. The difference is held against a mixture of Student's t, one for each size that is left.

What a run of n steps hides moves its level by a part of a step's noise that falls with sqrt(n), and how much
it counts falls with sqrt(n) once more, as in a Bayes factor of unit information: long runs lose little.
Several runs of a side tell a drift by themselves.

Source: Kass and Wasserman, Journal of the American Statistical Association 90 (1995), for unit information.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aorta.timeline.persistence import Averaging, Floats, normal_scores, slow_curves

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
LEAST_SIZE, GREATEST_SIZE = 0.3, 100.0
"""Of the sizes that are looked at: the least over the square root of the steps, which moves nothing."""
GREATEST_FREEDOM = 1e12
NUM_NARROWINGS, NUM_PLACES = 4, 17
"""Of an interval's end: to a part in 10,000 of it."""
ADVISED = (1.5, 2, 3, 4, 6, 8, 12, 16)
"""Times as many steps that are looked at for how many would tell; more are no advice."""


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
    """Without a drift, what another such comparison may have for its error, in four of five."""

    def p_value(self, difference: float) -> float:
        """How often a difference as large appears between runs that differ by noise and such drifts alone."""
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
    of_mean = noise_variance * (1.0 if statistic == "mean" else 2 / np.pi)
    return SlowPower(tuple(slow.ratios.tolist()), len(series), LEVEL_VARIANCE * of_mean * slow.noise)


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
