"""Phases of a step from its host spans, by hand."""

import math

import pytest

from aorta.account.load.rank.phases import PREFIX, STEP, phase_metrics
from aorta.records.schema import HostSpan
from aorta.records.table import LineTable
from tests.records import plain_records


def phases(*spans, step_ms=100.0):
    """ms by phase of a step with these spans; what is 0 is left out."""
    record = plain_records.step(0, step_ms=step_ms, host_spans=[HostSpan(*span) for span in spans])
    columns = phase_metrics(LineTable([record]))
    return {name[len(PREFIX) :]: float(ms[0]) for name, ms in columns.items() if ms[0] and name != STEP}


PLAIN = (("data", 5.0, 15.0), ("backward", 40.0, 70.0), ("optimizer", 75.0, 85.0))


def test_forward_lies_before_a_backward_pass_and_logging_behind_the_update():
    assert phases(*PLAIN) == {
        "logging": 5.0 + 15.0,  # what the step before left to the batch, and its own
        "data": 10.0,
        "forward": 25.0,
        "backward": 30.0,
        "optimizer": 10.0,
    }  # the rest: clipping, 5 ms


AHEAD = (("backward", -30.0, 20.0), ("optimizer", 25.0, 30.0))
"""Of a host 70 ms ahead of its device: it goes on with the next step while the device works at this one."""


def test_where_the_host_runs_ahead_phases_are_those_of_its_own_step():
    found = phases(("step", -70.0, 30.0), *AHEAD)
    assert found == {"forward": 40.0, "backward": 50.0, "optimizer": 5.0}  # clipping 5 ms, nothing logged


def test_lines_that_do_not_tell_the_hosts_step_show_no_phases_where_it_runs_ahead():
    assert all(math.isnan(ms) for ms in phases(*AHEAD).values())


def test_each_micro_batch_has_its_forward_pass():
    found = phases(("backward", 10.0, 30.0), ("backward", 45.0, 70.0), ("optimizer", 70.0, 80.0))
    assert (found["forward"], found["backward"]) == (10.0 + 15.0, 20.0 + 25.0)


def test_a_checkpoint_within_the_update_is_a_checkpoint():
    found = phases(*PLAIN, ("checkpoint", 78.0, 82.0))
    assert (found["checkpoint"], found["optimizer"]) == (4.0, 6.0)


def test_what_follows_a_backward_pass_without_an_update_is_neither_forward_nor_logging():
    """A loop that asks for the next batch of an accumulated step."""
    found = phases(("backward", 10.0, 30.0), ("data", 40.0, 50.0), ("backward", 60.0, 80.0))
    assert found == {"forward": 10.0 + 10.0, "backward": 40.0, "data": 10.0}


def test_garbage_and_waits_stay_in_the_phase_in_which_they_come():
    found = phases(*PLAIN, ("garbage_collection", 20.0, 25.0), ("synchronisation", 50.0, 55.0))
    assert (found["forward"], found["backward"]) == (25.0, 30.0)


@pytest.mark.parametrize(
    "spans", [[], [("data", 0.0, 10.0), ("optimizer", 50.0, 60.0)]], ids=["nothing", "no-backward"]
)
def test_without_a_backward_pass_no_phase_is_told(spans):
    assert phases(*spans) == {}


def test_steps_do_not_mix():
    """The second step has no spans in front of its backward pass but its own."""
    records = [
        plain_records.step(0, step_ms=100.0, host_spans=[HostSpan(*span) for span in PLAIN]),
        plain_records.step(1, step_ms=50.0, host_spans=[HostSpan("backward", 20.0, 40.0)]),
        plain_records.step(2, step_ms=50.0, host_spans=None),
    ]
    columns = phase_metrics(LineTable(records))
    assert columns[f"{PREFIX}forward"][:2].tolist() == [25.0, 20.0]
    assert columns[f"{PREFIX}forward"][2] != columns[f"{PREFIX}forward"][2]  # not known
    assert columns[f"{PREFIX}logging"][:2].tolist() == [20.0, 0.0]
