import math
import sys
from pathlib import Path

import numpy as np
import pytest

from aorta.timeline.noise import error_of_mean, exact, inflation
from aorta.timeline.ratio import Spread, decision, log_ratio, robust_level, runs_needed, work_columns
from aorta.timeline.statistics import (
    ALPHA,
    MIN_STEPS,
    Estimate,
    contrast,
    estimate,
    holm,
    side,
    warmup_steps,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from comparison import rates
from harness import median_interval
from simulated_runs import EARLIER, HID_DIFFERENCES, autoregressive

# ---- warm-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_ms", "expected"),
    [
        pytest.param([10] * 9, 1, id="always-the-first"),
        pytest.param([90, 30, 10, 10, 10, 10, 10, 10, 10], 2, id="slow-ones"),
        pytest.param([90, 10, 30, 10, 10, 10, 10, 10, 10], 1, id="stops-at-the-first-usual-one"),
        pytest.param([90, 80, 70, 60, 50, 40, 10, 10, 10], 3, id="at-most-a-third"),
        pytest.param([90, 10], 0, id="too-few-to-tell"),
        pytest.param(
            [11, 10.8, 10.6, 10.4, 10.2, 10.1] + [10] * 14, 3, id="until-the-running-median-settles"
        ),
    ],
)
def test_warmup_rule(step_ms, expected):
    """The last case: the medians of steps 2 to 6 and 3 to 7 are 10.4 and 10.2, of 4 to 8 10.1."""
    assert warmup_steps(np.array([step_ms], dtype=float)) == expected


def test_warmup_looks_at_the_slowest_rank():
    steps = np.array([[10.0] * 9, [90.0, 90.0] + [10.0] * 7])
    assert warmup_steps(steps) == 2


def test_warmup_of_steps_without_times_is_the_first():
    assert warmup_steps(np.full((2, 9), np.nan)) == 1


def test_noise_is_no_warmup():
    rng = np.random.default_rng(0)
    left_out = [warmup_steps(10 * (1 + 0.02 * rng.standard_normal((4, 50)))) for _ in range(200)]
    assert np.mean(left_out) < 1.6
    assert max(left_out) <= 16


# ---- one run -----------------------------------------------------------------------------------


def test_the_value_is_the_median_over_ranks_of_the_medians_over_steps():
    values = np.array([[1.0, 2, 3] * 4, [5.0, 5, 5] * 4])
    assert estimate(values).value == 3.5


def test_the_mean_is_the_mean():
    values = np.arange(24.0).reshape(2, 12)
    assert estimate(values, "mean").value == pytest.approx(11.5)


def test_steps_alike_have_no_error():
    found = estimate(np.full((3, 20), 7.25))
    assert (found.value, found.error) == (7.25, 0.0)


@pytest.mark.parametrize(
    ("measured", "known"),
    [
        pytest.param(MIN_STEPS, True, id="enough"),
        pytest.param(MIN_STEPS - 1, False, id="too-few"),
    ],
)
def test_too_few_steps_have_no_estimate(measured, known):
    rng = np.random.default_rng(0)
    assert (estimate(rng.random((2, measured))) is not None) == known


def test_steps_that_a_rank_did_not_measure_are_left_out_of_the_error():
    values = np.random.default_rng(0).random((2, 40))
    values[1, ::4] = np.nan
    assert estimate(values).error == estimate(values[:, ~np.isnan(values).any(axis=0)]).error
    values[1, ::2] = np.nan
    values[1, 1] = np.nan
    assert estimate(values) is None


# ---- two sides of numbers ----------------------------------------------------------------------


def run(value, error=0.1, freedom=20.0):
    return Estimate(value, error, freedom)


def test_contrast_by_hand():
    """Errors 3 and 4 make 5; 20 degrees of freedom each and Welch's rule: 625 / (81/20 + 256/20) = 37.1."""
    found = contrast([run(100.0, 3.0)], [run(120.0, 4.0)])
    assert (found.difference, found.ratio) == pytest.approx((20.0, 1.2))
    low, high = found.difference_interval
    assert (low + high) / 2 == pytest.approx(20.0)
    assert (high - low) / 2 == pytest.approx(5 * 2.0262, rel=1e-3)


