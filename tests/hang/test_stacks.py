"""Stacks of the threads that are in a collective, and of launches."""

import os
import pickle
import threading
from types import FunctionType
from typing import Any

import pytest

from aorta.attach import hooks
from aorta.device.marks import HostClock
from aorta.hang.report import CallState, GroupState
from aorta.hang.show import LIBRARIES
from aorta.hang.standing import call_stacks, launch_stacks
from aorta.record import cpu_observer
from aorta.record.cpu_observer import CpuObserver
from aorta.record.event_observer import EventObserver
from aorta.record.interception.stalls import CaptureWatch
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group, Mark

OBSERVERS: list[Any] = [
    CpuObserver(Journal(), HostClock()),
    EventObserver(Journal(), dedicated=False, captures=CaptureWatch()),
]


@pytest.mark.parametrize("observer", OBSERVERS, ids=["cpu", "events"])
def test_every_function_that_launches_holds_the_call_by_the_name_that_stacks_are_read_by(
    observer: Any,
) -> None:
    functions = [value for value in vars(type(observer)).values() if isinstance(value, FunctionType)]
    launching = [function for function in functions if "launch" in function.__code__.co_varnames]
    assert {"observe", "coalescing_ended"} < {function.__name__ for function in launching}
    assert [f.__name__ for f in launching if "call" not in f.__code__.co_varnames] == []


@pytest.mark.parametrize("observer", OBSERVERS, ids=["cpu", "events"])
def test_the_thread_that_is_in_a_collective_is_shown_with_it(observer: Any) -> None:
    call = CollectiveCall(Group("0", "default", [0, 1], "gloo"), "all_reduce", 64, "float32", is_async=False)
    call.seq, call.end = 5, Mark(1)
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait()

    def train_one_step() -> None:
        observer.wait(call, wait)

    thread = threading.Thread(target=train_one_step, daemon=True)
    thread.start()
    inside.wait()
    try:
        (stack,) = call_stacks()
    finally:
        leave.set()
        thread.join()
    assert (stack.group, stack.op, stack.seq, stack.thread) == (
        "0",
        "all_reduce",
        5,
        f"thread {thread.ident}",
    )
    assert any(frame.startswith("train_one_step (") for frame in stack.frames)
    assert call_stacks() == []


def entry(retired: bool, op: str, line: int) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "profiling_name": f"gloo:{op}",
        "state": "scheduled",
        "retired": retired,
        "frames": [{"name": "step", "filename": "train.py", "line": line}],
    }


def group() -> GroupState:
    calls = [
        CallState(seq=seq, op="all_reduce", bytes=4, dtype="float32", step=seq, started=True,
                  finished=seq < 3, age_s=1.0)
        for seq in range(5)
    ]  # fmt: skip
    return GroupState(key="0", name="default", ranks=[0, 1], backend="gloo", num_seen=5, calls=calls)


def test_the_flight_recorder_tells_where_the_first_unfinished_call_was_launched() -> None:
    record = pickle.dumps({"entries": [entry(True, "all_reduce", 1), entry(False, "all_reduce", 2)]})
    (stack,) = launch_stacks(record, [group()])
    assert (stack.seq, stack.thread, stack.frames) == (3, "launch", ["step (train.py:2)"])
    other = pickle.dumps({"entries": [entry(False, "broadcast", 2)]})
    assert launch_stacks(other, [group()]) == []


def test_a_flight_record_of_another_form_is_none_and_runs_nothing() -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.abort, ()

    for record in (b"", b"nonsense", pickle.dumps([1]), pickle.dumps({"entries": [Runs()]})):
        assert launch_stacks(record, [group()]) == []


@pytest.mark.parametrize("module", [cpu_observer, hooks], ids=["recorder", "around backward"])
def test_frames_of_aorta_are_known_as_such(module: Any) -> None:
    assert any(folder in module.__file__ for folder in LIBRARIES)
