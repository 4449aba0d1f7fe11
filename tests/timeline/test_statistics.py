import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from aorta.timeline import statistics
from aorta.timeline.noise_memory import block_length, movement, persistence, two_states, variance_inflation
from aorta.timeline.statistics import (
    ALPHA,
    MIN_STEPS,
    Estimate,
    contrast,
    estimate,
    holm,
    median_interval,
    side,
    warmup_steps,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from comparison import simulate
from simulated_runs import (
    BLOCKS_BREAK,
    NO_DIFFERENCE,
    PLANTED,
    Simulation,
    autoregressive,
    telegraph,
)

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
    assert estimate(values).num_steps == 30
    values[1, ::2] = np.nan
    values[1, 1] = np.nan
    assert estimate(values) is None


def test_medians_of_draws_are_those_of_the_drawn_steps():
    rng = np.random.default_rng(3)
    for num_steps in (9, 10):
        row = rng.integers(0, 6, num_steps).astype(float)
        drawn = statistics._draw_counts(num_steps, 3, 50)
        assert (drawn.sum(axis=1) == num_steps).all()
        expected = [np.median(np.repeat(row, counts)) for counts in drawn]
        assert statistics._drawn_medians(row, drawn).tolist() == expected


def test_blocks_are_neighbouring_steps():
    drawn = statistics._draw_counts(num_steps=12, block=12, num_draws=20)
    assert (drawn == 1).all(), "one block of all steps, wherever it starts, is all steps once"
    drawn = statistics._draw_counts(num_steps=12, block=6, num_draws=200)
    both = ((drawn[:, :-1] > 0) == (drawn[:, 1:] > 0)).mean()
    assert both > 0.7


def test_draws_that_are_kept_are_those_made_anew_and_are_not_changed():
    drawn = statistics._draw_counts(40, 3, 100)
    assert statistics._draw_counts(40, 3, 100) is drawn
    assert (statistics._made_draw_counts(40, 3, 100) == drawn).all()
    with pytest.raises(ValueError, match="read-only"):
        drawn[0, 0] += 1
    long = statistics.MAX_KEPT_STEPS + 1
    assert statistics._draw_counts(long, 3, 2) is not statistics._draw_counts(long, 3, 2)


def test_a_run_that_is_made_twice_gives_the_same():
    values = np.random.default_rng(0).random((3, 50))
    assert estimate(values) == estimate(values)


@pytest.mark.heavy
def test_the_error_of_independent_steps_is_that_of_a_median():
    """1.2533 sigma / sqrt(n), a little more for what is not known about the correlation."""
    rng = np.random.default_rng(1)
    errors = [estimate(100 + rng.standard_normal((1, 100))).error for _ in range(100)]
    assert np.mean(errors) == pytest.approx(1.2533 / 10, rel=0.12)


def test_ranks_that_move_together_count_once():
    shared = np.random.default_rng(2).standard_normal((1, 60))
    assert estimate(np.repeat(shared, 8, axis=0)).error == pytest.approx(estimate(shared).error)


def test_more_ranks_than_are_resampled():
    rng = np.random.default_rng(2)
    values = 10 + rng.standard_normal((300, 20))
    found = estimate(values)
    assert found.value == np.median(np.median(values, axis=1))
    assert 0 < found.error < 0.2


def test_persistence_is_found():
    rng = np.random.default_rng(4)
    for rho in (0.0, 0.5, 0.8):
        found = np.mean([persistence(autoregressive(rng, 200, rho)) for _ in range(40)])
        assert rho - 0.05 < found < rho + 0.15


def test_a_slow_step_does_not_hide_persistence():
    series = autoregressive(np.random.default_rng(5), 200, 0.8)
    series[50] += 100
    assert persistence(series) > 0.7


def test_white_noise_does_not_hide_a_slow_change():
    rng = np.random.default_rng(6)
    series = [autoregressive(rng, 200, 0.9) + 0.8 * rng.standard_normal(200) for _ in range(40)]
    assert np.mean([persistence(one) for one in series]) > 0.75


def test_alternating_steps_are_not_told_more_precisely():
    assert persistence(np.array([1.0, 2.0] * 30)) < 0.2


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7])
def test_inflation_of_a_mean_is_the_known_sum(rho):
    assert variance_inflation(rho, "mean") == pytest.approx((1 + rho) / (1 - rho))
    assert 1 <= variance_inflation(rho, "median") <= variance_inflation(rho, "mean")


