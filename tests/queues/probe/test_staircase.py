"""The staircase against devices whose queues are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from aorta.queues.probe.staircase import (
    AGREES,
    SPIN_US,
    count_queues,
    predicted_spins,
    staircase,
    started_at_once,
)
from tests.queues.probe.simulator import SimulatedDevice

ORDERS = ["start", "barrier"]
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


@pytest.mark.heavy
@pytest.mark.parametrize("noise_us", [0.0, 4.0])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("queues", [1, 2, 4, 8, 32])
def test_the_planted_number_of_queues_is_found_twice(queues, order, noise_us):
    found = staircase(SimulatedDevice(64, queues, order, noise_us=noise_us))
    assert (found.queues, found.from_times, found.order) == (queues, queues, order)
    assert found.agrees
    assert found.even
    assert not found.at_least


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("queues", [16, 32])
def test_as_many_queues_as_streams_may_be_more(queues, order):
    found = staircase(SimulatedDevice(16, queues, order))
    assert found.queues == 16
    assert found.at_least
    assert found.order is None, "nobody shares a queue, so nothing shows what sharing means"


@pytest.mark.parametrize("order", ORDERS)
def test_unevenly_filled_queues_are_counted_and_named(order):
    """Streams 0 to 12 on queue 0, the other three on queues 1, 2, 3."""
    device = SimulatedDevice(16, 4, order, queue_of=lambda stream: max(0, stream - 12))
    found = staircase(device)
    assert found.queues == 4
    assert not found.even
    assert not found.agrees


def test_dispatching_one_kernel_after_the_other_does_not_hide_what_times_say():
    """An H200 takes 0.32 µs per kernel: the last of 64 streams starts 20 µs after the first."""
    found = staircase(SimulatedDevice(64, 8, dispatch_us=0.32, gap_us=0.0))
    assert (found.queues, found.from_times) == (8, 8)
    last = found.steps[-1]
    assert last.single_spins == pytest.approx(1 + 63 * 0.32 / SPIN_US)
    assert last.single_spins < 1.03
    assert found.worst_error < 0.03


def test_a_launch_bound_run_is_marked():
    assert not staircase(SimulatedDevice(4, 2, primed=False)).primed


@pytest.mark.heavy
def test_a_coarse_clock_does_not_change_the_count():
    assert staircase(SimulatedDevice(64, 8, tick_ns=1024.0, noise_us=3)).queues == 8


def test_predictions_are_those_worked_out_by_hand():
    # 9 streams on 4 queues: the fullest has 3. A1 | B1 A2 | B2 A3 | B3 with start order.
    assert predicted_spins(9, 4, "start") == (4.0, 1.0)
    assert predicted_spins(9, 4, "barrier") == (6.0, 3.0)
    assert predicted_spins(4, 4, "start") == (2.0, 1.0)


@pytest.mark.parametrize(
    ("start", "end", "at_once"),
    [
        pytest.param([0, 0, 0], [9, 9, 9], 3, id="together"),
        pytest.param([0, 9, 18], [9, 18, 27], 1, id="one-by-one"),
        pytest.param([0, 0, 9], [9, 9, 18], 2, id="two-then-one"),
        pytest.param([0, 4, 8], [9, 13, 17], 2, id="staggered"),
    ],
)
def test_kernels_that_start_at_once_are_known(start, end, at_once):
    assert started_at_once(np.array(start, dtype=float), np.array(end, dtype=float)) == at_once


def test_times_that_no_number_of_queues_explains_do_not_agree():
    found = staircase(SimulatedDevice(16, 4))
    slower = [type(step)(**{**_fields(step), "pair_spins": step.pair_spins * 2.5}) for step in found.steps]
    assert not count_queues(slower).even


def _fields(step):
    return {name: getattr(step, name) for name in step.__struct_fields__}


@pytest.mark.parametrize("run", ["third", "fourth"])
def test_kernels_of_an_h200_start_on_eight_queues(run):
    """Starts of two kernels per stream, in spins, as two runs on H200s recorded them."""
    recorded = json.loads((RESULTS / f"queue_truth_h200_{run}_run.json").read_text())
    for starts in map(np.array, recorded["staircase_start_spins"]):
        num_streams = len(starts) // 2
        assert started_at_once(starts[::2], starts + 1) == min(num_streams, 8)
        assert starts.max() + 1 == pytest.approx(predicted_spins(num_streams, 8, "start")[0], rel=AGREES)
