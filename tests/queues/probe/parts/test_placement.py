"""Devices that deal queues out as work is submitted: the rule, and what two runs on H200s did."""

import numpy as np
import pytest

from aorta.queues.probe.machine import Early, QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.parts.placement import (
    RULES,
    claiming_program,
    keeping_program,
    predicted_start_us,
    queues_of,
)
from aorta.queues.probe.parts.priority import effect
from aorta.queues.probe.parts.queues import pairs_program, staircase
from aorta.queues.probe.parts.sharing import late, mixed_program, row_program, sharing
from aorta.queues.probe.probe import enough
from aorta.queues.probe.result import conclude
from tests.queues.probe.simulator import SimulatedDevice

RULE_OF = {
    "in turn": "first_kernel",
    "least recent": "first_least_recent",
    "each kernel": "each_kernel",
    "each change": "each_change",
    "until taken": "until_taken",
}
MIXED = 16


def _device(queues, dealing="until taken", order="start", num_streams=20, **more):
    more = {"noise_us": 1.0, "record_blocks": False, **more}
    return SimulatedDevice(num_streams, queues, order, dealing=dealing, **more)


@pytest.mark.heavy
@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("dealing", ["in turn", "until taken"])
@pytest.mark.parametrize("queues", [2, 8, 12])
def test_dealt_queues_are_counted_and_explained(queues, dealing, order):
    device = _device(queues, dealing, order)
    found = sharing(device)
    rule = RULE_OF[dealing]
    assert (found.kind, found.dealing.rule, found.dealing.queues) == ("dynamic", rule, queues)
    assert found.dealing.explained[rule] == found.dealing.runs == 20 + MIXED
    assert found.contradictions > 0
    assert found.classes == []
    conclusion = conclude(staircase(device), found)
    assert conclusion.queues == queues
    assert f"no stream has a fixed queue: {RULES[rule]}" in conclusion.because
    assert f"predicts {20 + MIXED} of {20 + MIXED} runs" in conclusion.because


@pytest.mark.parametrize(("dealing", "rule"), RULE_OF.items(), ids=str)
def test_rules_that_agree_on_rows_are_told_apart_when_streams_come_again(dealing, rule):
    found = sharing(_device(4, dealing, num_streams=16))
    assert (found.dealing.rule, found.dealing.queues) == (rule, 4)
    assert sum(count == found.dealing.runs for count in found.dealing.explained.values()) == 1


def test_what_no_rule_explains_is_said_and_the_staircase_still_counts():
    """Rows of a device that deals at random; the starts and times of one with 4 queues."""
    found = sharing(_device(4, "random", num_streams=16))
    assert found.kind == "unknown"
    assert found.dealing.rule is None
    conclusion = conclude(staircase(SimulatedDevice(16, 4)), found)
    assert conclusion.queues == 4
    assert "assignment is dynamic and not explained" in conclusion.because


def test_a_staircase_whose_times_disagree_gives_no_number_alone():
    uneven = SimulatedDevice(16, 4, queue_of=lambda stream: max(0, stream - 12))
    assert conclude(staircase(uneven), sharing(_device(4, "random", num_streams=16))).queues is None


@pytest.mark.heavy
def test_the_rule_and_the_staircase_must_give_one_number():
    found = conclude(staircase(SimulatedDevice(20, 4)), sharing(_device(8)))
    assert found.queues is None


@pytest.mark.heavy
@pytest.mark.parametrize("keeps", [True, False])
def test_whether_a_dry_stream_keeps_its_queue_is_seen(keeps):
    assert sharing(_device(5, keeps_when_idle=keeps)).dealing.keeps_when_idle is keeps


@pytest.mark.heavy
@pytest.mark.parametrize("takes", [True, False])
def test_whether_a_wait_takes_a_queue_is_seen(takes):
    found = sharing(_device(5, waits_take=takes)).dealing
    assert found.wait_takes_a_queue is takes
    assert found.record_takes_a_queue is False


