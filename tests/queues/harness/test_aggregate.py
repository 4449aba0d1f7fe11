"""A point of two ranks: what adds up, and what is a rank's share."""

import msgspec
import pytest

from aorta.queues.harness.metrics import metrics
from aorta.queues.harness.pieces import Window, concurrency
from aorta.queues.workload import Piece
from aorta.results.schema import RankRun
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
