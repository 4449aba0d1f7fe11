"""What is known of collectives in steps that kernel records time: by the marks of the steps alone."""

import pytest

from aorta.hang.find import find, sentence
from aorta.hang.report import LISTED_AFTER
from aorta.hang.standing import group_states
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group, Mark, RecordedStep
from tests.hang.reports_by_hand import report

GROUP = Group("0", "default", [0, 1], "nccl")


def journal_of(*steps: list[CollectiveCall], first: int = 5) -> Journal:
    """Steps of kernel records, the last one open. Step n begins with mark 2n, its body ends with 2n + 1."""
    journal = Journal()
    journal._groups[GROUP.key] = GROUP
    GROUP.next_seq = max((call.seq for calls in steps for call in calls), default=-1) + 1
    for number, calls in enumerate(steps, first):
        step = RecordedStep(number, number, 0, None)
        step.by_kernels = True
        step.start = Mark(1, number=2 * number)
        step.calls = calls
        if number < first + len(steps) - 1:
            step.body_end = Mark(1, number=2 * number + 1)
            step.window_end = Mark(1, number=2 * number + 2)
            journal.closed.append(step)
        else:
            journal.current = step
    return journal


def call(seq: int, is_async: bool = False, **fields: object) -> CollectiveCall:
    made = CollectiveCall(GROUP, "all_reduce", 64, "float32", is_async)
    made.seq, made.stream, made.issued_ns = seq, "group" if is_async else "compute", 1
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def states(journal: Journal, passed: int) -> list[tuple[bool | None, bool | None]]:
    (group,) = group_states(journal, (), lambda number: number <= passed)
    return [(state.started, state.finished) for state in group.calls]


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        pytest.param(9, [(False, False)] * 3, id="before-the-first-step"),
        pytest.param(10, [(None, None), (False, False), (False, False)], id="in-the-first-step"),
        pytest.param(12, [(True, True), (None, None), (None, None)], id="in-the-second-step"),
    ],
)
def test_marks_of_steps_tell_how_far_the_device_is(passed, expected):
    assert states(journal_of([call(0)], [call(1), call(2)]), passed) == expected


def test_what_runs_on_a_stream_of_its_own_may_go_on_past_the_step():
    assert states(journal_of([call(0, is_async=True)], []), 12) == [(None, None)]


def test_collectives_of_cpu_tensors_have_marks_of_their_own():
    journal = journal_of([call(0, start=Mark(1), end=Mark(2)), call(1, start=Mark(1))])
    assert states(journal, 10) == [(True, True), (True, False)]


def test_all_calls_of_the_step_in_which_the_device_is_are_listed_and_few_of_those_ahead():
    num = 3 * LISTED_AFTER
    journal = journal_of([call(i) for i in range(num)], [call(num + i) for i in range(num)])
    assert len(states(journal, 10)) == num + LISTED_AFTER + 1


def test_the_rank_that_has_not_come_is_named_though_no_collective_has_marks():
    """Rank 0 has issued #3 and is somewhere in step 5; rank 1 stopped before #2."""
    reports = []
    for rank, num in enumerate((4, 2)):
        journal = journal_of([call(i) for i in range(num)])
        reports.append(report(rank, *group_states(journal, (), lambda number: number <= 10)))
    found = find(reports)
    assert (found.kind, found.ranks) == ("absent", [1])
    assert "#2 of group default, step 5" in sentence(found)


def test_where_all_ranks_have_issued_the_same_the_step_is_named():
    reports = []
    for rank in range(2):
        journal = journal_of([call(i) for i in range(4)])
        reports.append(report(rank, *group_states(journal, (), lambda number: number <= 10)))
    found = find(reports)
    assert found.kind == "nobody_waits"
    assert "ranks 0, 1 may be in any of #0 to #3 of group default (step 5)" in sentence(found)
