"""Cost of a switch against devices whose cost is known, around streams seen on different queues."""

from itertools import combinations_with_replacement
from statistics import median

import numpy as np
import pytest

from aorta.queues.probe.machine import QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.probe import switch_chains
from aorta.queues.probe.switch import (
    NO_QUEUES,
    PLACEMENTS,
    CheckedProbe,
    as_switch_cost,
    chain_program,
    chains,
    compare,
    measure_switch,
    pseudo_median,
    slopes_us,
    switch_cost,
)
from tests.queues.probe.simulator import SimulatedDevice

QUICK = {"lengths": (8, 16, 32, 64), "repetitions": 8}


@pytest.mark.heavy
@pytest.mark.parametrize(("gap_us", "event_us"), [(1.3, 2.5), (2.0, 0.7), (1.0, 0.0)])
def test_the_planted_cost_is_found(gap_us, event_us):
    found, _ = chains(SimulatedDevice(2, 2, gap_us=gap_us, event_us=event_us), [0, 1], **QUICK)
    assert found.slopes["same"].us == pytest.approx(gap_us, abs=1e-3)
    assert found.per_switch.us == pytest.approx(event_us, abs=1e-3)


@pytest.mark.heavy
def test_noise_and_a_coarse_clock_widen_the_interval_around_the_planted_cost():
    device = SimulatedDevice(2, 2, gap_us=1.3, event_us=2.0, noise_us=0.5, tick_ns=1000)
    found, _ = chains(device, [0, 1], **QUICK)
    mean_noise_us = 0.5 * np.sqrt(2 / np.pi)  # of |N(0, 0.5)|, on the wait
    low, high = found.per_switch.interval_us
    assert low <= 2.0 + mean_noise_us <= high
    assert low > 0


def test_a_switch_that_saves_time_is_negative():
    """Two streams without order: what is dropped or clamped elsewhere is a negative number here."""
    spans = {placement: np.tile([10.0, 20.0, 30.0], (8, 1)) for placement in PLACEMENTS}
    spans["switching"] = spans["switching"] / 2
    found = compare(spans, (1, 2, 3), 2, 0.0, True)
    assert found.per_switch.us == pytest.approx(-5.0)
    assert found.per_switch.interval_us[1] < 0


def test_one_disturbed_run_does_not_move_the_answer():
    spans = {placement: np.tile([10.0, 20.0, 30.0], (15, 1)) for placement in PLACEMENTS}
    spans["switching"] = spans["switching"].copy()
    spans["switching"][3, 2] = 5000.0
    assert compare(spans, (1, 2, 3), 2, 0.0, True).per_switch.us == 0


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
    found, _ = chains(device, [0, 1], **QUICK)
    cost = as_switch_cost(found, device.clock)
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


def test_a_run_returns_the_stamps_of_its_program_alone():
    device = SimulatedDevice(4, 4, gap_us=0.0)
    checked = CheckedProbe(device)
    outcome = checked.run([Spin(3, 50.0), Spin(1, 10.0), Spin(3, 10.0)])
    assert (outcome.start_us - outcome.start_us[0]).tolist() == [0, 0, 50]
    assert (outcome.end_us - outcome.start_us[0]).tolist() == [50, 10, 60]
    assert (checked.seen.verified, checked.seen.runs) == (1, 1)


@pytest.mark.parametrize(("queue_of", "verified"), [(lambda stream: 0, 0), (lambda stream: stream, 1)])
def test_streams_of_one_queue_are_seen_not_to_be_apart(queue_of, verified):
    checked = CheckedProbe(SimulatedDevice(2, 2, queue_of=queue_of))
    checked.run([Stamp(0), Stamp(1)])
    assert (checked.seen.verified, checked.seen.runs) == (verified, 1)


def test_streams_that_move_in_the_middle_of_a_run_are_seen():
    """Apart when the run begins; by its end stream 2 has taken the queue of stream 0."""
    checked = CheckedProbe(SimulatedDevice(3, 2, dealing="until taken", record_blocks=False))
    checked.run([Stamp(0), Stamp(1), Stamp(2), Stamp(0), Stamp(1)])
    assert checked.seen.verified == 0


def test_one_stream_needs_no_check():
    checked = CheckedProbe(SimulatedDevice(2, 2))
    checked.run([Stamp(1)] * 3)
    assert checked.seen.runs == 0
    assert checked.seen.always


@pytest.mark.heavy
@pytest.mark.parametrize("dealing", [None, "in turn", "until taken"])
def test_the_switch_goes_around_streams_of_different_queues(dealing):
    device = SimulatedDevice(10, 4, dealing=dealing, event_us=2.0, record_blocks=False)
    found = switch_chains(device, 4)
    assert found.streams == 2
    assert found.seen.always
    assert found.per_switch.us == pytest.approx(2.0, abs=0.01)
