"""Devices that deal queues out as work is submitted: the rule, the groups of a run, and what needs them."""

import json
from pathlib import Path

import numpy as np
import pytest

from aorta.hw_queue_eval.probe.blocking import blocking
from aorta.hw_queue_eval.probe.chain import chain_program
from aorta.hw_queue_eval.probe.convoy import convoy
from aorta.hw_queue_eval.probe.edges import edge, edges, program
from aorta.hw_queue_eval.probe.machine import Early, Record, Spin, Stamp, Wait
from aorta.hw_queue_eval.probe.placement import Pinned, keeping_program, predicted_start_us, queues_of
from aorta.hw_queue_eval.probe.priority import effect
from aorta.hw_queue_eval.probe.probe import enough, switch_chains
from aorta.hw_queue_eval.probe.queues import pairs_program, staircase
from aorta.hw_queue_eval.probe.result import conclude
from aorta.hw_queue_eval.probe.sharing import explain, late, mixed_program, placed, row_program, sharing
from tests.hw_queue_eval.probe.simulator import SimulatedDevice

H200 = Path(__file__).resolve().parents[3] / "benchmarks/results/queue_truth_h200_first_run.json"


def _device(queues, dealing="in turn", order="start", num_streams=20, **more):
    more = {"noise_us": 1.0, "record_blocks": False, **more}
    return SimulatedDevice(num_streams, queues, order, dealing=dealing, **more)


@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("queues", [2, 8, 12])
def test_queues_dealt_in_turn_are_counted_grouped_and_explained(queues, order):
    device = _device(queues, order=order)
    found = sharing(device)
    assert (found.kind, found.dealing.rule, found.dealing.queues) == ("dynamic", "first_kernel", queues)
    assert found.dealing.explained["first_kernel"] == found.dealing.runs == 20 + 8
    assert found.contradictions > 0
    assert found.classes == [list(range(queue, 20, queues)) for queue in range(queues)]
    assert found.pairs_agree
    conclusion = conclude(staircase(device), found)
    assert conclusion.queues == queues
    assert "no stream has a fixed queue: the k-th stream" in conclusion.because


@pytest.mark.parametrize(
    ("dealing", "rule"), [("in turn", "first_kernel"), ("least recent", "least_recent")], ids=str
)
def test_rules_that_agree_on_rows_are_told_apart_when_streams_come_again(dealing, rule):
    found = sharing(_device(4, dealing, num_streams=16))
    assert found.dealing.rule == rule
    assert max(found.dealing.explained, key=found.dealing.explained.get) == rule
    assert sum(count == found.dealing.runs for count in found.dealing.explained.values()) == 1


def test_a_queue_for_each_kernel_is_a_rule_without_groups():
    device = _device(4, "each kernel", num_streams=16)
    found = sharing(device)
    assert (found.kind, found.dealing.rule, found.dealing.queues) == ("dynamic", "each_kernel", 4)
    assert found.classes == []
    assert "cannot be chosen" in found.reason


def test_what_no_rule_explains_is_said_and_the_staircase_still_counts():
    """Rows of a device that deals at random; the starts and times of one with 4 queues."""
    device = _device(4, "random", num_streams=16)
    found = sharing(device)
    assert found.kind == "unknown"
    assert found.dealing.rule is None
    conclusion = conclude(staircase(SimulatedDevice(16, 4)), found)
    assert conclusion.queues == 4
    assert "no rule explains" in conclusion.because
    assert "no groups" in conclusion.because
    with pytest.raises(Exception, match="who shares a queue is not known"):
        placed(device, found)


def test_a_staircase_whose_times_disagree_gives_no_number_alone():
    uneven = SimulatedDevice(16, 4, queue_of=lambda stream: max(0, stream - 12))
    assert conclude(staircase(uneven), sharing(_device(4, "random", num_streams=16))).queues is None


def test_the_rule_and_the_staircase_must_give_one_number():
    found = conclude(staircase(SimulatedDevice(20, 4)), sharing(_device(8)))
    assert found.queues is None


@pytest.mark.parametrize("keeps", [True, False])
def test_whether_a_dry_stream_keeps_its_queue_is_seen(keeps):
    assert sharing(_device(5, keeps_when_idle=keeps)).dealing.keeps_when_idle is keeps


def test_the_program_that_shows_it():
    assert keeping_program(4, 900.0, 20.0) == [
        *(Spin(0, 900.0), Spin(0, 20.0)),  # queue 0, blocked
        Early(1),
        *(Spin(2, 20.0), Spin(3, 20.0)),
        *(Spin(1, 20.0), Spin(4, 20.0)),
    ]


def test_queues_by_each_rule_worked_out_by_hand():
    program = [Stamp(stream) for stream in (5, 5, 3, 7, 5, 1)]
    assert queues_of(program, "stream_number", 3) == [2, 2, 0, 1, 2, 1]
    assert queues_of(program, "each_kernel", 3) == [0, 1, 2, 0, 1, 2]
    assert queues_of(program, "first_kernel", 3) == [0, 0, 1, 2, 0, 0]
    assert queues_of(program, "least_recent", 3) == [0, 0, 1, 2, 0, 1], "queue 0 was used again before 1 came"
    assert queues_of(program, "least_loaded", 3) == [0, 0, 1, 2, 0, 1], "queue 1 has one, as 2, and longer"


