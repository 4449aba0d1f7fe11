"""How far the level of a series may be from the true one: noise with a memory, read from its slow part.

The mean of n steps errs by noise slower than the run, and a run shows only noise that is faster: what
lies below its slowest cosine has to be taken from a model. The model: white noise, and on top of it a slow
part of any share of the variance and of any memory up to the length of the run. Each combination says how
much power each cosine of the series has and how far its mean errs. The data weigh the combinations by their
likelihood, and the error of the mean is the mixture: a run whose slow cosines stand out gets a wide interval,
one that is flat gets little more than that of independent steps. All is closed form: no resampling, and no
tests before the test.

benchmarks/comparison.py has the rates of false alarms.

Source: Mueller and Watson, "Testing models of low-frequency variability", Econometrica 76 (2008), for the
cosines of a series as its low-frequency data; the prior over memories is this file's.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from aorta.timeline.arrays import Floats

MOST_POINTS = 256
"""A longer series is taken as means of neighbouring steps: only its slow part is looked at."""
COSINES = 3
"""Steps per cosine that is looked at."""
FEWEST_COSINES, MOST_COSINES = 6, 40
NUM_SHARES = 8
"""Shares of the variance that a slow part may have, from 2 / n to 1."""
WHITE = 0.4
"""Probability of no slow part, before a look at the steps."""
MEMORIES = (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.5)
"""Memories of the slow part, over the length of the run. A slow part of the longest moves the mean as a
random walk does that had begun before the run."""
LEAST_MEMORY = 0.4
"""In steps; a shorter one is white noise."""
NUM_HALVINGS = 24
NORMAL_95 = 1.959964
NORMAL = 1e6
"""Degrees of freedom that stand for a normal distribution."""


class Models(NamedTuple):
    """Kinds of noise, by the power that each gives to the cosines of a series with unit variance."""

    log_prior: Floats
    power: Floats
    """[model, cosine]"""
    of_mean: Floats
    """[model]: variance of the mean, times the number of points."""


@lru_cache(maxsize=64)
def models(num: int) -> Models:
    """For series of so many points."""
    num_cosines = int(np.clip(num // COSINES, min(FEWEST_COSINES, num - 1), MOST_COSINES))
    angle = np.pi * np.arange(1, num_cosines + 1) / num
    prior, power, of_mean = [WHITE], [np.ones(num_cosines)], [1.0]
    memories = [part * num for part in MEMORIES if part * num >= LEAST_MEMORY]
    shares = np.geomspace(2 / num, 1, NUM_SHARES)
    for memory in memories:
        rho = np.exp(-1 / memory)
        slow = (1 - rho**2) / (1 - 2 * rho * np.cos(angle) + rho**2)
        mean = (1 + rho) / (1 - rho) - 2 * rho * (1 - rho**num) / (num * (1 - rho) ** 2)
        for share in shares:
            prior.append((1 - WHITE) / (len(memories) * NUM_SHARES))
            power.append(1 - share + share * slow)
            of_mean.append(1 - share + share * mean)
    return Models(np.log(prior), np.array(power), np.array(of_mean))


class Error(NamedTuple):
    """Distribution of an error about 0: a mixture of Student's t. Leading axes are those of the series."""

    weights: Floats
    """[..., model]; they add up to 1."""
    variances: Floats
    """[..., model]: squared scales."""
    freedoms: Floats
    """[..., model]"""

    def p_value(self, difference: Floats) -> Floats:
        """Probability of an error of that size or more, either way; 0 or 1 where there is no error at all."""
        from scipy.special import stdtr

        size = np.abs(np.asarray(difference, dtype=float))[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(self.variances > 0, size / np.sqrt(self.variances), np.where(size > 0, np.inf, 0.0))
        result: Floats = 2 * (self.weights * stdtr(self.freedoms, -t)).sum(axis=-1)
        return result

    def width(self, alpha: float) -> Floats:
        """The size that an error exceeds, either way, with probability alpha."""
        largest = np.sqrt(self.variances.max(axis=-1))
        high = largest * 4
        for _ in range(60):
            beyond = self.p_value(high) > alpha
            if not beyond.any():
                break
            high = np.where(beyond, 4 * high, high)
        low = np.zeros_like(high)
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            is_low = self.p_value(middle) > alpha
            low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
        result: Floats = (low + high) / 2
        return result

    def plus(self, variance: Floats | float, freedom: Floats | float = NORMAL) -> "Error":
        """With a further error that is independent of it, its degrees of freedom by Welch and
        Satterthwaite."""
        more = np.asarray(variance, dtype=float)[..., None]
        total = self.variances + more
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = self.variances**2 / self.freedoms + more**2 / np.asarray(freedom, dtype=float)[..., None]
            freedoms = np.where(parts > 0, total**2 / parts, self.freedoms)
        return Error(self.weights, total, np.minimum(freedoms, NORMAL))

    def variance(self) -> Floats:
        """Of the normal distribution whose 95 % interval is as wide."""
        return (self.width(0.05) / NORMAL_95) ** 2


def exact(variance: Floats | float, freedom: Floats | float) -> Error:
    """An error whose squared scale is known so well."""
    scale = np.asarray(variance, dtype=float)[..., None]
    return Error(
        np.ones_like(scale), scale, np.broadcast_to(np.asarray(freedom, float)[..., None], scale.shape)
    )


def error_of_mean(series: Floats) -> Error:
    """Of the means of series [..., step], of at least 4 steps; what a mean is of does not matter to it."""
    points = _blocks(series)
    num = points.shape[-1]
    known = models(num)
    weights, power = _weighed(points, known)
    variances = known.of_mean * power / known.power.shape[1] / num
    return Error(weights, variances, np.full(variances.shape, float(known.power.shape[1])))


def inflation(series: Floats) -> Floats:
    """Variance of the mean over that of as many independent steps, at least 1; of series [..., step]."""
    variance = series.var(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = error_of_mean(series).variance() * series.shape[-1] / variance
    return np.where(variance > 0, np.maximum(ratio, 1.0), 1.0)


def _weighed(points: Floats, known: Models) -> tuple[Floats, Floats]:
    """Probability of each model given the series, and the series' power by it, both [..., model]."""
    from scipy.fft import dct

    num_cosines = known.power.shape[1]
    waves = dct(points, norm="ortho", axis=-1)[..., 1 : num_cosines + 1]
    power = waves**2 @ (1 / known.power).T
    with np.errstate(divide="ignore"):
        log_likelihood = (
            known.log_prior - 0.5 * np.log(known.power).sum(axis=1) - num_cosines / 2 * np.log(power)
        )
    # A series that stands still tells nothing of its noise.
    is_still = np.asarray(~(power > 0).any(axis=-1))
    log_likelihood = np.where(is_still[..., None], known.log_prior, log_likelihood)
    weights = np.exp(log_likelihood - log_likelihood.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True), power


def _blocks(series: Floats) -> Floats:
    """Means of neighbouring steps, MOST_POINTS at most; what is left over at the end is left out."""
    length = -(-series.shape[-1] // MOST_POINTS)
    if length == 1:
        return series
    num = series.shape[-1] // length
    cut = series[..., : num * length]
    result: Floats = cut.reshape(*series.shape[:-1], num, length).mean(axis=-1)
    return result
