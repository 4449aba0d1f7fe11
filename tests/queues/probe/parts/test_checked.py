"""Runs that show where their own streams are."""

import pytest

from aorta.queues.probe.machine import QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.parts.blocking import blocking
from aorta.queues.probe.parts.chain import chain_program
from aorta.queues.probe.parts.checked import CheckedProbe, groups, layout
from aorta.queues.probe.parts.convoy import convoy
from aorta.queues.probe.parts.edges import edge, edges, program
from aorta.queues.probe.parts.sharing import sharing
from aorta.queues.probe.probe import switch_chains
from tests.queues.probe.simulator import SimulatedDevice

DEALINGS = [None, "in turn", "least recent", "least loaded", "each kernel", "each change", "until taken"]


def _device(queues, dealing, order="start", num_streams=20, **more):
    more = {"noise_us": 1.0, "record_blocks": False, **more}
    return SimulatedDevice(num_streams, queues, order, dealing=dealing, **more)


def test_a_run_returns_the_stamps_of_its_program_alone():
    device = SimulatedDevice(4, 4, gap_us=0.0)
    checked = CheckedProbe(device)
    outcome = checked.run([Spin(3, 50.0), Spin(1, 10.0), Spin(3, 10.0)])
    assert (outcome.start_us - outcome.start_us[0]).tolist() == [0, 0, 50]
    assert (outcome.end_us - outcome.start_us[0]).tolist() == [50, 10, 60]
    assert (checked.seen.verified, checked.seen.runs) == (1, 1)


def test_streams_that_are_not_where_they_should_be_are_seen_not_to_be():
    program = [Stamp(0), Stamp(1)]
    for queue_of, where, right in (
        (lambda stream: 0, "different queues", False),
        (lambda stream: 0, "one queue", True),
        (lambda stream: stream, "different queues", True),
        (lambda stream: stream, "one queue", False),
    ):
        checked = CheckedProbe(SimulatedDevice(2, 2, queue_of=queue_of), where)
        checked.run(program)
        assert (checked.seen.verified, checked.seen.runs) == (int(right), 1)


def test_streams_that_move_in_the_middle_of_a_run_are_seen():
    """Apart when the run begins; by its end a third stream has come between."""
    device = SimulatedDevice(3, 2, dealing="until taken", record_blocks=False)
    checked = CheckedProbe(device, "one queue")
    checked.run([Stamp(0), Stamp(1), Stamp(2), Stamp(0), Stamp(1)])
    assert checked.seen.verified == 0


def test_one_stream_needs_no_check():
    checked = CheckedProbe(SimulatedDevice(2, 2))
    checked.run([Stamp(1)] * 3)
    assert checked.seen.runs == 0
    assert checked.seen.always


def test_fillers_come_between_kernels_and_not_between_a_kernel_and_its_events():
    assert list(groups(chain_program("switching", [5, 7], 3))) == [
        [Stamp(5), QueueRecord(5, 0)],
        [QueueWait(7, 0), Stamp(7), QueueRecord(7, 1)],
        [QueueWait(5, 1), Stamp(5), QueueRecord(5, 2)],
    ]


def test_a_layout_follows_groups_or_else_the_number_of_queues():
    fixed = layout(6, 2, [[0, 1, 2], [3, 4, 5]])
    assert (fixed.apart, fixed.together, fixed.fillers) == ([0, 3], [0, 1], [])
    dealt = layout(6, 4, [])
    assert (dealt.apart, dealt.together, dealt.fillers) == ([0, 1, 2, 3], [0, 1], [2, 3, 4])
    assert layout(4, 4, []).together == []


@pytest.mark.heavy
@pytest.mark.parametrize("dealing", [*DEALINGS, "random"])
def test_a_wait_holds_up_exactly_those_that_the_run_shows_behind_it(dealing):
    device = _device(4, dealing)
    found = blocking(device, sharing(device).classes)
    assert found.held_up == found.beside_waiting
    assert found.held_up
    assert found.explained
    assert found.delay_us == pytest.approx(found.long_us, rel=0.05)


