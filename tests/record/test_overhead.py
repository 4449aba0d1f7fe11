"""Which steps are recorded, and what that is found to cost: against loops whose cost is planted."""

import random

import pytest
from scipy.special import stdtrit

from aorta.record.overhead import (
    BLOCK,
    FIRST_EVERY,
    LOOKS,
    NUM_FIRST,
    NUM_WARM,
    Meter,
    block_of,
    is_recorded,
    share_recorded,
    t_95,
)
from aorta.steps.kernel_steps import SPANS_EVERY


def played(meter, every, num_steps, plain_ms, cost_ms, scatter=0.0, first=0, seed=0):
    """Feed the meter steps of a loop that takes cost_ms more where it is recorded."""
    noise = random.Random(seed)
    before = True
    for place in range(first, first + num_steps):
        recorded = is_recorded(place, every)
        length = plain_ms + cost_ms * recorded + noise.gauss(0, scatter)
        meter.add(length, place, recorded, switched=before and not recorded, cpu_ms=length)
        before = recorded


def test_the_first_steps_are_all_recorded_and_the_next_ones_are_not():
    assert all(is_recorded(place, 64) for place in range(NUM_FIRST))
    for every in (1, 2, 64):
        assert not any(is_recorded(place, every) for place in range(NUM_FIRST, NUM_FIRST + BLOCK))


def test_a_step_behind_the_warm_up_that_every_run_records_keeps_its_segments():
    assert [place for place in range(NUM_WARM, NUM_FIRST) if place % SPANS_EVERY == 0] == [20]


def test_a_program_that_goes_back_behind_its_first_step_is_not_recorded_all_along():
    places = range(-40 * BLOCK - 8, -8)
    assert sum(is_recorded(place, 8) for place in places) == len(places) / 8


@pytest.mark.parametrize("every", [1, 2, 16, 1024])
def test_steps_of_a_larger_every_are_among_those_of_a_smaller_one(every):
    for place in range(NUM_FIRST, NUM_FIRST + 3 * 1024 * BLOCK, 5):
        if is_recorded(place, 2 * every):
            assert is_recorded(place, every)


@pytest.mark.parametrize("every", [1, 4, 32])
def test_the_share_of_recorded_steps_is_as_planned(every):
    places = range(NUM_FIRST + LOOKS * BLOCK, NUM_FIRST + 65 * LOOKS * BLOCK)
    assert sum(is_recorded(place, every) for place in places) / len(places) == share_recorded(every)
    assert block_of(NUM_FIRST) == 0


def test_a_planted_cost_is_found_exactly_without_scatter():
    meter = Meter()
    played(meter, every=4, num_steps=400, plain_ms=10.0, cost_ms=2.0)
    cost = meter.cost()
    assert cost.ms == pytest.approx(2.0)
    assert cost.low_ms == pytest.approx(2.0)
    record = meter.record(0.01)
    plain = meter.total_ms - 2.0 * meter.num_recorded
    assert record.cost == pytest.approx(2.0 * meter.num_recorded / plain)
    assert record.num_recorded == sum(is_recorded(p, 4) for p in range(400))
    assert record.later_cost == pytest.approx(
        2.0 * (record.num_recorded - NUM_FIRST) / (10.0 * (400 - NUM_FIRST))
    )


def test_what_stays_on_in_every_step_is_in_the_cost():
    """In a loop of 0.30 ms: 0.062 ms, 0.02 of which clocks see in hooks and 0.01 on threads of ours."""
    meter, bare_ms, threads_ms = Meter(), 0.30, 0.01
    before = True
    for place in range(6000):
        recorded = is_recorded(place, 64)
        length = bare_ms + 0.062 + 0.4 * recorded
        own_ms = 0.0 if recorded else 0.02
        meter.add(length, place, recorded, before and not recorded, own_ms, length)
        if not recorded:
            meter.threads_took(threads_ms)
        before = recorded
    record = meter.record(0.01)
    true_cost = meter.total_ms / (6000 * bare_ms) - 1
    assert record.cost == pytest.approx(true_cost, rel=0.02)
    assert record.interval[0] < true_cost < record.interval[1]
    assert record.always_on == pytest.approx(0.062 / bare_ms, rel=0.02)
    assert record.always_on_ms == pytest.approx(0.062, rel=0.02)
    assert record.always_on_interval[0] == pytest.approx(0.02 / bare_ms, rel=0.02)
    assert record.always_on > record.limit


def test_time_of_the_switches_counts_as_cost():
    """2 ms of a switch in the first step that is not recorded are 2/8 ms a recorded step."""
    meter = Meter()
    for place in range(NUM_FIRST, NUM_FIRST + 8 * BLOCK):
        recorded, switched = is_recorded(place, 4), is_recorded(place - 1, 4) and not is_recorded(place, 4)
        if place == NUM_FIRST:
            switched = False
        meter.add(12.0 if switched else 10.0, place, recorded, switched)
    meter.settle()
    assert meter.cost().ms == pytest.approx(2 / BLOCK)