def test_blocks_reproduce_a_part_of_the_inflation():
    """Blocks of 2: 1 + 2 rho / 2."""
    assert variance_inflation(0.6, "mean", 2) == pytest.approx(1.6)
    assert variance_inflation(0.6, "mean", 1) == 1.0


def test_blocks_are_longer_for_persistent_steps_and_at_most_a_quarter():
    lengths = [block_length(rho, 100) for rho in (0.0, 0.3, 0.6, 0.9, 0.97)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] == 25
    assert block_length(0.9, 8) == 2


@pytest.mark.heavy
def test_a_drift_is_seen_and_noise_is_none():
    rng = np.random.default_rng(7)
    noise = rng.standard_normal((200, 60))
    drifting = noise + 4 * np.linspace(0, 1, 60)
    seen = [
        [movement(one, persistence(one), "median").inflation > 0 for one in rows]
        for rows in (noise, drifting)
    ]
    assert np.mean(seen[0]) < 0.08
    assert np.mean(seen[1]) > 0.95


def test_a_drift_widens_the_interval_and_is_said():
    rng = np.random.default_rng(8)
    noise = 40 + 0.1 * rng.standard_normal((1, 80))
    still, moved = estimate(noise), estimate(noise + np.linspace(0, 2, 80))
    assert moved.error > 3 * still.error
    assert still.caveat == ""
    assert "drifts as long as the run" in moved.caveat
    assert moved.steady_error < moved.error / 2, "several runs tell the drift themselves"


def test_two_states_are_told_from_noise():
    rng = np.random.default_rng(9)
    series = 40 + 2 * telegraph(rng, 120, 15, 0.4) + 0.1 * rng.standard_normal(120)
    found = two_states(series)
    assert (found.low, found.high) == pytest.approx((40, 42), abs=0.1)
    is_high = series > 41
    assert found.num_visits == 1 + np.count_nonzero(is_high[1:] != is_high[:-1])
    noise = rng.standard_normal((200, 60))
    assert not any(two_states(one) for one in noise)
    assert two_states(np.full(20, 3.0)) is None


def test_an_interval_reaches_the_other_state():
    rng = np.random.default_rng(10)
    values = 40 + 2 * telegraph(rng, 100, 12, 0.5) + 0.05 * rng.standard_normal((2, 100))
    found = estimate(values)
    _, (low, high) = side([found])
    assert low < 40.2
    assert high > 41.8
    assert "two states" in found.caveat


# ---- two sides ---------------------------------------------------------------------------------


def run(value, error=0.1, freedom=20.0):
    return Estimate(value, error, freedom, num_steps=50, effective_steps=40.0, block=2)


def test_contrast_by_hand():
    """Errors 3 and 4 make 5; 20 degrees of freedom each and Welch's rule: 625 / (81/20 + 256/20)."""
    found = contrast([run(100.0, 3.0)], [run(120.0, 4.0)])
    assert (found.difference, found.ratio, found.error) == pytest.approx((20.0, 1.2, 5.0))
    assert found.freedom == pytest.approx(625 / (337 / 20))
    low, high = found.difference_interval
    assert (low + high) / 2 == pytest.approx(20.0)
    assert (high - low) / 2 == pytest.approx(5 * 2.0262, rel=1e-3)  # t at 0.975 and 37.1


def test_runs_that_differ_are_the_unit():
    """Both sides vary by a variance of 2, so each mean by 1: the error is sqrt(2), with 1 + 1 degrees."""
    found = contrast([run(10.0), run(12.0)], [run(14.0), run(16.0)])
    assert found.difference == 4.0
    assert found.error == pytest.approx(math.sqrt(2))
    assert found.freedom == 2


def test_runs_that_agree_by_chance_are_not_more_precise_than_their_steps():
    found = contrast([run(10.0), run(10.0)], [run(10.5), run(10.5)])
    assert found.error == pytest.approx(math.sqrt(2 * 0.01 / 2))


def test_a_single_run_varies_as_the_runs_of_the_other_side():
    found = contrast([run(10.0), run(12.0)], [run(11.0)])
    assert found.error == pytest.approx(math.sqrt(2 / 2 + 2 / 1))
    assert found.freedom == 1


