"""Priorities against devices whose rules are known."""

import numpy as np
import pytest

from aorta.queues.probe.machine import Outcome
from aorta.queues.probe.priority import FLOOD_CTA_US, FLOOD_WAVES, FLOODS, effect, small_delays_us
from tests.queues.probe.simulator import SimulatedDevice


def _device(priorities):
    return SimulatedDevice(len(priorities), len(priorities), priorities=priorities, resident_ctas=8)


def _blind_device(priorities):
    """Accepts priorities and ignores them."""
    return _device([0] * len(priorities))


def test_high_priority_waits_for_a_cta_and_equal_priority_for_whole_kernels():
    found = effect(_device, -5)
    assert found.levels == 6
    assert found.high.largest_us <= FLOOD_CTA_US
    assert found.equal.largest_us > (FLOOD_WAVES - 1) * FLOOD_CTA_US
    assert found.alone.largest_us < 5


def test_priorities_that_do_nothing_show_no_effect():
    found = effect(_blind_device, -5)
    assert found.high.p50_us == pytest.approx(found.equal.p50_us)


def test_only_small_kernels_that_meet_a_flood_are_counted():
    settle, late, floods = [0.0], [0.0, 0.0], [20.0 + 100 * i for i in range(2 * FLOODS)]
    small = [60.0, 5000.0, 5010.0]
    start = np.array([*settle, *late, *floods, *small])
    end = np.array([60.0, 20.0, 20.0, *[time + 100 for time in floods], *[time + 10 for time in small]])
    outcome = Outcome(start_us=start, end_us=end, primed=True)
    # The first is ready at 60 and the second at 70, when floods run until 1620; the third only at 5010.
    assert small_delays_us(outcome, True).tolist() == [0.0, 4930.0]


def test_one_priority_is_a_reason():
    found = effect(_device, 0)
    assert found.high is None
    assert "one priority" in found.reason