@pytest.mark.parametrize(("cost_ms", "every"), [(0.0, 1), (0.05, 1), (0.15, 2), (3.0, 32), (9.0, 128)])
def test_every_is_the_smallest_that_keeps_the_limit(cost_ms, every):
    meter = Meter()
    played(meter, 8, 3000, 10.0, cost_ms)
    assert meter.chosen_every(0.01) == every


@pytest.mark.parametrize("seed", range(12))
def test_the_mean_cost_stays_within_the_limit_however_the_steps_scatter(seed):
    """The rate is chosen again and again from what was seen so far; the true mean cost is what counts."""
    meter, noise, every, extra, total = Meter(), random.Random(seed), 64, 0.0, 0.0
    before = True
    for place in range(20_000):
        recorded = is_recorded(place, every)
        length = 10.0 + noise.gauss(0, 0.5) + 1.2 * recorded
        meter.add(length, place, recorded, before and not recorded, cpu_ms=length)
        before = recorded
        if place >= NUM_FIRST:
            total += 10.0
            extra += 1.2 * recorded
            if (place - NUM_FIRST) % 512 == 16:
                meter.settle()
                every = meter.chosen_every(0.01)
    assert 0.002 < extra / total <= 0.0105
    record = meter.record(0.01)
    assert record.later_interval[0] - 0.001 < extra / total < record.later_interval[1] + 0.001


def test_the_interval_holds_the_true_cost_in_most_loops():
    hits = 0
    for seed in range(200):
        meter = Meter()
        played(meter, 4, 900, 10.0, 1.0, scatter=0.7, seed=seed)
        cost = meter.cost()
        hits += cost.low_ms <= 1.0 <= cost.high_ms
    assert hits >= 177  # 190 are expected


def test_a_slow_step_beside_a_block_moves_the_cost_little():
    meter = Meter()
    for place in range(NUM_FIRST, NUM_FIRST + 64 * BLOCK):
        recorded = is_recorded(place, 4)
        meter.add(5000.0 if place == NUM_FIRST + 100 else 10.0 + recorded, place, recorded, False)
    assert meter.cost().ms == pytest.approx(1.0, abs=0.15)


def test_nothing_is_claimed_before_steps_were_left_out():
    meter = Meter()
    played(meter, 1, NUM_FIRST, 10.0, 1.0)
    record = meter.record(0.01)
    assert (record.cost, record.interval, record.every) == (None, None, None)
    assert record.only_first
    assert record.num_recorded == NUM_FIRST


def test_what_an_attempt_has_measured_goes_on_in_the_next():
    before, after = Meter(), Meter()
    played(before, 4, 1200, 10.0, 1.0, scatter=0.5)
    after.continue_with(before.pairs())
    assert after.cost() == before.cost()


@pytest.mark.parametrize("freedom", [3, 5, 10, 100])
def test_student_s_quantile(freedom):
    assert t_95(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=0.01)


def test_cpu_time_bounds_the_cost_where_steps_scatter():
    """Steps scatter by half; recording runs for 0.4 ms of each: that is known at once, and is what counts."""
    noise, meter, before = random.Random(3), Meter(), True
    for place in range(NUM_FIRST + 2 * BLOCK):
        recorded = is_recorded(place, 64)
        cpu_ms = 4.0 + 0.4 * recorded + noise.gauss(0, 0.05)
        meter.add(20.0 + noise.gauss(0, 8.0), place, recorded, before and not recorded, cpu_ms=cpu_ms)
        before = recorded
    meter.settle()
    assert meter.cost().high_ms > 4.0
    assert meter.chosen_every(0.01) in (2, 4)


def test_time_that_recording_makes_others_wait_is_not_hidden_by_idle_cpus():
    """Where lengths tell more than CPU time does, they decide."""
    meter = Meter()
    for place in range(NUM_FIRST + 64 * BLOCK):
        recorded = is_recorded(place, 8)
        meter.add(10.0 + 0.05 * recorded, place, recorded, False, cpu_ms=30.0 + 3.0 * recorded)
    assert meter.chosen_every(0.01) == 1


def test_recorded_steps_that_were_shorter_tell_no_cost_and_give_no_room():
    """The machine drifts: first steps of 52 ms, then 66. Recording makes no step shorter."""
    meter, before = Meter(), True
    for place in range(NUM_FIRST + 5 * BLOCK):
        recorded = is_recorded(place, 64)
        length = 52.0 if place < NUM_FIRST else 66.0
        meter.add(length + place % 3, place, recorded, before and not recorded, cpu_ms=length)
        before = recorded
    assert meter.record(0.01).step_interval_ms[1] < 0
    assert meter.chosen_every(0.01) == FIRST_EVERY
    assert not meter.has_room(0.01)
