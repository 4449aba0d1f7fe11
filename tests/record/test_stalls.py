"""Which waits of the compute stream are noted, with how many marks. On a device: tests/gpu."""

import pytest
import torch

from aorta.device.marks import HostClock
from aorta.record.interception.stalls import ASK_EVERY, CaptureWatch, StreamWaitPatch
from aorta.record.journal import Journal
from aorta.steps.notes import RecordedStep

COMPUTE, SIDE = 1, 2


class Event:
    """Stands in for torch.cuda.Event, which needs a device."""

    def __init__(self, passed: bool | None = False) -> None:
        self.passed = passed
        self.asked = 0
        self.followed_by: list[int] = []

    def query(self) -> bool:
        self.asked += 1
        if self.passed is None:
            raise RuntimeError("captured")
        return self.passed

    def wait(self, stream: "Stream") -> None:
        self.followed_by.append(stream.cuda_stream)


class Stream:
    def __init__(self, handle: int, device_index: int = 0) -> None:
        self.cuda_stream = handle
        self.device_index = device_index

    def wait_event(self, event: Event) -> None:
        event.wait(self)


@pytest.fixture
def journal(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    methods = Event.wait, Stream.wait_event
    journal = Journal()
    patch = StreamWaitPatch(journal, HostClock(), 0, CaptureWatch())
    patch.install()
    yield journal
    patch.uninstall()
    assert (Event.wait, Stream.wait_event) == methods


def step(journal, number=0, untimed=None):
    journal.current = RecordedStep(number, number, 0, None)
    journal.current.compute_raw_stream = COMPUTE
    journal.current.untimed = untimed
    return journal.current


def num_marks(step):
    return [1 if stall.end is stall.start else 2 for stall in step.stalls]


@pytest.mark.parametrize("by_stream", [True, False])
@pytest.mark.parametrize(("passed", "marks"), [(False, 2), (True, 1), (None, 2)])
def test_a_wait_has_two_marks_and_one_where_nothing_is_left_to_wait_for(journal, by_stream, passed, marks):
    now, event, stream = step(journal), Event(passed), Stream(COMPUTE)
    stream.wait_event(event) if by_stream else event.wait(stream)
    assert num_marks(now) == [marks]
    assert event.followed_by == [COMPUTE]


@pytest.mark.parametrize("by_stream", [True, False])
@pytest.mark.parametrize(
    ("stream", "untimed"),
    [
        pytest.param(Stream(SIDE), None, id="another-stream"),
        pytest.param(Stream(COMPUTE, device_index=1), None, id="another-device"),
        pytest.param(Stream(COMPUTE), "left out", id="not-timed"),
    ],
)
def test_other_waits_are_made_and_not_noted(journal, by_stream, stream, untimed):
    now, event = step(journal, untimed=untimed), Event()
    stream.wait_event(event) if by_stream else event.wait(stream)
    assert now.stalls == []
    assert (event.followed_by, event.asked) == ([stream.cuda_stream], 0)


def test_waits_that_had_to_wait_are_asked_again_only_in_one_step_of_some(journal):
    """Two waits a step: the first has always passed, the second never."""
    asked = []
    for number in range(2 * ASK_EVERY):
        now, first, second = step(journal, number), Event(True), Event(False)
        for event in (first, second):
            Stream(COMPUTE).wait_event(event)
        assert num_marks(now) == [1, 2]
        asked.append((first.asked, second.asked))
    often, seldom = (1, 1), (1, 0)
    assert asked == 2 * [often, *[seldom] * (ASK_EVERY - 1)]


def test_outside_of_steps_nothing_is_noted(journal):
    event = Event()
    Stream(COMPUTE).wait_event(event)
    assert event.followed_by == [COMPUTE]