def test_runs_that_differ_are_the_unit():
    """Both sides vary by a variance of 2, so each mean by 1: the error is sqrt(2), t of 2 degrees is
    4.303."""
    found = contrast([run(10.0), run(12.0)], [run(14.0), run(16.0)])
    assert found.difference == 4.0
    assert found.difference_interval[1] - 4.0 == pytest.approx(4.303 * math.sqrt(2), rel=1e-3)


def test_numbers_that_are_exact_are_compared_exactly():
    same = contrast([run(4.0, 0.0)], [run(4.0, 0.0)])
    other = contrast([run(4.0, 0.0)], [run(5.0, 0.0)])
    assert (same.p_value, other.p_value) == (1.0, 0.0)
    assert other.ratio_interval == (1.25, 1.25)


def test_a_ratio_interval_never_reaches_below_zero():
    low, high = contrast([run(0.1, 0.2)], [run(0.5, 0.1)]).ratio_interval
    assert 0 < low < 5.0 < high
    assert contrast([run(0.0, 0.0)], [run(0.5, 0.1)]).ratio is None


def test_one_side_alone():
    """One run: t of 20 degrees, 2.086; two runs that differ by 2: their mean has error 1, t of 1 is 12.71."""
    assert side([run(10.0)])[1][1] == pytest.approx(10 + 0.1 * 2.086, rel=1e-3)
    assert side([run(10.0), run(12.0)])[1][1] == pytest.approx(11 + 12.71, rel=1e-3)


# ---- noise -------------------------------------------------------------------------------------


def test_the_error_of_independent_steps_is_that_of_their_mean():
    """0.02 / sqrt(100), and up to half as much more for memory that does not show."""
    series = 0.02 * np.random.default_rng(0).standard_normal((300, 100))
    error = np.sqrt(error_of_mean(series).variance())
    assert 0.002 <= np.median(error) <= 0.003
    assert 1.0 <= np.median(inflation(series)) < 2.3


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_the_error_of_steps_with_a_memory_is_that_of_their_mean(rho):
    """The mean of n steps of unit variance varies by (1 + rho) / (1 - rho) / n."""
    series = autoregressive(np.random.default_rng(1), 400, 400, rho)
    error = np.sqrt(error_of_mean(series).variance())
    assert np.median(error) == pytest.approx(1.25 * math.sqrt((1 + rho) / (1 - rho) / 400), rel=0.3)


def test_a_drift_widens_the_interval():
    noise = 0.01 * np.random.default_rng(2).standard_normal(100)
    ramp = np.linspace(0, 0.1, 100)
    narrow, wide = (float(error_of_mean(one).width(ALPHA)) for one in (noise, noise + ramp))
    assert wide > 5 * narrow


def test_a_long_series_is_taken_in_blocks_and_keeps_its_error():
    series = np.random.default_rng(3).standard_normal((50, 2000))
    assert np.median(np.sqrt(error_of_mean(series).variance())) == pytest.approx(
        1.3 / math.sqrt(2000), rel=0.3
    )


def test_the_width_is_where_the_p_value_is_alpha():
    error = error_of_mean(np.random.default_rng(4).standard_normal((5, 60))).plus(0.01)
    assert error.p_value(error.width(0.05)) == pytest.approx(np.full(5, 0.05), rel=1e-4)
    known = exact(4.0, 1e6)
    assert float(known.width(0.05)) == pytest.approx(2 * 1.96, rel=1e-3)


def test_series_that_stand_still_have_no_error():
    assert float(error_of_mean(np.zeros(20)).width(0.05)) == 0.0
    assert float(inflation(np.zeros(20))) == 1.0


# ---- step by step ------------------------------------------------------------------------------


def test_the_level_is_not_moved_far_by_single_steps():
    series = np.concatenate([np.tile([0.9, 1.1], 20), [50.0] * 4])
    level, _ = robust_level(series)
    assert float(level) == pytest.approx(1.0, abs=0.05)


def test_what_explains_a_step_is_taken_out():
    """Steps of 1 + 2 x by hand, with x on one side only: at x = 0 the level is 1."""
    x = np.random.default_rng(5).random((60, 1))
    level, influence = robust_level(1 + 2 * x[:, 0], x)
    assert float(level) == pytest.approx(1.0, abs=1e-6)
    assert np.abs(influence).max() < 1e-6