def test_numbers_that_are_exact_are_compared_exactly():
    same = contrast([run(4.0, 0.0)], [run(4.0, 0.0)])
    other = contrast([run(4.0, 0.0)], [run(5.0, 0.0)])
    assert (same.p_value, other.p_value) == (1.0, 0.0)
    assert other.ratio_interval == (1.25, 1.25)


def test_a_reference_that_may_be_zero_has_no_ratio_interval():
    assert contrast([run(0.1, 0.2)], [run(0.5, 0.1)]).ratio_interval is None
    assert contrast([run(0.0, 0.0)], [run(0.5, 0.1)]).ratio is None


def test_one_side_alone():
    assert side([run(10.0, 0.0)]) == (10.0, (10.0, 10.0))
    value, (low, high) = side([run(10.0), run(12.0)])
    assert value == 11.0
    assert high - 11.0 == pytest.approx(12.706, rel=1e-4)  # t at 0.975 with one degree, error 1
    assert low + high == pytest.approx(22.0)


positive = st.floats(0.5, 100)


@pytest.mark.heavy
@given(positive, positive, st.floats(0.001, 3), st.floats(0.001, 3), st.floats(2, 100))
def test_ratio_and_difference_and_p_value_agree(r, c, error_r, error_c, freedom):
    found = contrast([run(r, error_r, freedom)], [run(c, error_c, freedom)])
    low, high = found.difference_interval
    called = found.p_value <= ALPHA
    assert called == (not low <= 0 <= high) or abs(found.p_value - ALPHA) < 1e-9
    if found.ratio_interval is not None:
        low, high = found.ratio_interval
        assert low <= found.ratio <= high
        assert called == (not low <= 1 <= high) or abs(found.p_value - ALPHA) < 1e-9


def test_turning_the_sides_turns_the_difference():
    a, b = [run(10.0, 0.3)], [run(11.0, 0.4)]
    one, other = contrast(a, b), contrast(b, a)
    assert one.difference == -other.difference
    assert one.p_value == other.p_value
    low, high = one.ratio_interval
    assert other.ratio_interval == pytest.approx((1 / high, 1 / low))


def test_detectable_grows_with_the_number_of_metrics():
    found = contrast([run(10.0)], [run(10.0)])
    assert found.detectable() < found.detectable(share=0.1)
    assert found.detectable() > found.difference_interval[1]


@pytest.mark.parametrize("freedom", [2.0, 4.0, 30.0])
def test_the_detectable_difference_is_seen_in_four_of_five(freedom):
    """Student's t exactly: an error from a chi-squared with as many degrees of freedom."""
    rng = np.random.default_rng(3)
    errors = np.sqrt(rng.chisquare(freedom, 4000) / freedom)
    usual = float(np.median(errors))
    size = replace(contrast([run(10.0)], [run(10.0)]), freedom=freedom, next_error=usual).detectable()
    called = statistics._quantile(1 - ALPHA / 2, freedom)
    seen = np.abs(size + rng.standard_normal(4000)) > called * errors
    assert np.mean(seen) == pytest.approx(0.8, abs=0.03)


def series_run(series):
    found = estimate(np.array([series]))
    assert found is not None
    return found


def test_what_settles_is_compared_over_the_same_steps():
    rng = np.random.default_rng(4)
    settling = 40 + 4 * np.exp(-np.arange(400) / 20) + 0.05 * rng.standard_normal(400)
    other = 40 + 4 * np.exp(-np.arange(40) / 20) + 0.05 * rng.standard_normal(40)
    found = contrast([series_run(settling)], [series_run(other)])
    assert found.p_value > ALPHA
    assert abs(found.difference) > 0.5, "medians over all steps do differ"
    assert found.caveats


def test_a_run_that_ends_before_the_other_has_settled_is_not_compared():
    rng = np.random.default_rng(4)
    long = estimate(rng.random((1, 300)), positions=np.arange(35, 335))
    found = contrast([long], [series_run(rng.random(40))])
    assert "ends before the longer one has settled" in found.withheld


