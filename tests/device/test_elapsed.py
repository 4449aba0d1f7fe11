"""Distances of events: by the runtime where it can be trusted, by torch wherever not."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from aorta.device.event_clock import ElapsedReader, forget_runtime_error, runtime_elapsed
from aorta.device.marks import NotPassedError

NOT_READY, INVALID = 600, 400


def runtime(wrong_by: float = 0.0, fails_at: int | None = None, code: int = INVALID):
    """A function of the runtime's shape in which an event is its time in ms."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def elapsed(ms, start, end):
        if end == fails_at:
            return code
        ctypes.c_float.from_address(ms).value = end - start + wrong_by
        return 0

    return elapsed


def by_torch(start, end):
    by_torch.asked += 1
    return float(end.cuda_event - start.cuda_event)


def events(*times):
    return [SimpleNamespace(cuda_event=time) for time in times]


@pytest.fixture(autouse=True)
def _count():
    by_torch.asked = 0


def test_the_first_reading_is_made_both_ways_and_later_ones_by_the_runtime():
    reader = ElapsedReader(runtime(), by_torch)
    start, *rest = events(100, 103, 107)
    assert reader.distances_ms(start, rest) == [3.0, 7.0]
    assert by_torch.asked == 2
    assert reader.distances_ms(start, [*rest, start]) == [3.0, 7.0, 0.0]
    assert by_torch.asked == 2


def test_a_runtime_that_disagrees_is_never_asked_again():
    reader = ElapsedReader(runtime(wrong_by=0.5), by_torch)
    start, *rest = events(100, 103)
    assert [reader.distances_ms(start, rest) for _ in range(2)] == [[3.0], [3.0]]
    assert by_torch.asked == 2


def test_what_the_runtime_refuses_is_asked_of_torch():
    reader = ElapsedReader(runtime(fails_at=107), by_torch)
    start, *rest = events(100, 103, 107)
    for _ in range(2):
        assert reader.distances_ms(start, rest) == [3.0, 7.0]
    assert by_torch.asked == 4


def test_an_event_that_has_not_passed_is_named_and_nothing_else_is_asked():
    reader = ElapsedReader(runtime(fails_at=107, code=NOT_READY), by_torch)
    start, *rest = events(100, 103, 107)
    with pytest.raises(NotPassedError):
        reader.distances_ms(start, rest)
    assert by_torch.asked == 0
    assert reader.distances_ms(start, rest[:1]) == [3.0]


@pytest.mark.parametrize("times", [(), (5,)])
def test_without_a_runtime_torch_is_asked(times):
    reader = ElapsedReader(None, by_torch)
    assert reader.distances_ms(events(2)[0], events(*times)) == [float(time - 2) for time in times]


def test_the_runtime_is_found_where_torch_has_one():
    """Refuses an event that is none: the function is there and was called."""
    if torch.version.cuda is None and torch.version.hip is None:
        assert runtime_elapsed() is None
        return
    elapsed = runtime_elapsed()
    assert elapsed is not None
    ms = ctypes.c_float()
    assert elapsed(ctypes.addressof(ms), 0, 0) != 0
    forget_runtime_error()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_the_runtime_says_what_torch_says():
    from aorta.device.backend import accelerator

    clock = accelerator().clock(accelerator().current_device())
    for _ in range(2):
        marks = []
        for _ in range(5):
            marks.append(clock.mark())
            torch.ones(1 << 20, device="cuda").sum()
        torch.cuda.synchronize()
        assert clock.distances_ms(marks[0], marks) == [clock.distance_ms(marks[0], mark) for mark in marks]
        clock.recycle(marks)
    if torch.version.hip is None:
        assert clock._reader._elapsed is not None  # not given up for a difference


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_asking_too_early_leaves_no_error_for_the_next_kernel():
    from aorta.device.backend import accelerator

    clock = accelerator().clock(accelerator().current_device())
    for _ in range(2):
        start = clock.mark()
        torch.cuda._sleep(100_000_000)
        end = clock.mark()
        with pytest.raises(NotPassedError):
            clock.distances_ms(start, [start, end])
        assert torch.ones(8, device="cuda").sum().item() == 8
        assert clock.distances_ms(start, [end])[0] > 10
