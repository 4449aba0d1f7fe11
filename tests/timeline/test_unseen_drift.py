"""Drifts that two single runs cannot show: how likely each size is, and what it explains."""

import math

import numpy as np
import pytest
from scipy import stats

from aorta.timeline.noise_memory import (
    GREATEST_SIZE,
    LEAST_SIZE,
    NO_DRIFT,
    NUM_SIZES,
    USUAL_SIZE,
    SlowPower,
    slow_power,
    steps_that_tell,
    unseen_drift,
)
from aorta.timeline.statistics import ALPHA, contrast, estimate


def flat(num_steps: int, variance: float = 3.2) -> SlowPower:
    """A run of independent steps whose slow curves are as usual."""
    return SlowPower((1.0, 1.0, 1.0), num_steps, variance / num_steps)


def steps(seed: int, num_steps: int = 50, slowdown: float = 0.0, ramp: float = 0.0):
    noise = np.random.default_rng(seed).normal(0, 1, (2, num_steps))
    return estimate(40 * (1 + slowdown) + noise + ramp * np.linspace(0, 1, num_steps))


def test_weights_and_p_value_are_those_of_a_plain_calculation():
    runs = [SlowPower((4.0, 0.5, 1.5), 40, 0.3), SlowPower((1.0, 2.0, 0.2), 90, 0.1)]
    found = unseen_drift(runs, variance=2.0, freedom=11.0, next_error=0.0)
    sizes = np.geomspace(LEAST_SIZE / math.sqrt(90), GREATEST_SIZE, NUM_SIZES)
    prior = [size * stats.halfcauchy.pdf(size, scale=USUAL_SIZE) for size in sizes]
    terms = [(NO_DRIFT, 2.0)]
    terms += [((1 - NO_DRIFT) * one / sum(prior), None) for one in prior]
    weights, tails = [], []
    for size, (weight, _) in zip([0.0, *sizes], terms, strict=True):
        variance = 2.0
        for run in runs:
            power = run.num_steps * size**2 / math.pi**2
            variance += run.variance * power
            for k, ratio in enumerate(run.ratios, 1):
                scale = 1 + power / k**2
                weight *= stats.chi2.pdf(ratio / scale, 1) / scale
        weights.append(weight)
        tails.append(2 * stats.t.sf(3.0 / math.sqrt(variance), min(11.0 * (variance / 2.0) ** 2, 1e12)))
    assert found.weights == pytest.approx(np.array(weights) / sum(weights), rel=1e-9)
    assert found.p_value(-3.0) == pytest.approx(np.dot(weights, tails) / sum(weights), rel=1e-9)


def test_width_is_where_the_p_value_is_alpha():
    found = unseen_drift([flat(50), flat(50)], 2.0, 20.0, 0.0)
    for alpha in (0.05, 0.005):
        assert found.p_value(found.width(alpha)) == pytest.approx(alpha, rel=1e-3)


def test_longer_runs_without_a_drift_are_widened_less():
    widths = []
    for num_steps in (20, 50, 200, 1000, 10_000):
        alone = 1 / num_steps
        found = unseen_drift([flat(num_steps), flat(num_steps)], 2 * alone, 1e6, 0.0)
        widths.append(found.width(ALPHA) / math.sqrt(2 * alone) / 1.96)
    assert widths == sorted(widths, reverse=True)
    assert widths[1] > 1.2
    assert widths[-1] < 1.05


def test_more_slow_power_leaves_larger_drifts_possible():
    drifting = SlowPower((9.0, 3.0, 1.0), 50, 1 / 50)
    steady, moved = (unseen_drift([run, run], 0.04, 20.0, 0.0).width(ALPHA) for run in (flat(50), drifting))
    assert moved > 2 * steady


def test_a_ramp_has_slow_power_and_noise_has_none():
    rng = np.random.default_rng(3)
    ratios = np.array([slow_power(rng.normal(0, 1, 60), 1.0, "median").ratios for _ in range(300)])
    assert np.median(ratios, axis=0) == pytest.approx([0.45, 0.45, 0.45], abs=0.2)  # of chi-squared
    ramp = slow_power(np.linspace(0, 4, 60) + rng.normal(0, 1, 60), 1.0, "median")
    assert ramp.ratios[0] > 20


def test_steps_without_spread_or_too_few_have_no_slow_power():
    assert slow_power(np.full(50, 3.0), 1.0, "median") is None
    assert slow_power(np.arange(7.0), 1.0, "median") is None


def test_single_runs_are_never_more_certain_with_a_drift_than_without():
    for seed in range(6):
        found = contrast([steps(seed)], [steps(seed + 50, slowdown=0.002 * seed)])
        assert found.p_with_drift >= found.p_value
        low, high = found.difference_interval
        (wide_low, wide_high), ratio = found.intervals_with_drift()
        assert wide_low <= low < high <= wide_high
        is_called = found.p_with_drift <= ALPHA
        assert is_called == (not wide_low <= 0 <= wide_high) == (not ratio[0] <= 1 <= ratio[1])


def test_several_runs_tell_a_drift_themselves():
    sides = [[steps(seed), steps(seed + 10)] for seed in (0, 5)]
    found = contrast(*sides)
    assert found.drift is None
    assert found.p_with_drift == found.p_value
    assert found.intervals_with_drift() == (found.difference_interval, found.ratio_interval)
    assert found.steps_that_tell() is None


def test_runs_without_noise_have_nothing_to_drift():
    one, slower = (estimate(np.full((2, 30), value)) for value in (10.0, 11.0))
    assert contrast([one], [slower]).p_with_drift == 0.0
    assert contrast([one], [one]).p_with_drift == 1.0


def test_steps_that_tell_are_more_for_smaller_differences_and_none_for_tiny_ones():
    runs, variance = [flat(50), flat(60)], 1 / 50 + 1 / 60
    error = math.sqrt(variance)
    numbers = [steps_that_tell(runs, variance, 20.0, size * error, ALPHA) for size in (2.4, 1.4, 0.1)]
    assert numbers[0] < numbers[1]
    assert numbers[0] >= 75
    assert numbers[2] is None
