"""A step that `aorta run` ends in retrospect, at a place that has passed."""

from typing import Any

import pytest

from aorta.record.journal import Journal
from aorta.record.open_steps import OpenSteps
from aorta.steps.notes import CollectiveCall, Group, Mark, RecordedStep, Use


class Uses:
    """Sources, of which a cut asks for the use of the cores alone."""

    def __init__(self) -> None:
        self.thread_use = self

    def read(self, with_faults: bool) -> Use:
        return 0, 0, None, 0, None, None


class AlwaysFive:
    """A clock that marks at 5."""

    def mark(self) -> Mark:
        return Mark(5)


def call(seq: int) -> CollectiveCall:
    group = Group("0", "default", [0, 1], "nccl")
    return CollectiveCall(group, "all_gather", 64, "float32", is_async=True, seq=seq)


def open_step() -> tuple[Journal, OpenSteps]:
    journal = Journal()
    journal.current = RecordedStep(7, 7, 0, None)
    journal.current.start = Mark(1)
    steps = OpenSteps(journal, None, Uses())  # type: ignore[arg-type]
    steps.clock = AlwaysFive()  # type: ignore[assignment]
    return journal, steps


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("by_kernels", True),
        ("untimed", "outside of the timed steps"),
        ("kernels_lost", "a profiler took them"),
        ("compute_raw_stream", 12),
    ],
)
def test_the_part_after_the_cut_is_timed_as_the_part_before(name: str, value: Any) -> None:
    journal, steps = open_step()
    first = journal.current
    assert first is not None
    place = steps.cut()
    assert place is not None
    setattr(first, name, value)
    following = RecordedStep(8, 8, 0, None)
    steps.split(place, following)
    assert (getattr(first, name), getattr(following, name)) == (value, value)
    assert journal.current is following
    assert list(journal.closed) == [first]


def test_lost_futures_stay_with_the_part_in_which_they_were_lost() -> None:
    """Else the first part is blamed for waits that nobody saw in the second, which then looks whole."""
    journal, steps = open_step()
    first = journal.current
    assert first is not None
    before, after = call(0), call(1)
    first.calls.append(before)
    journal.lost_futures([before])
    place = steps.cut()
    assert place is not None
    first.calls.append(after)
    journal.lost_futures([after])
    following = RecordedStep(8, 8, 0, None)
    steps.split(place, following)
    assert (first.calls, first.lost_futures) == ([before], [before])
    assert (following.calls, following.lost_futures) == ([after], [after])