def test_the_programs_that_show_it():
    assert keeping_program(4, 900.0, 20.0) == [
        *(Spin(0, 900.0), Spin(0, 20.0)),  # queue 0, blocked
        Early(1),
        *(Spin(2, 20.0), Spin(3, 20.0)),
        *(Spin(1, 20.0), Spin(4, 20.0)),
    ]
    assert claiming_program(4, 900.0, 20.0, QueueWait) == [
        *(QueueRecord(0, 0), Spin(0, 900.0), Spin(0, 20.0)),  # queue 0, blocked
        *(Spin(1, 20.0), Spin(2, 20.0)),
        QueueWait(3, 0),  # the last queue, or none
        *(Spin(4, 20.0), Spin(5, 20.0)),
    ]


def test_queues_by_each_rule_worked_out_by_hand():
    program = [Stamp(stream) for stream in (5, 5, 3, 7, 5, 1, 3)]
    assert queues_of(program, "stream_number", 3) == [2, 2, 0, 1, 2, 1, 0]
    assert queues_of(program, "each_kernel", 3) == [0, 1, 2, 0, 1, 2, 0]
    assert queues_of(program, "first_kernel", 3) == [0, 0, 1, 2, 0, 0, 1]
    # Queue 0 was used again before 1 came.
    assert queues_of(program, "first_least_recent", 3) == [0, 0, 1, 2, 0, 1, 1]
    # Queue 1 has one, as 2, and longer.
    assert queues_of(program, "least_loaded", 3) == [0, 0, 1, 2, 0, 1, 1]
    assert queues_of(program, "each_change", 3) == [0, 0, 1, 2, 0, 1, 2]
    # 5 keeps queue 0, which nobody else was given; 3 lost queue 1 to 1, and 2 is the one unused for longest.
    assert queues_of(program, "until_taken", 3) == [0, 0, 1, 2, 0, 1, 2]


def test_what_ran_before_only_renames_the_queues_of_until_taken():
    """So that a run's placement needs no idle device and no known beginning."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        before, program = ([Stamp(int(s)) for s in random.integers(0, 9, 30)] for _ in range(2))
        alone = queues_of(program, "until_taken", 4)
        after = queues_of([*before, *program], "until_taken", 4)[30:]
        assert len(set(zip(alone, after, strict=True))) == len(set(alone)) == len(set(after))


def test_predicted_starts_worked_out_by_hand():
    program = [Spin(0, 100), QueueRecord(0, 0), QueueWait(1, 0), Spin(1, 10), Spin(2, 10), Spin(3, 10)]
    # 1 follows the event; 2 shares its queue, so that it waits for its start or its end; 3 shares with 0.
    assert predicted_start_us(program, [0, 1, 1, 0], "start").tolist() == [0, 100, 100, 0]
    assert predicted_start_us(program, [0, 1, 1, 0], "barrier").tolist() == [0, 100, 110, 100]


@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("dealing", RULE_OF)
def test_predicted_starts_are_those_of_the_simulated_device(dealing, order):
    rule = RULE_OF[dealing]
    device = _device(3, dealing, order, num_streams=7, gap_us=0.0, noise_us=0.0)
    for ops in (row_program(7, 2), pairs_program(7, 200.0), mixed_program(7, 1)):
        predicted = predicted_start_us(ops, queues_of(ops, rule, 3), order)
        assert device.run(ops).start_us == pytest.approx(predicted, abs=0.01)


@pytest.mark.parametrize("pools", [False, True])
def test_whether_high_priority_waits_behind_low_is_seen(pools):
    """With pools of their own, high streams never meet the low one."""

    def make(priorities):
        queue_of = (lambda s: (priorities[s], s % 4)) if pools else (lambda s: s % 4)
        return SimulatedDevice(len(priorities), 4, priorities=priorities, resident_ctas=8, queue_of=queue_of)

    assert effect(make, -2, queues=4).high_behind_low is not pools


def test_priorities_are_not_measured_through_shared_queues():
    with pytest.raises(Exception, match="3 streams must have a queue each, and there are 2 queues"):
        enough(2, 3)
    assert enough(8, 3) == 8
    assert enough(None, 3) is None


def test_late_is_after_the_long_kernel():
    device = SimulatedDevice(4, 2)
    assert late(device.run(row_program(4, 0)), row_program(4, 0)).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
