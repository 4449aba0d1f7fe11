"""What H200s did in four runs, each kernel of it, against the rules."""

import json
from pathlib import Path

import numpy as np
import pytest

from aorta.queues.probe.machine import Stamp
from aorta.queues.probe.parts.blocking import judge
from aorta.queues.probe.parts.blocking import program as blocking_program
from aorta.queues.probe.parts.placement import RULES, predicted_start_us, queues_of
from aorta.queues.probe.parts.queues import STREAM_COUNTS, pairs_program
from aorta.queues.probe.parts.sharing import explain, late, mixed_program, row_program
from tests.queues.probe.simulator import SimulatedDevice

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
FIRST = json.loads((RESULTS / "queue_truth_h200_first_run.json").read_text())
SECOND = json.loads((RESULTS / "queue_truth_h200_second_run.json").read_text())
THIRD = json.loads((RESULTS / "queue_truth_h200_third_run.json").read_text())
FOURTH = json.loads((RESULTS / "queue_truth_h200_fourth_run.json").read_text())
LATER = pytest.mark.parametrize("run", [pytest.param(THIRD, id="third"), pytest.param(FOURTH, id="fourth")])
RULE = "until_taken"


def _seen(places, ops):
    return ops, np.isin(np.arange(len(ops)), places)


def _rows(recorded, num):
    """All rows looked the same: who came at which place was late, whoever that was."""
    (only,) = recorded
    assert only["runs"] == num
    return [_seen(only["late"], row_program(num, first)) for first in range(num)]


def _first_run(rows):
    num = len(rows["behind"])
    seen = []
    for first, behind in enumerate(rows["behind"]):
        ops = row_program(num, first)
        was_late = [index == 1 or index > 1 and op.stream in behind for index, op in enumerate(ops)]
        seen.append((ops, np.array(was_late)))
    return seen


def _mixed(recorded):
    num = recorded["streams"]
    return [_seen(places, mixed_program(num, run)) for run, places in enumerate(recorded["mixed"])]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["rows", "rows_of_mixed_priorities"])
def test_the_first_run_had_rows_alone_and_they_do_not_tell_rules_apart(name):
    seen = _first_run(FIRST[name])
    explained, _, queues = explain(seen)
    assert queues == 8
    right = {rule for rule, count in explained.items() if count == len(seen)}
    assert right == {"first_kernel", "first_least_recent", "each_kernel", "until_taken", "each_change"}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["default_queues", "priorities_0_and_greatest_12_each"])
def test_one_rule_explains_every_run_of_the_second_with_eight_queues(name):
    recorded = SECOND[name]
    num = recorded["streams"]
    seen = [*_rows(recorded["rows"], num), *_mixed(recorded)]
    explained, rule, queues = explain(seen)
    assert (rule, queues) == (RULE, 8)
    assert explained[RULE] == len(seen) == num + 8
    assert explained["first_kernel"] == num, "what the first run was explained by: no run of these 8"
    assert sum(count == len(seen) for count in explained.values()) == 1


def test_a_kernel_on_every_stream_first_does_not_choose_the_queues():
    """The second run launched on all 64 streams, in order, before each row."""
    (only,) = SECOND["default_queues"]["rows_after_one_kernel_on_every_stream"]
    explained = {RULE: 0, "first_kernel": 0}
    for first in range(64):
        ops = row_program(64, first)
        whole = [*[Stamp(stream) for stream in range(64)], *ops]
        for rule in explained:
            start_us = predicted_start_us(whole, queues_of(whole, rule, 8), "start")[64:]
            predicted = np.nonzero(start_us - start_us[0] > 2 / 3 * ops[0].us)[0].tolist()
            explained[rule] += predicted == only["late"]
    assert explained == {RULE: only["runs"], "first_kernel": 2}


@pytest.mark.parametrize("queues", [1, 2, 8, 32])
def test_rows_at_every_number_of_queues(queues):
    for ops, was_late in _rows(SECOND["by_CUDA_DEVICE_MAX_CONNECTIONS"][str(queues)]["rows"], 64):
        start_us = predicted_start_us(ops, queues_of(ops, RULE, queues), "start")
        assert ((start_us - start_us[0] > 2 / 3 * ops[0].us) == was_late).all()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("queues", "others"),
    [
        pytest.param(2, {"each_kernel": "each_kernel"}, id="2"),
        pytest.param(32, {"first_kernel": "first_kernel", "first_least_recent": "least_recent"}, id="32"),
    ],
)
def test_a_device_of_that_rule_fools_the_other_rules_as_often_as_the_h200_did(queues, others):
    """With 2 and 32 queues only counts were kept: how many of 72 runs each rule of that code explained."""
    recorded = SECOND["by_CUDA_DEVICE_MAX_CONNECTIONS"][str(queues)]
    device = SimulatedDevice(64, queues, dealing="until taken")
    seen = _rows(recorded["rows"], 64)
    for ops in (mixed_program(64, seed) for seed in range(8)):
        seen.append((ops, late(device.run(ops), ops)))
    explained, _, _ = explain(seen)
    assert explained[RULE] == 72
    for rule, name_then in others.items():
        assert 64 < explained[rule] == recorded["explained_by_rules_of_that_code"][name_then] < 72


@pytest.mark.heavy
@LATER
@pytest.mark.parametrize("queues", [2, 8, 32])
def test_one_rule_explains_every_run_made_after_it_was_fixed(queues, run):
    recorded = run["by_CUDA_DEVICE_MAX_CONNECTIONS"][str(queues)]
    seen = [*_rows(recorded["rows"], 64), *_mixed(recorded)]
    explained, rule, found = explain(seen)
    assert (rule, found, explained[RULE]) == (RULE, queues, 80)
    others = {name for name, count in explained.items() if count == 80} - {RULE}
    assert others == ({"each_change"} if queues == 2 else set()), "with two queues these are the same"


@LATER
def test_a_wait_held_up_those_that_the_rule_puts_behind_it(run):
    """No wait and no record takes a queue, as the run said of itself: the rule sees kernels alone."""
    found = run["blocking"]
    ops = blocking_program(64, found["running"], found["waiting"])
    long_us = found["long_us"]
    start_us = predicted_start_us(ops, queues_of(ops, RULE, 8), "start")
    predicted = judge(start_us, 64, found["running"], found["waiting"], True)
    assert predicted.held_up == found["held_up"] == [9, 17, 25, 33, 41, 49, 57]
    assert predicted.beside_running == found["beside_running"]
    assert found["delay_us"] == pytest.approx(long_us, rel=0.1)


@pytest.mark.parametrize(
    "recorded", [FIRST, SECOND, THIRD, FOURTH], ids=["first", "second", "third", "fourth"]
)
def test_the_staircases(recorded):
    """Two kernels in a row on a stream go to one queue: a queue for each kernel is refuted."""
    wrong = dict.fromkeys(RULES, 0)
    for steps in recorded["staircase_start_spins"]:
        ops = pairs_program(len(steps) // 2, 1.0)
        for rule in RULES:
            error = np.abs(predicted_start_us(ops, queues_of(ops, rule, 8), "start") - steps)
            wrong[rule] += bool(error.max() > 0.3)
    assert wrong[RULE] == 0
    assert wrong["each_kernel"] == 17
    assert len(recorded["staircase_start_spins"]) == len(STREAM_COUNTS)
