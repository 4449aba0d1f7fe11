"""Steps that the overhead left out are estimated by the recorded ones, within an interval that holds."""

import numpy as np
import pytest
from scipy.signal import lfilter

from aorta.account.judge.whole_run import LEAST_BLOCKS, estimated

NUM_FIRST, BLOCK = 24, 8


def steps_of(num_steps, every):
    """Which steps are the first ones, and which are recorded: these, and one block of `every` after them."""
    place = np.arange(num_steps)
    is_first = place < NUM_FIRST
    return is_first, is_first | (((place - NUM_FIRST) // BLOCK + 1) % every == 0)


def test_a_part_that_is_a_share_of_the_step_is_known_exactly():
    """Four recorded blocks of one step each: a fifth of every step, whatever its length."""
    step = np.array([10.0, 20, 10, 40, 10, 30, 10, 20])
    part = np.where(np.arange(8) % 2 == 1, step / 5, np.nan)
    found = estimated(part, step, np.zeros(8, dtype=bool), 0.0)
    assert found == pytest.approx((150 / 8 / 5,) * 3)


def test_what_recording_adds_is_not_taken_into_the_other_steps():
    """Recorded steps take 12 ms, 2 of them aorta's: of the 10 ms of a step 5 are the part."""
    step = np.array([10.0, 12] * 4)
    part = np.array([np.nan, 5.0] * 4)
    assert estimated(part, step, np.zeros(8, dtype=bool), 2.0).mean_ms == pytest.approx(5.0)


def test_the_first_steps_stand_for_themselves_alone():
    is_first, is_recorded = steps_of(1000, 16)
    step = np.where(is_first, 100.0, 10.0)
    part = np.where(is_recorded, np.where(is_first, 90.0, 1.0), np.nan)
    found = estimated(part, step, is_first, 0.0)
    assert found.mean_ms == pytest.approx((NUM_FIRST * 90 + (1000 - NUM_FIRST) * 1) / 1000)


def test_too_few_blocks_tell_nothing():
    is_first, is_recorded = steps_of(NUM_FIRST + BLOCK * 16 * (LEAST_BLOCKS - 1), 16)
    part = np.where(is_recorded, 1.0, np.nan)
    assert estimated(part, np.full(len(part), 10.0), is_first, 0.0) is None


@pytest.mark.parametrize("every", [4, 16])
@pytest.mark.parametrize("memory", [0.0, 0.9, 0.99])
def test_the_interval_holds_the_mean_of_a_fully_recorded_run(every, memory):
    """Steps of which every part is known, and the same with most left out. 95 of 100 are to hold it.

    memory: how much of a step's deviation the next one has.
    """
    rng = np.random.default_rng(0)
    num_steps, num_held, num_runs = 2000, 0, 400
    is_first, is_recorded = steps_of(num_steps, every)
    for _ in range(num_runs):
        scatter = lfilter([np.sqrt(1 - memory**2)], [1, -memory], rng.standard_normal((2, num_steps)))
        compute = 8 + 0.5 * scatter[0]
        exposed = 2 * np.exp(0.5 * scatter[1]) + np.where(is_first, 5.0, 0.0)
        found = estimated(np.where(is_recorded, exposed, np.nan), compute + exposed, is_first, 0.0)
        num_held += found.low_ms <= exposed.mean() <= found.high_ms
    assert num_held / num_runs >= 0.91
