"""Who shares a queue, and who is held up by a wait, against devices whose queues are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aorta.queues.probe.parts.blocking import blocking, judge
from aorta.queues.probe.parts.sharing import long_us, pair_program, partition, sharing
from tests.queues.probe.simulator import SimulatedDevice


@pytest.mark.heavy
@pytest.mark.parametrize("noise_us", [0.0, 3.0])
@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("queues", [1, 2, 4, 8, 32])
def test_groups_are_the_planted_ones(queues, order, noise_us):
    found = sharing(SimulatedDevice(64, queues, order, noise_us=noise_us))
    assert found.classes == [list(range(queue, 64, queues)) for queue in range(queues)]
    assert found.contradictions == 0
    assert found.pairs_agree
    assert {test.verdict for test in found.pairs} <= {order, "separate"}


@pytest.mark.heavy
@settings(max_examples=15)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.sampled_from(["start", "barrier"]))
def test_any_assignment_of_streams_to_queues_is_found(queues, order):
    device = SimulatedDevice(len(queues), 6, order, queue_of=lambda stream: queues[stream])
    found = sharing(device)
    planted = [[s for s, queue in enumerate(queues) if queue == q] for q in dict.fromkeys(queues)]
    assert found.classes == planted
    assert found.pairs_agree


def test_streams_of_their_own_are_said_to_be_so():
    assert sharing(SimulatedDevice(8, 8)).each_its_own


def test_rows_that_contradict_each_other_are_counted():
    # 0 says that 1 waits behind it, 1 does not say so of 0; 2 shares with 1 both ways, not with 0.
    behind = np.zeros((4, 4), dtype=bool)
    behind[0, 1] = behind[1, 2] = behind[2, 1] = True
    classes, contradictions = partition(behind)
    assert classes == [[0, 1, 2], [3]]
    assert contradictions == 2, "the pairs 0-1 and 0-2"


def test_a_device_that_deals_streams_out_anew_each_time_is_not_believed():
    device = SimulatedDevice(12, 3)
    device.queue_of = lambda stream: (stream + device.random.randrange(3)) % 3
    assert sharing(device).contradictions > 0


@pytest.mark.parametrize(
    ("queues", "order", "spins"), [(2, "start", 1), (1, "start", 2), (1, "barrier", 3)], ids=str
)
def test_the_pair_program_ends_after_one_two_or_three_spins(queues, order, spins):
    """The three numbers of the experiment, from the simulated device itself."""
    outcome = SimulatedDevice(2, queues, order, gap_us=0.0).run(pair_program(0, 1))
    assert outcome.end_us[2] == pytest.approx(spins * 200.0)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("queues", [1, 4, 8])
def test_a_wait_holds_up_the_streams_of_its_queue(queues, order, given):
    device = SimulatedDevice(16, queues, order, noise_us=1.0)
    classes = [list(range(queue, 16, queues)) for queue in range(queues)]
    found = blocking(device, classes if given else [])
    assert found.all_beside_waiting
    assert found.explained
    beside = {stream for members in classes if found.waiting in members for stream in members}
    assert set(found.beside_waiting) == beside - {found.waiting, found.running}
    # The simulated record stays at the head of its queue, too, until what it captures has ended.
    assert set(found.held_up) == set(found.beside_waiting) | set(found.beside_running)


def test_a_wait_on_a_queue_of_its_own_holds_nobody_up():
    found = blocking(SimulatedDevice(8, 8))
    assert found.held_up == []
    assert found.delay_us is None
    assert found.all_beside_waiting is None


def test_held_up_strangers_are_not_explained():
    """Stamps of a run in which everybody is held up and nobody was seen to share a queue."""
    starts = np.zeros((3, 6))
    starts[2, 4:] = long_us(4)
    found = judge(starts.ravel(), 4, 0, 1, True)
    assert found.held_up == [2, 3]
    assert not found.explained