@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("dealing", [*DEALINGS, "random"])
def test_the_convoy_finds_who_shares_the_queue_of_the_large_kernels(dealing, order):
    found = convoy(_device(4, dealing, order, num_streams=12), 4, order)
    assert found.beside
    assert found.elsewhere
    for name in ("mean_us", "p50_us", "p99_us"):
        assert getattr(found.shared, name) == pytest.approx(getattr(found.predicted_shared, name), rel=0.02)
    assert found.private.p99_us < 100


@pytest.mark.heavy
@pytest.mark.parametrize("dealing", ["in turn", "until taken"])
def test_the_switch_goes_around_streams_of_different_queues(dealing):
    device = _device(4, dealing, num_streams=10, event_us=2.0, noise_us=0.0)
    found = switch_chains(device, sharing(device), 4)
    assert found.streams == 2
    assert (found.seen.where, found.seen.always) == ("different queues", True)
    assert found.per_switch.us == pytest.approx(2.0, abs=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("dealing", [None, "until taken"])
def test_edges_tell_streams_from_waiting_queues_and_kernels_from_gaps(dealing):
    """1 µs for an edge and 0.5 for every other queue that waits: of k streams k − 1 do."""
    costs = {"gap_us": 1.5, "event_us": 1.0, "event_per_waiting_us": 0.5, "noise_us": 0.0}
    device = _device(4, dealing, num_streams=9, **costs)
    found = edges(device, layout(9, 4, sharing(device).classes))
    assert all(one.seen.always for one in found)
    longer = {(one.where, one.streams, one.waiting, one.kernel_us): round(one.longer.us, 2) for one in found}
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
    assert all(one.same_us == pytest.approx(1.5, abs=0.01) for one in found)


@pytest.mark.heavy
@pytest.mark.parametrize("kernel_us", [0.0, 10.0])
def test_kernels_that_keep_the_queues_in_turn_are_not_in_a_chain_along_one_queue(kernel_us):
    """The device dispatches a kernel per µs, and 3 of 4 are none of the chain's."""
    costs = {"gap_us": 1.5, "event_us": 0.25, "dispatch_us": 1.0, "noise_us": 0.0}
    device = _device(4, "until taken", num_streams=9, **costs)
    plan = layout(9, 4, [])
    found = edge(device, "one queue", plan.together, (), kernel_us, fillers=plan.fillers)
    assert found.seen.always
    assert (found.same_us, found.edge_us) == (pytest.approx(1.5, abs=0.01), pytest.approx(1.75, abs=0.01))


@pytest.mark.heavy
def test_edges_whose_streams_cannot_be_placed_say_in_how_many_runs_they_were():
    found = edges(_device(4, "random", num_streams=9), layout(9, 4, []))
    apart = next(one for one in found if one.streams == 4)
    assert 0 < apart.seen.verified < apart.seen.runs


def test_waiting_queues_wait_for_the_end_of_the_chain():
    chain = chain_program("switching", [0, 1], 3)
    assert program("switching", [0, 1], 3, [5], 0.0) == [*chain, QueueRecord(0, 3), QueueWait(5, 3), Stamp(5)]


def test_an_edge_of_one_stream_costs_nothing_more():
    assert edge(SimulatedDevice(2, 2), "one queue", [0], lengths=(4, 8), repetitions=6).longer.us == 0


@pytest.mark.heavy
@pytest.mark.parametrize("queues", [1, 32])
def test_no_run_exceeds_the_stamps_that_there_are(queues):
    """2046: the buffer's slots less the gate's and the early kernels'."""
    device = SimulatedDevice(64, queues, dealing="until taken", record_blocks=False)
    longest = 0
    run = device.run

    def counted(ops):
        nonlocal longest
        longest = max(longest, sum(isinstance(op, Spin | Stamp) for op in ops))
        return run(ops)

    device.run = counted
    blocking(device)
    convoy(device, queues, "start")
    plan = layout(64, queues, [])
    edge(device, "one queue", plan.together, lengths=(16, 28, 56), repetitions=1, fillers=plan.fillers)
    assert 900 < longest < 2046 or queues == 1
