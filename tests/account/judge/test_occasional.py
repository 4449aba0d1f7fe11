"""Slow steps with a period or apart from the others are seen; tails and busy stretches are not."""

import numpy as np
import pytest

from aorta.account.judge.occasional import Occasions, are_alike, occasions

NUM = 40
TRIALS = 150


def noise(kind, random, num):
    match kind:
        case "normal":
            return random.normal(0, 1, num)
        case "lognormal":
            return random.lognormal(0, 1, num)
        case "pareto":
            return random.pareto(1.5, num)
        case "student":
            return random.standard_t(1.5, num)
        case "walk":
            return np.exp(np.cumsum(random.normal(0, 0.5, num)))
        case "stretch":
            first = int(random.integers(0, num - 6))
            return random.normal(0, 1, num) + 20 * (np.abs(np.arange(num) - first - 3) < 3)
    raise AssertionError(kind)


@pytest.mark.parametrize("num", [NUM, 400])
@pytest.mark.parametrize("kind", ["normal", "lognormal", "pareto", "student", "walk", "stretch"])
def test_noise_has_no_slow_steps(kind, num):
    random = np.random.default_rng(3)
    seen = [occasions(noise(kind, random, num), np.arange(num)) is not None for _ in range(TRIALS)]
    assert sum(seen) <= 2


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("period", [2, 3, 5, 7, 10])
def test_a_period_is_seen_with_its_steps_and_its_loss(period, first):
    random = np.random.default_rng(period)
    steps = first + np.arange(NUM)
    is_slow = steps % period == 1
    slow = occasions(30 + random.normal(0, 1, NUM) + 12.0 * is_slow, steps)
    assert slow.period == period
    assert slow.is_slow.tolist() == is_slow.tolist()
    assert slow.each_ms == pytest.approx(12.0, abs=1.5)
    assert slow.mean_ms()[0] == pytest.approx(slow.excess_ms.mean())


@pytest.mark.parametrize(
    ("num", "period"),
    [
        pytest.param(400, 50, id="eight-of-400"),
        pytest.param(400, 100, id="four-of-400"),
        pytest.param(6000, 100, id="sixty-of-6000"),
        pytest.param(6000, 500, id="twelve-of-6000"),
    ],
)
def test_a_long_period_is_seen_in_few_steps(num, period):
    """A checkpoint of 60 ms in noisy steps of 30, with the hiccups that a machine has."""
    for seed in range(10):
        random = np.random.default_rng(seed)
        steps = 3 + np.arange(num)
        is_slow = steps % period == 1
        hiccups = 40.0 * (random.random(num) < 0.3 / period)
        slow = occasions(30 * random.lognormal(0, 0.15, num) + 60.0 * is_slow + hiccups, steps)
        assert slow.period == period
        assert slow.is_slow.tolist() == is_slow.tolist()


def test_the_interval_holds_the_loss():
    random = np.random.default_rng(2)
    steps = np.arange(NUM)
    holds = 0
    for _ in range(TRIALS):
        low, high = occasions(30 + random.normal(0, 1, NUM) + 12.0 * (steps % 5 == 1), steps).mean_ms()[1]
        holds += low <= 12.0 / 5 <= high
    assert holds >= 0.9 * TRIALS


def test_a_period_is_seen_through_heavy_tails():
    """Noise with a tail that is longer than the loss: most of what is slowest comes every third step."""
    random = np.random.default_rng(1)
    steps = np.arange(120)
    slow = occasions(random.standard_t(2, 120) + 5.0 * (steps % 3 == 0), steps)
    assert slow.period == 3


def test_slow_steps_at_random_are_seen_where_they_stand_apart():
    random = np.random.default_rng(5)
    is_slow = random.random(NUM) < 0.25
    slow = occasions(30 + random.normal(0, 1, NUM) + 25.0 * is_slow, np.arange(NUM))
    assert slow.period is None
    assert slow.is_slow.tolist() == is_slow.tolist()
    low, high = slow.mean_ms()[1]
    assert low <= 25.0 * is_slow.mean() <= high


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.zeros(NUM), id="nothing"),
        pytest.param(np.arange(5.0), id="few-steps"),
        pytest.param(np.r_[np.zeros(NUM - 1), 900.0], id="one-step"),
        pytest.param(np.full(NUM, np.nan), id="not-measured"),
    ],
)
def test_what_tells_of_no_slow_steps(values):
    assert occasions(values, np.arange(len(values))) is None


def test_how_often_is_said_in_words():
    steps = np.arange(42)
    slow = occasions(10 + 41.0 * (steps % 3 == 0) + steps * 1e-3, steps)
    assert slow.text == "every third step (14 of 42), each 41.0 ms longer: 13.7 ms a step on average"
    assert occasions(10 + 9.0 * (steps % 11 == 2) + steps * 1e-3, steps).often == "every 11th step"


def test_what_slow_steps_take_each_is_what_adds_up_to_the_mean():
    """10 + 10 + 40 ms in 3 of 12 steps."""
    excess = np.zeros(12)
    excess[[1, 4, 6]] = 10.0, 10.0, 40.0
    assert Occasions(excess > 0, excess, 0.1, None).text == (
        "3 of 12 steps, each 20.0 ms longer: 5.00 ms a step on average"
    )


@pytest.mark.parametrize(
    ("losses", "alike"),
    [
        pytest.param([0.1] * 10 + [600.0] + [0.2] * 9 + [610.0], True, id="two-evaluations"),
        pytest.param([0.1] * 20 + [600.0], False, id="once"),
        pytest.param([0.1] * 10 + [600.0] + [0.2] * 9 + [200.0], False, id="unlike"),
        pytest.param([30.0] * 10 + [600.0] + [50.0] * 9 + [610.0], False, id="among-others"),
        pytest.param([0.0] * 20, False, id="nothing"),
        pytest.param([5.0] * 20, False, id="every-step"),
    ],
)
def test_what_a_program_does_again_takes_as_long_again(losses, alike):
    assert are_alike(np.array(losses)) is alike
