"""Runs that show whether their own streams are on different queues."""

import pytest

from aorta.queues.probe.machine import Spin, Stamp
from aorta.queues.probe.probe import switch_chains
from aorta.queues.probe.switch import CheckedProbe
from tests.queues.probe.simulator import SimulatedDevice


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
