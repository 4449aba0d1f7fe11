"""Pieces of work timed on threads."""

import time
from collections.abc import Iterator

import pytest

from aorta.device.streams import ThreadStreams, anchor
from aorta.queues.catalogue import SYNC_MODES, SyncMode
from aorta.queues.harness.iterate import run_iterations
from aorta.queues.harness.pieces import PieceRecorder, Window


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
