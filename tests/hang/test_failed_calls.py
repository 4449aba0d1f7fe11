"""gloo ends a call with an error where a peer is gone: its rank was waiting, and has not come through."""

import pytest
import torch

from aorta.device.marks import HostClock
from aorta.hang.find import find
from aorta.hang.standing import group_states
from aorta.record.cpu_observer import CpuObserver
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group, Mark, RecordedStep
from tests.hang.reports_by_hand import report

GROUP = Group("0", "default", [0, 1], "gloo")


class _Work:
    def __init__(self, future: torch.futures.Future[int]) -> None:
        self.get_future = lambda: future


@pytest.fixture
def call() -> CollectiveCall:
    made = CollectiveCall(GROUP, "all_reduce", 64, "float32", True)
    made.seq, made.start = 0, Mark(1)
    return made


def journal_with(call: CollectiveCall, is_closed: bool = False) -> Journal:
    journal = empty_journal()
    step = RecordedStep(7, 7, 0, None)
    step.calls = [call]
    if is_closed:
        journal.closed.append(step)
    else:
        journal.failed = step
    return journal


def empty_journal() -> Journal:
    journal = Journal()
    journal._groups[GROUP.key] = GROUP
    GROUP.next_seq = 1
    return journal


@pytest.mark.parametrize("is_closed", [False, True], ids=["in-a-failed-step", "in-a-closed-step"])
def test_a_call_that_failed_has_ended_and_is_not_finished(call: CollectiveCall, is_closed: bool) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    CpuObserver(Journal(), HostClock())._time_completion(_Work(future), call, lambda: None)
    future.set_exception(RuntimeError("Connection closed by peer"))
    (group,) = group_states(journal_with(call, is_closed), ())
    assert call.end is not None
    assert [(state.started, state.finished) for state in group.calls] == [(True, False)]


def test_a_call_that_went_well_is_finished(call: CollectiveCall) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    CpuObserver(Journal(), HostClock())._time_completion(_Work(future), call, lambda: None)
    future.set_result(1)
    (group,) = group_states(journal_with(call), ())
    assert [(state.started, state.finished) for state in group.calls] == [(True, True)]


def test_what_failed_in_a_step_that_was_survived_holds_nobody_up(call: CollectiveCall) -> None:
    call.failed, call.end = True, Mark(2)
    (group,) = group_states(empty_journal(), [(3, [call])])
    assert group.calls[0].finished is True


def test_ranks_whose_calls_failed_wait_for_the_one_that_never_issued_it(call: CollectiveCall) -> None:
    call.failed, call.end = True, Mark(2)
    finding = find([report(0, *group_states(journal_with(call), ()))])
    assert (finding.kind, finding.ranks) == ("absent", [1])
    assert finding.stuck is not None
    assert finding.stuck.call.step == 7
