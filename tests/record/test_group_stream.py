"""Which of torch's streams a process group uses; streams and works are played by hand."""

from typing import Any

import pytest
import torch

from aorta.record.event_observer import _has_hidden_inputs
from aorta.record.group_stream import (
    MOST_CHECKS,
    MOST_LOOKS,
    NUM_CHECKS,
    PER_LOOK,
    GroupStreamFinder,
)
from aorta.steps.notes import CollectiveCall, Group


@pytest.mark.parametrize(
    ("op", "tensors", "hidden"),
    [
        ("reduce_scatter", ([torch.ones(2)], [[torch.ones(2), torch.ones(2)]]), True),
        ("reduce_scatter", (torch.ones(2), torch.ones(4)), False),
        ("all_gather", ([[torch.ones(2), torch.ones(2)]], [torch.ones(2)]), False),
        ("reduce_scatter", None, False),
    ],
)
def test_a_list_of_inputs_to_scatter_is_copied_where_nobody_sees_it(op, tensors, hidden):
    call = CollectiveCall(Group("0", "default", [0, 1], "nccl"), op, 8, "float32", is_async=True)
    assert _has_hidden_inputs(call, tensors) is hidden


class Queue:
    def __init__(self, idle: bool) -> None:
        self.idle = idle
        self.stream = self
        self.raw = id(self)

    def query(self) -> bool:
        return self.idle


class Pending:
    """A work that has ended or not."""

    def __init__(self, completed: bool) -> None:
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed


class Event:
    """Passes `at` ms on the device, by the stream it is recorded on."""

    def __init__(self, at: dict[Any, float]) -> None:
        self.at = at

    def record(self, stream: Any) -> None:
        self.ms = self.at[stream]

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return other.ms - self.ms


def finder(*pool: Queue, later_ms: float = 0.0) -> GroupStreamFinder:
    """later_ms: by how much the stream 'waiting' comes later than any other."""
    at: dict[Any, float] = dict.fromkeys(pool, 1.0) | {"waiting": 1.0 + later_ms}
    return GroupStreamFinder(pool, lambda: Event(at))


def look(one: GroupStreamFinder, completed: bool, times: int = 8, caller: int = 0) -> None:
    for _ in range(times):
        one.look(Pending(completed), caller)  # type: ignore[arg-type]


def check(one: GroupStreamFinder, times: int) -> None:
    for _ in range(times):
        one.check("waiting")


def test_streams_that_are_idle_while_the_work_is_pending_are_ruled_out():
    right = Queue(idle=False)
    one = finder(*(Queue(idle=True) for _ in range(20)), right, later_ms=0.005)
    look(one, completed=False)
    check(one, NUM_CHECKS + 1)
    assert one.stream is right
    assert not one.given_up


def test_a_work_that_has_ended_rules_out_nothing():
    pool = [Queue(idle=True) for _ in range(6)]
    one = finder(*pool)
    look(one, completed=True)
    pool[3].idle = False
    look(one, completed=False)
    check(one, NUM_CHECKS + 1)
    assert one.stream is pool[3]


def test_the_stream_that_collectives_are_called_on_is_not_theirs():
    """However busy: its marks pass at a collective's start, which is soon before the end of a short one."""
    compute, right = Queue(idle=False), Queue(idle=False)
    one = finder(compute, right)
    look(one, completed=True, caller=compute.raw)
    check(one, NUM_CHECKS + 1)
    assert one.stream is right


def test_a_stream_that_is_as_busy_stays_and_nothing_is_concluded():
    one = finder(Queue(idle=False), Queue(idle=False), Queue(idle=True))
    look(one, completed=False)
    check(one, 20)
    assert one.stream is None
    assert not one.given_up


def test_the_last_one_left_has_to_pass_with_the_work():
    for later_ms in (-0.5, 3.0):  # passed long after it, or long before
        one = finder(Queue(idle=False), Queue(idle=True), later_ms=later_ms)
        look(one, completed=False)
        check(one, MOST_CHECKS + 2)
        assert one.stream is None
        assert one.given_up


def test_few_late_comparisons_are_forgiven():
    """The stream that waits may be held up by others."""
    right = Queue(idle=False)
    at: dict[Any, float] = {right: 1.0, "waiting": 2.0}
    one = GroupStreamFinder([right], lambda: Event(at))
    look(one, completed=False)
    check(one, 3)
    at["waiting"] = 1.004
    check(one, NUM_CHECKS)
    assert one.stream is right


def test_a_group_whose_stream_is_not_in_the_pool_is_given_up():
    one = finder(*(Queue(idle=True) for _ in range(2 * PER_LOOK)))
    look(one, completed=False, times=2)
    assert one.given_up


def test_the_search_ends():
    one = finder(Queue(idle=True), Queue(idle=True))
    look(one, completed=True, times=MOST_LOOKS)
    assert one.given_up
