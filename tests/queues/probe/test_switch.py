"""Cost of a switch against devices whose cost is known, and what is said where there is none."""

from itertools import combinations_with_replacement
from statistics import median

import numpy as np
import pytest

from aorta.queues.probe.machine import QueueRecord, QueueWait, Stamp
from aorta.queues.probe.switch import (
    NO_QUEUES,
    PLACEMENTS,
    chain_program,
    cost_of,
    measure_switch,
    pseudo_median,
    slopes_us,
    switch_cost,
)
from tests.queues.probe.simulator import SimulatedDevice

CLOCK = SimulatedDevice(1, 1, tick_ns=0.0).clock
QUICK = {"lengths": (8, 16, 32, 64), "repetitions": 8}


@pytest.mark.heavy
@pytest.mark.parametrize(("gap_us", "event_us"), [(1.3, 2.5), (2.0, 0.7), (1.0, 0.0)])
def test_the_planted_cost_is_found(gap_us, event_us):
    found = switch_cost(SimulatedDevice(2, 2, gap_us=gap_us, event_us=event_us), **QUICK)
    assert found.same_stream_us == pytest.approx(gap_us, abs=1e-3)
    assert found.per_switch_us == pytest.approx(event_us, abs=1e-3)


@pytest.mark.heavy
def test_noise_and_a_coarse_clock_widen_the_interval_around_the_planted_cost():
    device = SimulatedDevice(2, 2, gap_us=1.3, event_us=2.0, noise_us=0.5, tick_ns=1000)
    found = switch_cost(device, **QUICK)
    mean_noise_us = 0.5 * np.sqrt(2 / np.pi)  # of |N(0, 0.5)|, on the wait
    low, high = found.interval_us
    assert low <= 2.0 + mean_noise_us <= high
    assert low > 0


def test_a_switch_that_saves_time_is_negative():
    """Two streams without order: what is dropped or clamped elsewhere is a negative number here."""
    spans = {placement: np.tile([10.0, 20.0, 30.0], (8, 1)) for placement in PLACEMENTS}
    spans["switching"] = spans["switching"] / 2
    found = cost_of(spans, (1, 2, 3), 2, CLOCK, True)
    assert found.per_switch_us == pytest.approx(-5.0)
    assert found.interval_us[1] < 0


def test_one_disturbed_run_does_not_move_the_answer():
    spans = {placement: np.tile([10.0, 20.0, 30.0], (15, 1)) for placement in PLACEMENTS}
    spans["switching"] = spans["switching"].copy()
    spans["switching"][3, 2] = 5000.0
    assert cost_of(spans, (1, 2, 3), 2, CLOCK, True).per_switch_us == 0


def test_slopes_are_those_of_a_line():
    lengths = (4, 8, 20)
    line = np.array([[3 + 0.25 * length for length in lengths], [7 - 2.0 * length for length in lengths]])
    assert slopes_us(line, lengths) == pytest.approx([0.25, -2.0])


def test_the_pseudo_median_is_the_median_of_all_means_of_two():
    values = [1.0, 4.0, 2.0, 9.0, 3.5, 2.5, 7.0, 0.5, 3.0, 1.5, 6.0, 2.2]
    by_hand = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    middle, (low, high) = pseudo_median(np.array(values))
    assert middle == pytest.approx(median(by_hand))
    # Tables of Wilcoxon's test: n = 12 takes the 14th smallest and the 14th largest at 95 %.
    assert (low, high) == pytest.approx((by_hand[13], by_hand[-14]))


def test_the_tick_widens_an_interval_that_would_be_a_point():
    assert pseudo_median(np.full(10, 2.0), tick=0.1)[1] == pytest.approx((1.9, 2.1))


def test_a_switching_chain_waits_for_the_kernel_before_it():
    program = chain_program("switching", [5, 7], 3)
    assert program == [
        *(Stamp(5), QueueRecord(5, 0)),
        *(QueueWait(7, 0), Stamp(7), QueueRecord(7, 1)),
        *(QueueWait(5, 1), Stamp(5), QueueRecord(5, 2)),
    ]
    assert chain_program("same", [5, 7], 2) == [Stamp(5), Stamp(5)]


@pytest.mark.heavy
def test_a_launch_bound_chain_gives_no_cost():
    device = SimulatedDevice(2, 2, primed=False)
    cost = switch_cost(device, **QUICK)
    assert cost.per_switch_us is None
    assert cost.interval_us is None
    assert "launch-bound" in cost.reason


@pytest.mark.heavy
def test_one_stream_has_nothing_to_switch_to():
    cost = switch_cost(SimulatedDevice(1, 1, gap_us=1.5))
    assert cost.per_switch_us is None
    assert "one stream" in cost.reason
    assert cost.same_stream_us == pytest.approx(1.5, abs=1e-3)


@pytest.mark.heavy
def test_three_streams_switch_as_dearly_as_two():
    cost = switch_cost(SimulatedDevice(3, 3, gap_us=1.0, event_us=4.0))
    assert cost.per_switch_us == pytest.approx(4.0, abs=1e-3)
    assert cost.reason is None


def test_a_cpu_says_why_it_measures_nothing():
    import torch

    cost = measure_switch(torch.device("cpu"), 2)
    assert cost.per_switch_us is None
    assert cost.reason == NO_QUEUES
