"""Ranks of real jobs side by side, against what their timestamps say."""

from dataclasses import replace

import numpy as np
import pytest

from aorta.timeline.waits import exposed_wait_ms, match_ranks
from aorta.traces.model import rank_calls
from aorta.traces.sources import open_source
from tests.larger_data import TRACES, needs_data

pytestmark = needs_data(TRACES)


def load(*names):
    sources = [open_source(TRACES / name) for name in names]
    return [source.read(rank) for source in sources for rank in source.ranks]


@pytest.fixture(scope="module")
def dlrm():
    return load("v100_dlrm_8ranks_kineto.tar.gz")


@pytest.fixture(scope="module")
def h200():
    return load(*(f"h200_fsdp4_rank{rank}.json.gz" for rank in range(4)))


@pytest.mark.heavy
def test_dlrm_ends_agree_and_starts_do_not(dlrm):
    """Ends within 1 to 7 µs, starts up to 7.6 ms apart, the shortest take 7 to 86 µs."""
    calls = [rank_calls(trace) for trace in dlrm]
    ends = np.stack([one.end_ns for one in calls])
    starts = np.stack([one.start_ns for one in calls])
    assert ((np.ptp(ends, axis=0) >= 1_000) & (np.ptp(ends, axis=0) <= 7_000)).all()
    assert np.ptp(starts, axis=0).max() == pytest.approx(7.624e6, abs=500)
    shortest = (ends - starts).min(axis=0) / 1000
    assert (shortest.min(), shortest.max()) == (7, 86)


def test_dlrm_who_waits_for_whom(dlrm):
    """Clocks of one machine: left alone, residual below 7 µs. Rank 7 is last at collectives 0 to 4, rank 5
    at 5 and 6, rank 4 at 7; more than nine tenths of the exposed communication are waiting."""
    calls = [rank_calls(trace) for trace in dlrm]
    view = match(calls)
    assert view.num_matched == [8] * 8
    assert not view.clock.offset_ns.any()
    assert 1 < view.clock.residual_us < 7
    for waits in view.waits:
        assert waits.late_rank.tolist() == [7, 7, 7, 7, 7, 5, 5, 4]
        assert (waits.transfer_ms < 0.088).all()
    exposed = [5.537, 11.056, 3.217, 9.450, 6.550, 6.211, 3.289, 1.580]
    assert [exposed_ms(one) for one in calls] == pytest.approx(exposed, abs=0.00051)
    waiting = sum(waiting_ms(one, waits) for one, waits in zip(calls, view.waits, strict=True)) / sum(exposed)
    assert waiting > 0.95


def waiting_ms(one, waits):
    return exposed_wait_ms(one, waits, np.array([[one.start_ns.min(), one.end_ns.max()]]))[0]


def exposed_ms(one):
    return np.ptp(one.exposed_ns, axis=1).sum() / 1e6


def match(calls):
    return match_ranks(range(len(calls)), calls)


def test_dlrm_with_clocks_that_are_set_apart(dlrm):
    """The same with every rank's clock moved by hours: only the ends can tell."""
    calls = [rank_calls(trace) for trace in dlrm]
    for rank, one in enumerate(calls):
        one.start_ns = one.start_ns + rank * 3_600_000_000_000
        one.end_ns = one.end_ns + rank * 3_600_000_000_000
    view = match(calls)
    assert view.waits[0].late_rank.tolist()[:4] == [7, 7, 7, 7]
    assert view.clock.offset_ns == pytest.approx([-3.6e12 * rank for rank in range(8)], abs=7_000)


@pytest.mark.heavy
def test_h200_collectives_of_one_size_transfer_alike(h200):
    """Without their waits the all-gathers of one layer last the same on all ranks and at all times; with
    them they last up to twice as long. Only large collectives tie the clocks."""
    calls = [rank_calls(trace) for trace in h200]
    view = match(calls)
    assert view.num_matched == [28] * 4
    assert "ends of larger ones are used" in view.notes[0]
    assert view.clock.residual_us < 50
    at = np.flatnonzero(calls[0].of_kinds(lambda kind: kind[1] == 436224000))
    # Every second step begins with one that runs beside others and is slower.
    transfer = np.stack([waits.transfer_ms[at] for waits in view.waits])
    duration = np.stack([(one.end_ns[at] - one.start_ns[at]) / 1e6 for one in calls])
    assert np.ptp(np.median(transfer, axis=1)) < 0.03
    assert np.median(transfer) == pytest.approx(1.2, abs=0.05)
    assert duration.max() > 1.5 * np.median(transfer)


def test_h200_exposed_is_transfer_for_the_most_part(h200):
    calls = [rank_calls(trace) for trace in h200]
    view = match(calls)
    for one, waits in zip(calls, view.waits, strict=True):
        assert waiting_ms(one, waits) < 0.1 * exposed_ms(one)
    late = {
        rank for rank, waits in zip(view.ranks, view.waits, strict=True) if (waits.late_rank == rank).any()
    }
    assert late == {1, 2}


def without(calls, gone, offset_ns=0):
    """The same rank lacking some collectives, on a clock that is ahead."""
    kept = [i for i in range(len(calls)) if i not in gone]
    return replace(
        calls,
        kind=calls.kind[kept],
        group=calls.group[kept],
        start_ns=calls.start_ns[kept] + offset_ns,
        end_ns=calls.end_ns[kept] + offset_ns,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("offset_ns", [0, 2_000_000, 3_600_000_000_000])
def test_h200_one_collective_missing_on_one_rank_leaves_the_waits_of_the_others(h200, offset_ns):
    calls = [rank_calls(trace) for trace in h200]
    whole = match(calls)
    for gone in range(28):
        left = [i for i in range(28) if i != gone]
        view = match([calls[0], without(calls[1], {gone}, offset_ns), *calls[2:]])
        assert view.num_matched == [27] * 4
        assert view.num_left == [1, 0, 1, 1]
        assert view.clock.offset_ns[1] == pytest.approx(-offset_ns, abs=50_000)
        assert view.clock.residual_us < 50
        assert np.isnan(view.waits[0].wait_ms[gone])
        assert view.waits[0].wait_ms[left] == pytest.approx(whole.waits[0].wait_ms[left], abs=0.05)


@pytest.mark.parametrize("offset_ns", [0, 2_000_000, 3_600_000_000_000])
def test_h200_a_rank_that_recorded_one_of_the_two_steps(h200, offset_ns):
    calls = [rank_calls(trace) for trace in h200]
    for step in (set(range(14)), set(range(14, 28))):
        view = match([calls[0], without(calls[1], step, offset_ns), *calls[2:]])
        assert set(np.flatnonzero(np.isnan(view.waits[0].wait_ms)).tolist()) == step
        assert view.clock.offset_ns[1] == pytest.approx(-offset_ns, abs=50_000)
