"""Pieces of work timed on threads, and what is concluded from pieces, by hand."""

import time
from collections.abc import Iterator

import pytest

from aorta.device.streams import ThreadStreams, anchor
from aorta.queues.catalogue import SYNC_MODES, SyncMode
from aorta.queues.harness.iterate import run_iterations
from aorta.queues.harness.pieces import PieceRecorder, Window, concurrency
from aorta.queues.workload import Piece


@pytest.fixture
def streams() -> Iterator[ThreadStreams]:
    made = ThreadStreams(2)
    yield made
    made.close()


def nap(ms: float) -> None:
    time.sleep(ms / 1e3)


def windowed(streams: ThreadStreams, mode: SyncMode, alone: bool = False) -> Window:
    """Two iterations of two naps of 5 ms on each of two streams."""
    recorder = PieceRecorder(streams)

    def iteration(index: int) -> None:
        for _ in range(2):
            for stream in range(2):
                recorder.span(stream, "nap", lambda: nap(5))

    recorder.start("alone" if alone else "iteration", alone)
    run_iterations(streams, iteration, range(2), mode, recorder)
    return recorder.stop()


@pytest.mark.parametrize("mode", SYNC_MODES)
def test_pieces_lie_where_they_ran(streams: ThreadStreams, mode: SyncMode) -> None:
    window = windowed(streams, mode)
    assert len(window.pieces) == 8
    assert all(piece.duration_ms >= 5 for piece in window.pieces)
    for stream in range(2):
        mine = [p for p in window.pieces if p.stream == stream]
        at_ms = [
            (window.fork_ms[p.iteration] + p.start_ms, window.fork_ms[p.iteration] + p.end_ms) for p in mine
        ]
        assert all(later[0] >= earlier[1] for earlier, later in zip(at_ms, at_ms[1:], strict=False))
    assert all(piece.start_delay_ms > -0.001 for piece in window.pieces)  # no piece starts before it is given


def test_a_piece_that_queues_behind_another_starts_late(streams: ThreadStreams) -> None:
    window = windowed(streams, "per_iteration")
    second = [piece for piece in window.pieces if piece.iteration == 0][2:]
    assert all(piece.start_delay_ms >= 4 for piece in second)


def test_alone_no_two_pieces_overlap(streams: ThreadStreams) -> None:
    window = windowed(streams, "per_iteration", alone=True)
    for iteration in range(2):
        spans = sorted((p.start_ms, p.end_ms) for p in window.pieces if p.iteration == iteration)
        assert all(later[0] >= earlier[1] for earlier, later in zip(spans, spans[1:], strict=False))
    assert {piece.leg for piece in window.pieces} == {"alone"}


def test_outside_a_window_a_span_only_submits(streams: ThreadStreams) -> None:
    recorder, done = PieceRecorder(streams), []
    recorder.span(0, "nap", lambda: done.append(1))
    streams.synchronize()
    assert done == [1]
    assert recorder.stop() == Window([], {})


def test_the_anchor_of_threads_is_exact(streams: ThreadStreams) -> None:
    before_ns = time.perf_counter_ns()
    met = anchor(streams)
    assert before_ns <= met.host_ns <= time.perf_counter_ns()
    assert met.error_ns == 0


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
    assert found.slowdown == {"gemm": pytest.approx(4 / 3)}
    assert found.placement_bound == pytest.approx(2.0)
    assert found.idle_share == 0
    assert found.comm_ms_each == []


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
    assert (found.comm_ms_each, found.hidden_ms_each) == ([5], [2.5])


def test_idle_share_counts_the_gap_between_iterations() -> None:
    """[0, 2) and, forked at 3, [3, 5): 1 of 5 ms without a piece."""
    pieces = [piece(0, "a", 0, 2), piece(0, "a", 0, 2, iteration=1)]
    found = concurrency(Window(pieces, {0: 0.0, 1: 3.0}), Window([], {}))
    assert found is not None
    assert found.idle_share == pytest.approx(0.2)
    assert found.iterations == 2


def test_no_pieces_is_not_zero_concurrency() -> None:
    assert concurrency(Window([], {}), Window([], {})) is None


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
