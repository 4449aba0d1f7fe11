"""Fork, join, and what the three sync modes mean."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from aorta.device.streams import ThreadStreams
from aorta.queues.catalogue import SYNC_MODES, SyncMode
from aorta.queues.harness.iterate import Timed, run_iterations
from aorta.queues.harness.pieces import PieceRecorder

PATIENCE_S = 20.0


@pytest.fixture
def streams() -> Iterator[ThreadStreams]:
    made = ThreadStreams(2)
    yield made
    made.close()


def run(streams: ThreadStreams, work: Callable[[int], None], num: int, mode: SyncMode) -> Timed:
    return run_iterations(streams, work, range(num), mode, PieceRecorder(streams))


def sleeper(streams: ThreadStreams, order: list[tuple[int, int, str]], ms: tuple[float, float]):
    """Each stream naps for its own time in every iteration, and writes down when."""

    def nap(index: int, stream: int) -> None:
        order.append((index, stream, "start"))
        time.sleep(ms[stream] / 1e3)
        order.append((index, stream, "end"))

    def iteration(index: int) -> None:
        for stream in range(2):
            streams.submit(stream, lambda stream=stream: nap(index, stream))

    return iteration


@pytest.mark.parametrize("mode", ["per_iteration", "end_only"])
def test_no_iteration_starts_before_all_streams_have_joined_the_one_before(
    streams: ThreadStreams, mode: SyncMode
) -> None:
    order: list[tuple[int, int, str]] = []
    run(streams, sleeper(streams, order, (1, 4)), 4, mode)
    for index in range(1, 4):
        first_start = min(order.index((index, stream, "start")) for stream in range(2))
        assert all(order.index((index - 1, stream, "end")) < first_start for stream in range(2))


def test_without_joins_a_fast_stream_runs_ahead(streams: ThreadStreams) -> None:
    order: list[tuple[int, int, str]] = []
    run(streams, sleeper(streams, order, (0.1, 10)), 5, "none")
    assert order.index((4, 0, "end")) < order.index((1, 1, "end"))


@pytest.mark.parametrize("mode", SYNC_MODES)
def test_everything_is_done_and_counted(streams: ThreadStreams, mode: SyncMode) -> None:
    order: list[tuple[int, int, str]] = []
    timed = run(streams, sleeper(streams, order, (1, 3)), 6, mode)
    assert len(order) == 24
    assert len(timed.iteration_ms) == len(timed.enqueue_ms) == 6
    if mode != "none":  # without joins a stamp may come late and the next in time: their sum holds, below
        assert all(ms >= 2.9 for ms in timed.iteration_ms[1:])  # the slow stream's nap
    assert timed.device_ms >= 6 * 3
    assert timed.device_ms <= timed.wall_ms
    assert sum(timed.iteration_ms) == pytest.approx(timed.device_ms, rel=0.5)


def test_without_joins_iterations_add_up_to_the_whole(streams: ThreadStreams) -> None:
    timed = run(streams, sleeper(streams, [], (1, 3)), 6, "none")
    assert sum(timed.iteration_ms) == pytest.approx(timed.device_ms)


@pytest.mark.parametrize("mode", ["end_only", "none"])
def test_the_host_does_not_wait_before_the_end(streams: ThreadStreams, mode: SyncMode) -> None:
    """All iterations are submitted while the first one is still held up."""
    submitted, gate = threading.Event(), threading.Event()

    def iteration(index: int) -> None:
        streams.submit(0, lambda: gate.wait(PATIENCE_S))
        if index == 4:
            submitted.set()

    def open_when_submitted() -> None:
        submitted.wait(PATIENCE_S)
        gate.set()

    opener = threading.Thread(target=open_when_submitted)
    opener.start()
    timed = run(streams, iteration, 5, mode)
    opener.join()
    assert gate.is_set()
    assert timed.caught_up == [False] * 4
    assert not timed.launch_bound


def test_per_iteration_waits_for_each(streams: ThreadStreams) -> None:
    done: list[int] = []

    def iteration(index: int) -> None:
        assert done == list(range(index))
        streams.submit(1, lambda: (time.sleep(0.002), done.append(index)))

    run(streams, iteration, 4, "per_iteration")
    assert done == [0, 1, 2, 3]


def test_a_host_that_is_slower_than_the_device_is_named(streams: ThreadStreams) -> None:
    def iteration(index: int) -> None:
        time.sleep(0.05)
        streams.submit(0, lambda: None)

    for mode in SYNC_MODES:
        timed = run(streams, iteration, 4, mode)
        assert timed.launch_bound, mode
        assert min(timed.enqueue_ms) >= 50


def test_a_busy_device_is_not_launch_bound(streams: ThreadStreams) -> None:
    timed = run(streams, sleeper(streams, [], (15, 15)), 3, "per_iteration")
    assert not timed.launch_bound
    assert timed.iteration_ms[0] >= 15


@pytest.mark.parametrize("mode", SYNC_MODES)
def test_what_a_stream_raises_comes_out(streams: ThreadStreams, mode: SyncMode) -> None:
    def fail() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run(streams, lambda index: streams.submit(1, fail), 2, mode)
