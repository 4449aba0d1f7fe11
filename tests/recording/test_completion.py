"""When asynchronous calls of the host end, seen by looking."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from aorta.device.marks import HostClock
from aorta.recording.calls import CollectiveCall, Group, RecordedStep
from aorta.recording.interception.switch import Interception
from aorta.recording.journal import Journal
from aorta.recording.observers import completion
from aorta.recording.observers.completion import CompletionWatch, look_at
from aorta.recording.observers.cpu import CpuObserver


def until(holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        if holds():
            return
        threading.Event().wait(0.005)
    pytest.fail("not within 20 s")


class WorkFuture:
    """Of a work that ends when the test says so. Nobody may be called when it does."""

    def __init__(self, is_done: bool = False) -> None:
        self.is_done = is_done

    def done(self) -> bool:
        return self.is_done


class HostTime:
    """A host clock that goes on by one nanosecond each time it is read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += 1
        return self.now_ns


def launched_call(future: WorkFuture, launched_ns: int = 1) -> CollectiveCall:
    call = CollectiveCall(Group("0", "default", [0, 1], "gloo"), "all_reduce", 4, "float32", True)
    call.launched_ns, call.future = launched_ns, future
    return call


@pytest.fixture
def host_time(monkeypatch):
    host_time = HostTime()
    monkeypatch.setattr(completion, "time", host_time)
    return host_time


@pytest.fixture
def alone(monkeypatch):
    """No thread looks."""
    monkeypatch.setattr(CompletionWatch, "_start", lambda self: None)


def test_an_end_lies_between_two_looks(host_time, alone):
    future = WorkFuture()
    call = launched_call(future)
    watch = CompletionWatch()
    watch.add(call)
    host_time.now_ns = 1000
    watch.look()
    assert call.end is None
    host_time.now_ns = 3000
    future.is_done = True
    watch.look()
    assert 1000 < call.end.host_ns < 3002
    assert call.end.host_ns == pytest.approx(2000, abs=2)
    assert call.future is None


def test_a_call_that_ends_at_once_ends_at_its_launch(host_time, alone):
    host_time.now_ns = 500
    call = launched_call(WorkFuture(is_done=True), launched_ns=499)
    watch = CompletionWatch()
    watch.add(call)
    assert call.end.host_ns in (499, 500, 501)
    assert watch.look() is None


def test_a_known_end_stays(host_time, alone):
    call = launched_call(WorkFuture(is_done=True))
    call.end = HostClock().mark()
    known = call.end
    look_at(call)
    assert call.end is known
    assert call.future is None


def test_the_youngest_call_says_how_soon_to_look_again(host_time, alone):
    watch = CompletionWatch()
    for launched_ns in (5, 9, 7):
        watch.add(launched_call(WorkFuture(), launched_ns))
    assert watch.look() == 9


def test_a_loop_that_never_waits_keeps_no_futures(host_time, alone):
    watch = CompletionWatch()
    calls = []
    for _ in range(10 * completion.MANY_CALLS):
        future = WorkFuture()
        calls.append(launched_call(future))
        watch.add(calls[-1])
        future.is_done = True
    assert sum(call.future is not None for call in calls) <= completion.MANY_CALLS
    assert len(watch._running) <= completion.MANY_CALLS


def test_a_call_that_nobody_waits_for_ends(monkeypatch):
    """Also after the thread that looks has gone to sleep, and after it has ended."""
    monkeypatch.setattr(completion, "AWAKE_S", 0.0)
    monkeypatch.setattr(completion, "ASLEEP_S", 0.01)
    watch = CompletionWatch()
    for _ in range(3):
        future = WorkFuture()
        call = launched_call(future)
        watch.add(call)
        future.is_done = True
        until(lambda call=call: call.end is not None)
        until(lambda: watch._thread is None)


def test_the_thread_sleeps_and_wakes(monkeypatch):
    monkeypatch.setattr(completion, "AWAKE_S", 0.0)
    watch = CompletionWatch()
    for _ in range(3):
        future = WorkFuture()
        call = launched_call(future)
        watch.add(call)
        future.is_done = True
        until(lambda call=call: call.end is not None)
        until(lambda: not watch._wake.is_set())


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    journal = Journal()
    journal.current = RecordedStep(0, 0, 0, None)
    interception = Interception({"CPU": CpuObserver(journal, HostClock())})
    interception.install()
    yield journal
    interception.uninstall()
    dist.destroy_process_group()


def test_nobody_is_called_by_the_thread_that_ends_a_work(gloo, monkeypatch):
    called = []
    for name in ("add_done_callback", "then"):
        monkeypatch.setattr(torch._C.Future, name, lambda *_: called.append(1))
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(50)]
    for work in works[::2]:
        work.wait()
    until(lambda: all(call.end is not None for call in gloo.current.calls))
    assert called == []
    assert all(call.future is None for call in gloo.current.calls)
    assert all(call.launched_ns <= call.end.host_ns for call in gloo.current.calls)


def test_a_wait_ends_what_it_waits_for(gloo):
    work = dist.all_reduce(torch.ones(8), async_op=True)
    work.wait()
    call, stall = gloo.current.calls[0], gloo.current.stalls[0]
    assert call.end.host_ns <= stall.end.host_ns
    assert call.waited
