"""What is concluded from pieces, by hand."""

import numpy as np
import pytest

from aorta.queues.harness.pieces import Window, concurrency, most_at_once, summaries
from aorta.queues.workload import Piece
from aorta.timeline.intervals import intervals


def piece(
    stream: int, name: str, start: float, end: float, iteration: int = 0, submitted: float = 0.0
) -> Piece:
    return Piece("iteration", iteration, stream, name, submitted, start, end)


def test_two_streams_half_of_the_time() -> None:
    """[0, 4) and [2, 6): 8 ms of work in 6 ms; alone 3 ms each: a third slower, and 2 x at best."""
    together = Window([piece(0, "gemm", 0, 4), piece(1, "gemm", 2, 6)], {0: 0.0})
    alone = Window([piece(0, "gemm", 0, 3), piece(1, "gemm", 3, 6)], {0: 0.0})
    found = concurrency(together, alone)
    assert found is not None
    assert found.achieved == pytest.approx(8 / 6)
    assert found.most == 2
    assert found.slowdown == {"gemm": pytest.approx(4 / 3)}
    assert found.placement_bound == pytest.approx(2.0)
    assert found.alone_sum_ms == 6
    assert found.idle_share == 0
    assert found.comm_ms is found.hidden_ms is found.exposed_ms is None


def test_unequal_streams_bound_the_speed_up() -> None:
    """Alone 6, 2 and 1 ms on three streams: at best 9 ms in 6."""
    alone = Window([piece(0, "a", 0, 6), piece(1, "b", 6, 8), piece(2, "b", 8, 9)], {0: 0.0})
    found = concurrency(alone, alone)
    assert found is not None
    assert found.placement_bound == pytest.approx(1.5)
    assert found.achieved == 1


def test_communication_is_hidden_under_compute_of_other_streams() -> None:
    """comm [1, 5) and [4, 6), compute [0, 2) and [3, 4.5): 5 ms of communication, 2.5 hidden."""
    pieces = [
        piece(0, "comm all_reduce", 1, 5),
        piece(1, "comm all_gather", 4, 6),
        piece(2, "gemm", 0, 2),
        piece(2, "gemm", 3, 4.5),
    ]
    found = concurrency(Window(pieces, {0: 0.0}), Window([], {}))
    assert found is not None
    assert (found.comm_ms, found.hidden_ms, found.exposed_ms) == (5, 2.5, 2.5)
    assert found.alone_sum_ms is None


def test_idle_share_counts_the_gap_between_iterations() -> None:
    """[0, 2) and, forked at 3, [3, 5): 1 of 5 ms without a piece."""
    pieces = [piece(0, "a", 0, 2), piece(0, "a", 0, 2, iteration=1)]
    found = concurrency(Window(pieces, {0: 0.0, 1: 3.0}), Window([], {}))
    assert found is not None
    assert found.idle_share == pytest.approx(0.2)
    assert found.iterations == 2


def test_no_pieces_is_not_zero_concurrency() -> None:
    assert concurrency(Window([], {}), Window([], {})) is None


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([(0, 1), (1, 2)], 1, id="touching"),
        pytest.param([(0, 3), (1, 2), (1.5, 4)], 3, id="nested"),
        pytest.param([(0, 3), (1, 1), (2, 2)], 1, id="empty-spans-are-not-open"),
    ],
)
def test_most_at_once(spans: list[tuple[float, float]], expected: int) -> None:
    assert most_at_once(intervals(spans)) == expected


def test_most_at_once_agrees_with_counting_at_every_start() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        starts = rng.integers(0, 20, 12).astype(float)
        spans = np.stack([starts, starts + rng.integers(1, 6, 12)], axis=1)
        counted = max(int(((spans[:, 0] <= t) & (t < spans[:, 1])).sum()) for t in starts)
        assert most_at_once(spans) == counted


def test_summaries_group_by_leg_and_name() -> None:
    pieces = [piece(0, "tiny", 1, 2, submitted=0.5), piece(0, "tiny", 4, 7, submitted=1.0)]
    (found,) = summaries(pieces)
    assert (found.leg, found.name, found.num, found.duration_ms) == ("iteration", "tiny", 2, 2.0)
    assert found.start_delay_p50_us == pytest.approx(1750)  # of 500 and 3000 us


def test_without_joins_communication_hides_under_the_next_iteration() -> None:
    """One fork for both: comm of iteration 0 [2, 4) beside the GEMM of iteration 1 [2, 4)."""
    pieces = [
        piece(0, "gemm", 0, 2),
        piece(1, "comm all_reduce", 2, 4),
        piece(0, "gemm", 2, 4, iteration=1),
    ]
    found = concurrency(Window(pieces, {0: 0.0, 1: 0.0}), Window([], {}))
    assert found is not None
    assert found.hidden_ms_each == [2, 0]
    assert found.achieved == pytest.approx(6 / 4)
