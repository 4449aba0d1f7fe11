"""Two sides compared step by step, on a log scale: the ratio, its interval, and what that decides.

Step k of one run is taken with step k of the other, so that whatever both do in it (a curriculum, a batch of
long sequences, a checkpoint) cancels. Where both do not do the same, what is known of a step (tokens, a core
that others took) explains a part first. The level is Huber's, which single slow steps do not move far, and
its error is that of aorta.timeline.noise. Several runs of a side are their own measure: the spread of their
levels.
"""

from typing import Literal, NamedTuple

import numpy as np

from aorta.timeline.arrays import Floats
from aorta.timeline.noise import NORMAL, Error, error_of_mean, exact

Decision = Literal["higher", "lower", "same", "cannot tell"]

HUBER = 1.345
"""Deviations from which on a step counts no more; 95 % efficient where noise is normal."""
MAX_ROUNDS = 30
OF_NORMAL = 1.4826
"""Standard deviation of normal noise, over its median deviation."""
RUN_SPREAD = 0.0098
"""Standard deviation between runs of one job, over their level, where nothing tells it. Of single runs that
differ by 1 %, it lets 5 % be called different, and of quiet ones of 100 steps it lets 3 % be found in nine of
ten."""
HOST_SPREAD = 0.04
"""The same of runs on a CPU: single ones of one script on 2 shared cores differed by 3.1 to 6.7 % in five
series, most of which no step of theirs shows."""
OF_STEPS = 1 / 3
"""The same over that of single steps, where these are noisier: a machine that others use."""


POWER = 0.8
"""Share of comparisons in which a difference that matters is found, where it is said how many runs would
do."""
MOST_RUNS = 99
MOST_TAKEN = 0.95


class Spread(NamedTuple):
    """Standard deviation of the logarithm of the level, between runs of one job."""

    value: float
    freedom: float = NORMAL
    origin: str = ""
    """What tells it; '' where it is taken for granted."""


class LogRatio(NamedTuple):
    """Candidate over reference. Leading axes are those of the batch."""

    value: Floats
    """Logarithm."""
    error: Error
    spread: Floats
    """Standard deviation between runs that the error holds."""
    within: Error
    """By the noise of steps alone; of several runs, of one of them."""

    def interval(self, alpha: float) -> tuple[Floats, Floats]:
        """Of the logarithm."""
        half = self.error.width(alpha)
        return self.value - half, self.value + half