def test_predicted_starts_worked_out_by_hand():
    program = [Spin(0, 100), Record(0, 0), Wait(1, 0), Spin(1, 10), Spin(2, 10), Spin(3, 10)]
    # 1 follows the event; 2 shares its queue, so that it waits for its start or its end; 3 shares with 0.
    assert predicted_start_us(program, [0, 1, 1, 0], "start").tolist() == [0, 100, 100, 0]
    assert predicted_start_us(program, [0, 1, 1, 0], "barrier").tolist() == [0, 100, 110, 100]


@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("dealing", ["in turn", "each kernel"])
def test_predicted_starts_are_those_of_the_simulated_device(dealing, order):
    rule = {"in turn": "first_kernel", "each kernel": "each_kernel"}[dealing]
    device = _device(3, dealing, order, num_streams=7, gap_us=0.0, noise_us=0.0)
    for ops in (row_program(7, 2), pairs_program(7, 200.0), mixed_program(7, 1)):
        predicted = predicted_start_us(ops, queues_of(ops, rule, 3), order)
        assert device.run(ops).start_us == pytest.approx(predicted, abs=0.01)


def test_a_pinned_run_returns_the_stamps_of_its_program_alone():
    device = SimulatedDevice(4, 2, dealing="in turn", gap_us=0.0)
    outcome = Pinned(device).run([Spin(3, 50.0), Spin(3, 10.0), Spin(1, 10.0), Spin(0, 10.0)])
    assert outcome.start_us.tolist() == [0, 50, 50, 0]


def test_a_wait_holds_up_exactly_the_streams_of_its_queue():
    device = _device(4)
    found = blocking(*placed(device, sharing(device)))
    assert found.held_up == found.beside_waiting == [4, 8, 12, 16]
    assert found.explained


@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("queues", [2, 8])
def test_the_convoy_finds_streams_that_share_a_dealt_queue(queues, order):
    device = _device(queues, order=order, num_streams=12)
    found = convoy(*placed(device, sharing(device)), order)
    for name in ("mean_us", "p50_us", "p99_us"):
        assert getattr(found.shared, name) == pytest.approx(getattr(found.predicted_shared, name), rel=0.02)
    assert found.private.p99_us < 20


def test_the_switch_goes_around_streams_of_different_queues():
    device = _device(4, num_streams=10, event_us=2.0, noise_us=0.0)
    found = switch_chains(device, sharing(device))
    assert (found.streams, found.queues) == (2, 2)
    assert found.per_switch.us == pytest.approx(2.0, abs=0.01)


def test_edges_tell_streams_from_waiting_queues_and_kernels_from_gaps():
    """1 µs for an edge and 0.5 for every other queue that waits: of k streams k − 1 do."""
    device = _device(4, num_streams=9, gap_us=1.5, event_us=1.0, event_per_waiting_us=0.5, noise_us=0.0)
    shared = sharing(device)
    found = {
        (one.where, one.streams, one.waiting, one.kernel_us): one
        for one in edges(device, shared.classes, dynamic=True)
    }
    longer = {key: round(one.longer.us, 2) for key, one in found.items()}
    assert longer == {
        ("different queues", 2, 0, 0.0): 1.5,
        ("different queues", 3, 0, 0.0): 2.0,
        ("different queues", 4, 0, 0.0): 2.5,
        ("different queues", 2, 1, 0.0): 2.0,
        ("different queues", 2, 2, 0.0): 2.5,
        ("different queues", 2, 0, 10.0): 1.5,
        ("different queues", 4, 0, 10.0): 2.5,
        ("one queue", 2, 0, 0.0): 1.0,
        ("one queue", 2, 0, 10.0): 1.0,
    }
    assert all(one.same_us == pytest.approx(1.5, abs=0.01) for one in found.values())


def test_waiting_queues_wait_for_the_end_of_the_chain():
    chain = chain_program("switching", [0, 1], 3)
    assert program("switching", [0, 1], 3, [5], 0.0) == [*chain, Record(0, 3), Wait(5, 3), Stamp(5)]


def test_an_edge_of_one_stream_costs_nothing_more():
    assert edge(SimulatedDevice(2, 2), "one queue", [0], lengths=(4, 8), repetitions=6).longer.us == 0


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


def test_what_an_h200_did_is_explained_by_kernels_launched_in_turn():
    """Rows of three rules are the same; the staircase's runs with two kernels per stream tell one of them."""
    recorded = json.loads(H200.read_text())
    seen = []
    for first, behind in enumerate(recorded["rows"]["behind"]):
        ops = row_program(64, first)
        seen.append((ops, np.array([False, *[op.stream in (first, *behind) for op in ops[1:]]])))
    explained, _, queues = explain(seen)
    assert queues == 8
    assert explained["first_kernel"] == 64
    assert explained["least_loaded"] == 0
    assert explained["stream_number"] == 2
    for steps in recorded["staircase_start_spins"]:
        ops = pairs_program(len(steps) // 2, 1.0)
        by_rule = {
            rule: np.abs(predicted_start_us(ops, queues_of(ops, rule, 8), "start") - steps).max()
            for rule in ("first_kernel", "each_kernel")
        }
        assert by_rule["first_kernel"] < 0.3
        if len(steps) > 16:
            assert by_rule["each_kernel"] > 0.7


def test_late_is_after_the_long_kernel():
    device = SimulatedDevice(4, 2)
    assert late(device.run(row_program(4, 0)), row_program(4, 0)).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
