import pytest

from aorta.resolve.calibration import calibrate
from aorta.timeline.types import OverlapRecord, StreamOverlap


def events(comm: float, compute: float, hidden: float, starved: float = 0.0) -> OverlapRecord:
    """Half of the starved time lies beside communication."""
    return overlap(comm, compute, hidden, None, starved)


def kernels(comm: float, compute: float, hidden: float) -> OverlapRecord:
    same = StreamOverlap(compute_ms=compute, hidden_ms=hidden, exposed_ms=comm - hidden, idle_ms=0.0)
    return overlap(comm, compute, hidden, same, None)


def overlap(
    comm: float, compute: float, hidden: float, stream: StreamOverlap | None, starved: float | None
) -> OverlapRecord:
    return OverlapRecord(
        comm_ms=comm,
        compute_ms=compute,
        hidden_ms=hidden,
        exposed_ms=comm - hidden,
        idle_ms=100 - compute - (comm - hidden),
        exposed_copy_ms=None,
        overlap_ratio=hidden / comm,
        hidden_per_compute=hidden / compute,
        compute_allreduce_ms=0.0,
        compute_reducescatter_ms=0.0,
        hidden_by_op={},
        exposed_by_op={},
        compute_stream=stream,
        starved_bound_ms=starved,
        starved_hidden_bound_ms=None if starved is None else min(starved / 2, hidden),
    )


def test_correction_is_the_median_ratio_of_the_window():
    window = [
        (1, events(20, 80, 10), kernels(19, 76, 9)),
        (2, events(20, 80, 10), kernels(18, 72, 8)),
        (3, events(20, 80, 10), kernels(10, 40, 1)),
    ]
    calibration = calibrate(window)
    assert calibration is not None
    assert calibration.steps == [1, 2, 3]
    corrected = calibration.apply(events(40, 60, 20))
    assert corrected is not None
    assert corrected.comm_ms == pytest.approx(36)
    assert corrected.hidden_ms == pytest.approx(16)
    assert corrected.exposed_ms == pytest.approx(20)
    assert corrected.compute_ms == pytest.approx(54)
    # 40 + 60 - 20 + idle 20 make the step of 100; so must the corrected parts.
    assert corrected.compute_ms + corrected.exposed_ms + corrected.idle_ms == pytest.approx(100)


def test_a_step_that_starves_unlike_the_window_is_left_as_it_is():
    calibration = calibrate([(1, events(20, 80, 10, starved=0), kernels(19, 76, 9))])
    assert calibration is not None
    assert calibration.apply(events(20, 80, 10, starved=40)) is None


def test_starved_time_gets_a_share_of_its_own_where_the_steps_differ():
    # Compute: 0.9 of what is not starved, 0.2 of what is. Hidden: 0.8 and 0.1.
    window = [
        (1, events(20, 80, 10, starved=0), kernels(20, 72, 8)),
        (1, events(20, 80, 10, starved=16), kernels(20, 0.9 * 64 + 0.2 * 16, 0.8 * 2 + 0.1 * 8)),
    ]
    calibration = calibrate(window)
    assert calibration is not None
    corrected = calibration.apply(events(20, 90, 12, starved=10))
    assert corrected is not None
    assert corrected.compute_ms == pytest.approx(0.9 * 80 + 0.2 * 10)
    assert corrected.hidden_ms == pytest.approx(0.8 * 7 + 0.1 * 5)


def test_no_kernel_steps_no_calibration():
    assert calibrate([]) is None