def test_the_spread_between_runs_that_would_explain_a_difference():
    """Errors of 1 each: the width is 2.02 times sqrt(2) and what runs add."""
    found = contrast([run(100.0, 1.0, 40.0)], [run(110.0, 1.0, 40.0)])
    spread = 100 * found.explaining_spread()
    wider = math.sqrt(2 + 2 * spread**2)
    assert wider * statistics._quantile(0.975, found.freedom) == pytest.approx(10.0)
    assert contrast([run(100.0)], [run(100.0)]).explaining_spread() is None
    assert contrast([run(100.0)] * 2, [run(110.0)] * 2).explaining_spread() is None


# ---- several metrics ---------------------------------------------------------------------------


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_with_shares_by_hand():
    """Half for the first: 0.02 / 0.5; then the other two share what is left."""
    assert holm([0.02, 0.02, 0.5], [0.5, 0.25, 0.25]) == pytest.approx([0.04, 0.04, 0.5])


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


def test_the_interval_of_independent_values_needs_no_scipy():
    """Benchmarks use it on machines that have none."""
    code = (
        "import sys; sys.modules['scipy'] = None; import numpy as np;"
        "from aorta.timeline.statistics import median_interval; print(median_interval(np.full(8, 1.5)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(1.5, 1.5, 1.5)\n"


# ---- what it promises ----------------------------------------------------------------------------
# benchmarks/comparison.py has the long version.

PAIRS = 200
USUAL = (
    "independent steps",
    "correlated 0.6",
    "correlated 0.8, 30 steps",
    "correlated 0.6, skewed",
    "correlated 0.6, 1 in 20 slow",
    "1 rank, correlated 0.6",
    "2 runs a side that differ by 1 %",
)
"""Run each time; the others with --slow, and with more pairs by the benchmark."""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "simulation",
    [
        pytest.param(one, id=one.name, marks=() if one.name in USUAL else pytest.mark.slow)
        for one in NO_DIFFERENCE
    ],
)
def test_false_alarms_are_at_most_at_the_stated_rate(simulation):
    found = simulate(replace(simulation, num_ranks=min(simulation.num_ranks, 2)), PAIRS, seed=11)
    allowed = ALPHA * PAIRS + 3 * math.sqrt(ALPHA * (1 - ALPHA) * PAIRS)
    assert found.seen <= allowed
    assert found.covered >= PAIRS - allowed


BROKEN = (
    "two states, 15 steps each, 100 steps",
    "random walk, 50 steps",
    "40 and 300 steps, 3 % settling over 30",
    "linear drift, 2 % between runs, 50 steps",
)


@pytest.mark.heavy
@pytest.mark.parametrize("name", BROKEN)
def test_false_alarms_where_blocks_of_steps_break(name):
    simulation = next(one for one in BLOCKS_BREAK if one.name == name)
    found = simulate(replace(simulation, num_ranks=2), 80, seed=11)
    assert found.seen <= ALPHA * 80 + 3 * math.sqrt(ALPHA * (1 - ALPHA) * 80)


@pytest.mark.heavy
def test_three_percent_is_found():
    assert PLANTED[0] == Simulation(name="3 % slower", slowdown=0.03)
    found = simulate(PLANTED[0], 200, seed=12)
    assert found.seen + found.not_told >= 0.98 * 200  # single runs of 50 steps may drift
    assert found.seen >= 0.9 * 200
    longer = simulate(replace(PLANTED[0], num_steps=100), 200, seed=12)
    assert longer.seen >= 0.98 * 200
    assert longer.seen_of_twelve >= 0.95 * 200


@pytest.mark.heavy
def test_what_is_below_the_detectable_effect_is_not_seen():
    simulation = next(one for one in PLANTED if one.slowdown == 0.003)
    found = simulate(simulation, 200, seed=13)
    assert found.detectable_percent > 2 * 100 * simulation.slowdown
    assert found.seen <= 0.2 * 200
    assert found.covered >= 0.95 * 200 - 3 * math.sqrt(0.05 * 0.95 * 200)


@pytest.mark.heavy
def test_a_difference_of_the_detectable_size_is_seen_in_four_of_five():
    quiet = Simulation(name="quiet")
    size = simulate(quiet, 100, seed=14).detectable_percent / 100
    found = simulate(replace(quiet, slowdown=size), 200, seed=15)
    assert found.seen > 0.72 * 200
