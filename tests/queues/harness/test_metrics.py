"""Metrics of a point: what adds up over ranks, a rank's share, and overlap efficiency by hand."""

import msgspec
import numpy as np
import pytest

from aorta.account.results.schema import RankRun
from aorta.queues.harness.metrics import efficiency, metrics, overlap_metrics
from aorta.queues.harness.pieces import Window, concurrency
from aorta.queues.workload import Piece
from tests.queues.documents import rank_run
from tests.queues.sleep_workloads import Sleeps, plan

NONE = Window([], {})


def run(rank: int, comm_ms: float, gemm_ms: float) -> RankRun:
    """Both pieces start at 0: all of the shorter one is hidden."""
    pieces = [
        Piece("iteration", 0, 0, "comm", 0, 0, comm_ms),
        Piece("iteration", 0, 1, "gemm", 0, 0, gemm_ms),
    ]
    found = concurrency(Window(pieces, {0: 0.0}), NONE)
    return msgspec.structs.replace(rank_run([10.0, 12.0], rank), concurrency=found)


def test_communication_of_ranks_is_hidden_plus_exposed() -> None:
    """5 ms, 3 hidden, and 9 ms, 1 hidden: 7 = 2 + 5."""
    found = metrics(plan(Sleeps), [run(0, 5, 3), run(1, 9, 1)])
    assert [found[f"{name}_ms"].value for name in ("comm", "hidden", "exposed")] == [7, 2, 5]


def test_a_ranks_share_of_the_throughput() -> None:
    found = metrics(plan(Sleeps), [run(0, 5, 3), run(1, 9, 1)])
    total, share = found["units_per_s"], found["units_per_s_per_rank"]
    assert total.value == pytest.approx(2 * 10 * 2 / 0.022)  # ranks, units, iterations
    assert share.value == pytest.approx(total.value / 2)
    assert share.unit == "naps/s per rank"
    assert "units_per_s_per_rank" not in metrics(plan(Sleeps), [run(0, 5, 3)])


def noisy(ms: float, seed: int, num: int = 20) -> np.ndarray:
    return ms + np.random.default_rng(seed).normal(0, 0.01, num)


@pytest.mark.parametrize(
    ("together", "expected"),
    [
        pytest.param(8.0, 1.0, id="all-hidden"),
        pytest.param(10.0, 0.5, id="half"),
        pytest.param(12.0, 0.0, id="serial"),
        pytest.param(14.0, -0.5, id="overlap-loses"),
    ],
)
def test_efficiency(together: float, expected: float) -> None:
    """Compute 8, communication 4, serial 12 ms."""
    found = efficiency(noisy(together, 1), noisy(8, 2), noisy(4, 3), noisy(12, 4))
    eta = found["overlap_efficiency"]
    assert eta.value == pytest.approx(expected, abs=0.01)
    assert eta.interval is not None
    assert eta.interval.low is not None
    assert eta.interval.low <= expected + 0.01
    assert found["gained_ms"].value == pytest.approx(12 - together, abs=0.03)
    assert found["exposed_over_compute_ms"].value == pytest.approx(together - 8, abs=0.03)


def test_nothing_to_gain_is_null_with_a_reason() -> None:
    """Communication of 0.001 ms among noise of 0.01 ms."""
    found = efficiency(noisy(8, 1), noisy(8, 2), noisy(0.001, 3), noisy(8.001, 4))
    eta = found["overlap_efficiency"]
    assert eta.value is None
    assert "within noise" in (eta.reason or "")


def test_the_slowest_rank_of_each_round_counts() -> None:
    legs = [{"iteration": [1.0] * 8, "other": [5.0] * 8}, {"iteration": [3.0] * 8, "other": [2.0] * 8}]
    found = overlap_metrics(legs)
    assert found["leg_iteration_ms"].value == 3
    assert found["leg_other_ms"].value == 5
    assert "overlap_efficiency" not in found  # needs compute, comm and serial


def test_few_rounds_have_no_interval() -> None:
    found = efficiency(*(noisy(ms, int(ms), 4) for ms in (8, 8, 4, 12)))
    assert found["gained_ms"].interval is None
    assert found["gained_ms"].reason == "no interval: 4 rounds, 8 are needed"
