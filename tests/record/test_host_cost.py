"""Cost of a recorded collective on its host, in counts: times belong to benchmarks/cost.py."""

import gc
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from aorta.device.marks import HostClock
from aorta.record.cpu_observer import CpuObserver
from aorta.record.interception.switch import Interception
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group, Mark, RecordedStep, Stall, StreamWait

CALLS = 100


@pytest.fixture
def group():
    """Two ranks of which the other answers at once, with nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def journal(group):
    journal = Journal()
    interception = Interception({"CPU": CpuObserver(journal, HostClock())})
    interception.install()
    yield journal
    interception.uninstall()


def collective(is_async: bool) -> Callable[[], None]:
    tensor = torch.ones(4)

    def call() -> None:
        work = dist.all_reduce(tensor, async_op=is_async)
        if work is not None:
            work.wait()

    return call


def frames(call: Callable[[], None]) -> list[str]:
    """The Python functions that one call enters, after it has been made a few times."""
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(frame.f_code.co_name)

    for _ in range(3):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize(("is_async", "at_most"), [(False, 16), (True, 20)])
def test_recording_a_collective_enters_few_python_functions(journal, is_async, at_most):
    """In a loop whose kernels have cleared the caches each of them is fetched anew."""
    journal.current = RecordedStep(0, 0, 0, None)
    with_it = frames(collective(is_async))
    assert len(with_it) <= at_most + NUM_TORCHS_OWN, with_it
    assert len(journal.current.calls) == 4


NUM_TORCHS_OWN = 12
"""dist.all_reduce and what it calls, whoever watches."""


@pytest.mark.heavy
@pytest.mark.parametrize("is_async", [False, True])
def test_recording_leaves_nothing_for_the_garbage_collector(journal, is_async):
    """Neither garbage in cycles nor objects that it would look through until the step is written."""
    step = journal.current = RecordedStep(0, 0, 0, None)
    call = collective(is_async)
    for _ in range(3):
        call()
    gc.collect()
    gc.disable()
    try:
        tracked = len(gc.get_objects())
        for _ in range(CALLS):
            call()
        assert len(gc.get_objects()) - tracked < CALLS / 4
        assert gc.collect() < CALLS / 4
    finally:
        gc.enable()
    assert len(step.calls) == CALLS + 3


def test_what_is_noted_is_unknown_to_the_garbage_collector():
    mark = Mark(1)
    call = CollectiveCall(Group("0", "default", [0], "gloo"), "all_reduce", 4, "float32", is_async=False)
    for noted in (mark, call, Stall(mark, mark), StreamWait(mark, call)):
        assert not gc.is_tracked(noted)


def test_equal_calls_are_not_one_call():
    group = Group("0", "default", [0], "gloo")
    first, second = (CollectiveCall(group, "all_reduce", 4, "float32", is_async=False) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2
