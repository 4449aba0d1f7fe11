"""Scaling over streams: ratios by hand, the knee and how sure it is."""

import numpy as np
import pytest

from aorta.account.results.schema import Metric
from aorta.queues.harness.scaling import knee, knee_interval, scalings
from tests.queues.documents import point


def test_speed_up_and_efficiency_refer_to_the_fewest_streams() -> None:
    """1000, 1920 and 2000 units/s: speed-up 1.92 and 2, efficiency 0.96 and 0.5."""
    points = [point(4, 5.0, spread=0), point(1, 10.0, spread=0), point(2, 1e4 / 1920, spread=0)]
    (found,) = scalings(points)
    assert found.streams == [1, 2, 4]
    assert found.speedup == pytest.approx([1, 1.92, 2])
    assert found.efficiency == pytest.approx([1, 0.96, 0.5])
    assert found.knee == 2
    assert found.knee_interval == (2, 2)
    assert found.baseline_streams == 1


def test_the_baseline_of_a_workload_that_needs_more_streams_is_its_fewest() -> None:
    """Its pieces alone allow 3 over one stream with 4, and 4.5 with 8: 1.5 over the fewest."""
    points = [point(4, 10.0, spread=0), point(8, 5.0, spread=0)]
    for one, bound in zip(points, (3.0, 4.5), strict=True):
        one.metrics["placement_bound"] = Metric(value=bound, unit="x")
    (found,) = scalings(points)
    assert found.baseline_streams == 4
    assert found.efficiency == pytest.approx([1, 1])
    assert found.bound == pytest.approx([1, 1.5])


def test_configurations_do_not_mix_and_one_point_is_no_scaling() -> None:
    points = [point(1), point(2), point(1, options={"size": 2}), point(4, status="skipped")]
    assert [one.streams for one in scalings(points)] == [[1, 2]]


@pytest.mark.parametrize(
    ("throughput", "expected"),
    [
        pytest.param([1, 2, 4, 8], 8, id="grows"),
        pytest.param([10, 10, 10, 10], 1, id="flat"),
        pytest.param([5, 9.6, 10, 8], 2, id="falls-again"),
        pytest.param([5, 9.4, 10, 8], 4, id="just-below"),
    ],
)
def test_knee_is_the_fewest_streams_with_95_percent(throughput: list[float], expected: int) -> None:
    assert knee([1, 2, 4, 8], throughput) == expected


def test_an_unsure_knee_has_a_wide_interval() -> None:
    """9.5 of 10 is right at the limit: either side of it in many draws."""
    rng = np.random.default_rng(0)
    noise = [rng.normal(size=40) for _ in range(4)]
    means_ms = (20, 1000 / 95, 10, 10)
    series = [ms * (1 + 0.1 * (some - some.mean())) for ms, some in zip(means_ms, noise, strict=True)]
    throughput = [100 / one.mean() for one in series]
    interval, reason = knee_interval([1, 2, 4, 8], throughput, series)
    assert interval is not None
    assert interval[0] <= 2 < interval[1]
    assert reason is None


def test_few_iterations_give_no_interval() -> None:
    interval, reason = knee_interval([1, 2], [1, 2], [np.ones(5), np.ones(40)])
    assert interval is None
    assert reason == "5 iterations at a point, 8 are needed"