def test_tokens_that_differ_are_allowed_for():
    """Other data on both sides, and 5 % slower per token: not 40 % either way."""
    rng = np.random.default_rng(6)
    tokens = rng.choice([500.0, 1000.0, 4000.0], (2, 1, 80))
    step = np.log(tokens * np.array([1.0, 1.05])[:, None, None]) + 0.002 * rng.standard_normal((2, 1, 80))
    found = log_ratio(step[0], step[1], work_columns(tokens[0]), work_columns(tokens[1]))
    assert float(found.value) == pytest.approx(math.log(1.05), abs=0.003)
    assert abs(float(log_ratio(step[0], step[1]).value)) > 0.02 or (
        float(log_ratio(step[0], step[1]).error.width(ALPHA)) > 0.2
    )


def test_single_runs_differ_by_what_is_said():
    rng = np.random.default_rng(7)
    sides = 0.001 * rng.standard_normal((2, 1, 100))
    assert float(log_ratio(*sides, spread=Spread(0.02)).error.width(0.05)) == pytest.approx(
        1.96 * 0.02 * math.sqrt(2), rel=0.01
    )
    assert decision(log_ratio(*sides, spread=Spread(0.001)), 0.03, 0.05) == ["same"]
    assert decision(log_ratio(*sides, spread=Spread(0.02)), 0.03, 0.05) == ["cannot tell"]


def test_several_runs_tell_their_spread_themselves():
    """Levels 0, 0.02 and 0.1, 0.12: variance 0.0002 a side, error sqrt(0.0002), t of 2 degrees 4.303."""
    steps = 1e-6 * np.random.default_rng(8).standard_normal((4, 50))
    runs = np.array([0.0, 0.02, 0.1, 0.12])[:, None] + steps
    found = log_ratio(runs[:2], runs[2:])
    assert float(found.value) == pytest.approx(0.1, abs=1e-5)
    assert float(found.error.width(0.05)) == pytest.approx(4.303 * math.sqrt(0.0002), rel=1e-3)
    assert runs_needed(found, 0.03, 0.05) > runs_needed(found, 0.1, 0.05) >= 2


# ---- several metrics ---------------------------------------------------------------------------


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_keeps_the_rate_of_any_false_alarm():
    rng = np.random.default_rng(0)
    alarms = sum(min(holm(rng.random(12).tolist())) <= ALPHA for _ in range(4000))
    assert alarms / 4000 < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 4000)


@pytest.mark.heavy
def test_the_interval_of_a_median_holds_it_as_often_as_stated():
    """Of 40 values of a normal distribution, 95 times in 100."""
    rng = np.random.default_rng(3)
    found = [median_interval(rng.normal(1.0, 0.1, 40)) for _ in range(200)]
    held = sum(low <= 1.0 <= high for _, low, high in found)
    assert abs(held - 0.95 * 200) <= 3 * math.sqrt(0.95 * 0.05 * 200)
    assert median_interval(np.full(8, 1.5)) == (1.5, 1.5, 1.5)


# ---- what it promises ----------------------------------------------------------------------------
# benchmarks/comparison.py has the long version.


def cell(name):
    return next(one for one in (*EARLIER, *HID_DIFFERENCES) if one.name == name)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "correlated 0.8, 30 steps",
        "two states, 15 steps each, 100 steps",
        "random walk, 50 steps",
        "curriculum in four stages, same data",
        "single runs that differ by 1 %, 100 steps",
    ],
)
def test_false_alarms_are_at_most_at_the_stated_rate(name):
    pairs = 150
    found = rates(cell(name), pairs, seed=11)
    assert found.false_alarms <= ALPHA * pairs + 3 * math.sqrt(ALPHA * (1 - ALPHA) * pairs)
    assert found.wrongly_same <= ALPHA * pairs + 3 * math.sqrt(ALPHA * (1 - ALPHA) * pairs)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["buckets of lengths, same data", "checkpoint each 10th, garbage each 7th"])
def test_what_both_runs_do_hides_no_difference(name):
    found = rates(cell(name), 150, seed=12)
    assert found.found[0] >= 0.8 * 150
    assert found.found[1] >= 0.98 * 150
