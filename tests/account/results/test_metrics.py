"""Intervals: against the binomial distribution, and how often they hold the truth."""

import numpy as np
import pytest
import scipy  # its parts are loaded where they are used

from aorta.account.results.metrics import (
    binomial_places,
    mean_metric,
    median_metric,
    quantile_metric,
    rate_metric,
)


@pytest.mark.parametrize("num", [8, 59, 100, 1000])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_places_are_the_tightest_that_keep_both_tails(num: int, share: float) -> None:
    low, high = binomial_places(num, share)
    if low > 0:
        assert scipy.stats.binom.cdf(low - 1, num, share) <= 0.025 < scipy.stats.binom.cdf(low, num, share)
    if high <= num:
        assert (
            scipy.stats.binom.sf(high - 1, num, share) <= 0.025 < scipy.stats.binom.sf(high - 2, num, share)
        )


def test_the_interval_of_a_time_ends_at_0() -> None:
    """Nine times of 1 ms and one of 100: mean 10.9, and two standard errors of it are 19.8."""
    found = mean_metric(np.array([1.0] * 9 + [100.0]), "ms")
    assert found.interval is not None
    assert found.interval.low == 0
    below = mean_metric(np.array([-1.0] + [1.0] * 8 + [100.0]), "ms").interval
    assert below is not None
    assert below.low is not None
    assert below.low < 0, "a difference may be negative"


def test_too_few_iterations_leave_the_upper_end_open() -> None:
    """0.99^100 = 0.37: none of 100 iterations need lie above the 99th percentile."""
    found = quantile_metric(np.random.default_rng(0).normal(10, 1, 100), 0.99, "ms")
    assert found.interval is not None
    assert found.interval.high is None
    assert found.error is None
    assert "upper" in (found.reason or "")


def test_many_iterations_bound_the_tail() -> None:
    values = np.random.default_rng(0).normal(10, 1, 2000)
    found = quantile_metric(values, 0.99, "ms")
    assert found.interval is not None
    assert found.interval.low is not None
    assert found.interval.high is not None
    assert found.interval.low < 10 + 2.326 < found.interval.high


@pytest.mark.heavy
def test_quantile_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        ends = quantile_metric(rng.normal(size=200), 0.95, "ms").interval
        assert ends is not None
        hits += (ends.low is None or ends.low <= 1.645) and (ends.high is None or ends.high >= 1.645)
    assert hits / 300 >= 0.93


def test_few_iterations_have_no_interval_and_say_so() -> None:
    for found in (mean_metric(np.ones(5), "ms"), quantile_metric(np.ones(5), 0.95, "ms")):
        assert found.value == 1
        assert found.interval is None
        assert found.reason == "no interval: 5 iterations, 8 are needed"


def test_no_iterations_is_null() -> None:
    assert median_metric(np.array([]), "ms").value is None


def test_throughput_is_of_the_whole_time_with_the_interval_of_the_mean() -> None:
    """20 units in 10 ms on average is 2000/s; 1 % of the mean is 1 % of the rate."""
    mean = mean_metric(np.random.default_rng(2).normal(10, 0.2, 100), "ms")
    assert mean.interval is not None
    assert mean.value is not None
    assert mean.error is not None
    found = rate_metric(20, mean, 2000.0, "units/s")
    assert found.interval is not None
    assert found.interval.low is not None
    assert found.interval.low < 2000 < (found.interval.high or 0)
    assert found.error == pytest.approx(2000 * mean.error / mean.value)
    assert rate_metric(0, mean, 0.0, "samples/s").value is None