def log_ratio(
    reference: Floats,
    candidate: Floats,
    of_reference: Floats | None = None,
    of_candidate: Floats | None = None,
    spread: Spread | None = None,
    least: float = RUN_SPREAD,
) -> LogRatio:
    """Of series [..., run, step] of logarithms, the same steps in all; of_...: what explains a step,
    [..., run, step, covariate].

    spread: between runs, for single ones; without it `least`, or what the noise of steps suggests.
    Series without any noise on both sides are compared exactly.
    """
    num_runs = reference.shape[-2], candidate.shape[-2]
    if num_runs == (1, 1):
        more = None
        if of_reference is not None and of_candidate is not None:
            more = (of_candidate - of_reference)[..., 0, :, :]
        level, influence = robust_level(candidate[..., 0, :] - reference[..., 0, :], more)
        within = error_of_mean(influence)
        between = np.full(level.shape, 0.0 if spread is None else spread.value)
        if spread is None:
            between = np.maximum(least, OF_STEPS * _deviation(influence) / np.sqrt(2))
        is_exact = (np.ptp(reference, axis=-1) + np.ptp(candidate, axis=-1))[..., 0] == 0
        between = np.where(is_exact, 0.0, between)
        freedom = NORMAL if spread is None else spread.freedom
        return LogRatio(level, within.plus(2 * between**2, freedom), between, within)
    profile = (reference.mean(axis=-2, keepdims=True) + candidate.mean(axis=-2, keepdims=True)) / 2
    known: list[Floats | None] = [None, None]
    if of_reference is not None and of_candidate is not None:
        middle = (of_reference.mean(axis=-3, keepdims=True) + of_candidate.mean(axis=-3, keepdims=True)) / 2
        known = [of_reference - middle, of_candidate - middle]
    levels, squares, within_run = [], [], []
    for runs, explained in zip((reference, candidate), known, strict=True):
        level, influence = robust_level(runs - profile, explained)
        levels.append(level.mean(axis=-1))
        squares.append(((level - level.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1))
        # Of white noise: what no spread of runs is below.
        within_run.append(error_of_mean(influence).variances[..., 0].mean(axis=-1))
    freedom = float(sum(num_runs) - 2)
    least = (within_run[0] + within_run[1]) / 2
    variance = np.maximum((squares[0] + squares[1]) / freedom, least)
    scale = 1 / num_runs[0] + 1 / num_runs[1]
    return LogRatio(
        levels[1] - levels[0], exact(variance * scale, freedom), np.sqrt(variance), exact(least, NORMAL)
    )


def decision(ratio: LogRatio, matters: float, alpha: float) -> list[Decision]:
    """Of each pair, flat. matters: the smallest ratio - 1 that matters."""
    return decided(ratio.value, ratio.error.width(alpha), matters)


def decided(value: Floats, half_width: Floats, matters: float) -> list[Decision]:
    """Of logarithms of ratios and the half widths of their intervals."""
    margin = np.log1p(matters)
    low, high = value - half_width, value + half_width
    return [
        "same" if -margin <= a and b <= margin else "higher" if a > 0 else "lower" if b < 0 else "cannot tell"
        for a, b in zip(np.ravel(low).tolist(), np.ravel(high).tolist(), strict=True)
    ]


def robust_level(series: Floats, known: Floats | None = None) -> tuple[Floats, Floats]:
    """Huber's level of series [..., step] where `known` [..., step, covariate] is 0, and its influence
    function: a series whose mean errs as the level does."""
    num = series.shape[-1]
    columns = (
        np.ones((*series.shape, 1))
        if known is None
        else np.concatenate([np.ones((*series.shape, 1)), known], axis=-1)
    )
    if columns.shape[-1] == 1:
        level = np.median(series, axis=-1)[..., None]
    else:
        level = _solve(columns, series, np.ones_like(series))
    for _ in range(MAX_ROUNDS):
        left = series - (columns @ level[..., None])[..., 0]
        limit = HUBER * _deviation(left)[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(np.abs(left) > limit, limit / np.abs(left), 1.0)
        weights = np.where(limit > 0, weights, 1.0)
        previous, level = level, _solve(columns, series, weights)
        if np.allclose(level, previous, rtol=0, atol=1e-9):
            break
    left = series - (columns @ level[..., None])[..., 0]
    limit = HUBER * _deviation(left)[..., None]
    bounded = np.where(limit > 0, np.clip(left, -limit, limit), left)
    within = np.maximum((np.abs(left) <= limit).mean(axis=-1, keepdims=True), 0.1)
    within = np.where(limit > 0, within, 1.0)
    bread = _inverse(columns)[..., 0, :]
    leverage = num * (columns @ bread[..., None])[..., 0]
    return level[..., 0], leverage * bounded / within


def typical(step_ms: Floats) -> Floats:
    """Weights [step] by which steps are of the usual length: Huber's of their logarithms, 1 at most."""
    away = np.log(np.maximum(step_ms, 1e-300))
    away = np.abs(away - np.median(away))
    limit = HUBER * OF_NORMAL * float(np.median(away))
    weights: Floats = np.minimum(1.0, limit / np.maximum(away, limit)) if limit > 0 else (away == 0) * 1.0
    return weights


def _deviation(series: Floats) -> Floats:
    """Standard deviation about the middle, by the median deviation; by the mean one where that is 0."""
    away = np.abs(series - np.median(series, axis=-1, keepdims=True))
    middle = OF_NORMAL * np.median(away, axis=-1)
    return np.where(middle > 0, middle, 1.2533 * away.mean(axis=-1))


def _inverse(columns: Floats, weights: Floats | None = None) -> Floats:
    weighted = columns if weights is None else columns * weights[..., None]
    squares = np.swapaxes(columns, -1, -2) @ weighted
    size = np.trace(squares, axis1=-2, axis2=-1)[..., None, None]
    # A covariate that is the same on both sides explains nothing: its column is 0.
    return np.linalg.inv(squares + 1e-10 * size * np.eye(columns.shape[-1]))


def _solve(columns: Floats, series: Floats, weights: Floats) -> Floats:
    if columns.shape[-1] == 1:
        mean: Floats = ((weights * series).sum(axis=-1) / weights.sum(axis=-1))[..., None]
        return mean
    right = np.swapaxes(columns, -1, -2) @ (weights * series)[..., None]
    return (_inverse(columns, weights) @ right)[..., 0]


def runs_needed(ratio: LogRatio, matters: float, alpha: float) -> int | None:
    """Runs on each side with which a ratio of 1 + matters would be found in POWER of all cases, if they
    differ as these do; None for more than MOST_RUNS. Of a ratio that is no batch."""
    from scipy.special import stdtrit

    margin = float(np.log1p(matters))
    variance = float(np.squeeze(ratio.spread)) ** 2 + float(np.squeeze(ratio.within.variance())) / 2
    for num in range(2, MOST_RUNS + 1):
        freedom = 2 * num - 2
        needed = float(stdtrit(freedom, 1 - alpha / 2) + stdtrit(freedom, POWER))
        if needed**2 * 2 * variance / num <= margin**2:
            return num
    return None


def work_columns(tokens: Floats) -> Floats:
    """Covariates [..., step, 2] of the tokens of each step: a part of the step grows with them."""
    size = np.log(np.maximum(tokens, 1.0))
    return np.stack([size, size**2], axis=-1)


def taken_columns(share: Floats) -> Floats:
    """Covariate [..., step, 1] of the share of each step in which others had the core."""
    return -np.log1p(-np.clip(share, 0.0, MOST_TAKEN))[..., None]
