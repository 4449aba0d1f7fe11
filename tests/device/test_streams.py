"""Streams of threads keep the rules of a device's streams; what a device's need is found."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aorta.device import streams as module
from aorta.device.backend import use
from aorta.device.cuda import CudaBackend, loaded_function
from aorta.device.streams import MAIN, DeviceStreams, ThreadStreams, kept_streams, make_streams
from tests.device.fake_device import FakeBackend

PATIENCE_S = 20.0


@pytest.fixture
def streams() -> Iterator[ThreadStreams]:
    made = ThreadStreams(3)
    yield made
    made.close()


class Gate:
    """Work that lasts until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def test_work_of_a_stream_runs_in_order(streams: ThreadStreams) -> None:
    done: list[int] = []
    for number in range(50):
        streams.submit(0, lambda number=number: done.append(number))
    streams.synchronize()
    assert done == list(range(50))


def test_streams_do_not_wait_for_each_other(streams: ThreadStreams) -> None:
    gate, free = Gate(), threading.Event()
    streams.submit(0, gate)
    streams.submit(1, free.set)
    assert free.wait(PATIENCE_S)
    gate.open()
    streams.synchronize()


def test_an_event_holds_what_the_stream_held_when_it_was_recorded(streams: ThreadStreams) -> None:
    """Later work of the recorded stream does not hold the waiting stream back."""
    later, passed = Gate(), threading.Event()
    event = streams.record(0)
    streams.submit(0, later)
    streams.wait(1, event)
    streams.submit(1, passed.set)
    assert passed.wait(PATIENCE_S)
    later.open()
    streams.synchronize()


def test_a_wait_holds_later_work_back_and_not_the_host(streams: ThreadStreams) -> None:
    gate, order = Gate(), []
    streams.submit(0, gate)
    streams.submit(0, lambda: order.append("first"))
    streams.wait(1, streams.record(0))
    streams.submit(1, lambda: order.append("second"))
    assert gate.reached.wait(PATIENCE_S)
    assert order == []
    gate.open()
    streams.synchronize()
    assert order == ["first", "second"]


def test_waiting_twice_for_one_event_is_waiting_once(streams: ThreadStreams) -> None:
    event = streams.record(0)
    streams.wait(1, event)
    streams.wait(2, event)
    streams.wait(1, event)
    streams.synchronize()
    assert event.query()


def test_an_event_is_passed_only_when_its_stream_came_to_it(streams: ThreadStreams) -> None:
    gate = Gate()
    streams.submit(0, gate)
    event = streams.record(0)
    assert gate.reached.wait(PATIENCE_S)
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()


def test_main_is_a_stream_of_its_own(streams: ThreadStreams) -> None:
    gate, passed = Gate(), threading.Event()
    streams.submit(MAIN, gate)
    streams.submit(0, passed.set)
    assert passed.wait(PATIENCE_S)
    gate.open()
    streams.synchronize()
    assert len(streams) == 3


def test_elapsed_time_is_that_between_the_events(streams: ThreadStreams) -> None:
    start = streams.record(0, timing=True)
    gate = Gate()
    streams.submit(0, gate)
    end = streams.record(0, timing=True)
    assert gate.reached.wait(PATIENCE_S)
    threading.Timer(0.02, gate.open).start()
    streams.synchronize()
    assert streams.elapsed_ms(start, end) >= 20
    assert streams.elapsed_ms(end, start) == -streams.elapsed_ms(start, end)


def test_what_fails_on_a_thread_is_raised_by_synchronize_once(streams: ThreadStreams) -> None:
    def fail() -> None:
        raise ValueError("planted")

    done: list[str] = []
    streams.submit(1, fail)
    streams.submit(1, lambda: done.append("went on"))
    with pytest.raises(ValueError, match="planted"):
        streams.synchronize()
    streams.synchronize()
    assert done == ["went on"]


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    made = make_streams(4, torch.device("cpu"))
    assert threading.active_count() == before + 5
    made.close()
    assert threading.active_count() == before


def test_a_function_of_a_library_loaded_for_another_alone_is_found() -> None:
    """libffi is loaded as a private need of ctypes, as a wheel's libcudart is one of torch."""
    if "/libffi" not in Path("/proc/self/maps").read_text():
        pytest.skip("needs a Python whose ctypes loads libffi as a shared library")
    found = loaded_function("ffi_prep_cif", "libffi")
    assert found is not None
    assert ctypes.cast(found, ctypes.c_void_p).value


def test_a_function_of_a_library_that_is_not_loaded_is_none() -> None:
    assert loaded_function("cudaStreamThatNoRuntimeHas", "libnotthere") is None


@pytest.mark.gpu
def test_more_streams_than_the_pool_are_all_different() -> None:
    made = make_streams(40, torch.device("cuda", 0))
    handles = {made.raw(stream).cuda_stream for stream in range(40)}  # type: ignore[attr-defined]
    assert len(handles) == 40
    total = torch.zeros(40, device="cuda")
    torch.cuda.synchronize()
    for stream in range(40):
        made.submit(stream, lambda stream=stream: total[stream].add_(stream))
    made.synchronize()
    assert total.tolist() == list(range(40))


def test_streams_of_another_device_need_its_backend_alone() -> None:
    fake = FakeBackend()
    before = use(fake)
    try:
        streams = DeviceStreams(2, fake.device(0))
        start = streams.record(MAIN, timing=True)
        streams.submit(0, lambda: fake.run(5.0))
        streams.wait(1, streams.record(0))
        streams.submit(1, lambda: fake.run(2.0))
        end = streams.record(1, timing=True)
        assert streams.elapsed_ms(start, end) == 7.0
        assert not end.query()
        streams.synchronize()
        assert end.query()
    finally:
        use(before)


class FromPool:
    """Stands in for torch.cuda.Stream: 32 handles in turn, whoever asks."""

    asked = 0

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.cuda_stream = 1000 * priority + FromPool.asked % 32
        FromPool.asked += 1


def test_kept_streams_are_the_same_for_every_caller_and_leave_some_of_the_pool(monkeypatch):
    device = torch.device("cuda", 0)
    current = FromPool(device)
    monkeypatch.setattr(torch.cuda, "Stream", FromPool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(CudaBackend, "unpooled_stream", lambda self, device, priority: FromRuntime())
    monkeypatch.setattr(module, "_pooled", {})

    def handles(num: int) -> list[int]:
        return [stream.cuda_stream for stream in kept_streams(num, device).streams]

    first = handles(16)
    more = handles(20)
    assert more[:16] == first
    assert len(set(more)) == 20
    assert current.cuda_stream not in more
    many = handles(40)
    assert len(set(many)) == 40
    assert sum(handle >= FromRuntime.first for handle in many) == 40 - 24


class FromRuntime:
    first = 10_000
    made = 0

    def __init__(self) -> None:
        FromRuntime.made += 1
        self.cuda_stream = FromRuntime.first + FromRuntime.made
