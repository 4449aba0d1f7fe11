"""A step's marks are read, and each goes back to its clock once."""

from collections import Counter
from collections.abc import Sequence

import pytest

from aorta.device.marks import HostClock, NotPassedError
from aorta.record.sending import Extractor, Telemetry, reader_of_kept
from aorta.steps.notes import (
    CollectiveCall,
    FinalWait,
    Group,
    Mark,
    RecordedStep,
    Stall,
    StreamWait,
    decoded,
    encoded,
)


class CountingDevice:
    """A device's clock whose events are the milliseconds at which it passed them."""

    is_device = True

    def __init__(self) -> None:
        self.given_back: list[float] = []
        self.now_ms = 1e9

    def mark(self, stream: object = None) -> Mark:
        raise AssertionError("nothing is marked while a step is read")

    def passed(self, mark: Mark) -> bool:
        return bool(mark.event <= self.now_ms)

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        events = [mark.event for mark in marks if mark.event is not None]
        if max(events) > self.now_ms:
            raise NotPassedError
        return [None if mark.event is None else float(mark.event - start.event) for mark in marks]

    def recycle(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            if mark.event is not None:
                self.given_back.append(mark.event)
                mark.event = None


def at(ms: float) -> Mark:
    """A mark that the host queued 10 ns per ms earlier."""
    return Mark(int(ms * 10), ms)


GROUP = Group("0", "default", [0, 1], "nccl")


def call(
    seq: int, start: Mark | None = None, end: Mark | None = None, reason: str | None = None
) -> CollectiveCall:
    made = CollectiveCall(GROUP, "all_reduce", 64, "float32", is_async=True)
    made.seq, made.start, made.end, made.reason = seq, start, end, reason
    return made


def step_of(number: int, start: Mark, body_end: Mark, window_end: Mark) -> RecordedStep:
    step = RecordedStep(number, number, 0, None)
    step.start, step.body_end, step.window_end = start, body_end, window_end
    return step


def of(mark: Mark | None) -> tuple[float | None, int] | None:
    return None if mark is None else (mark.ms, mark.host_ns)


def full_step() -> RecordedStep:
    """Every kind of mark; one call was captured, one ran on the CPU, one wait outlived its step."""
    step = step_of(3, at(100), at(190), at(200))
    first, second = call(0, at(110), at(120)), call(1, at(115), at(125))
    on_host = call(2, Mark(5, None), Mark(6, None))
    step.calls = [first, call(9, at(111), None, "captured into a graph"), second, on_host]
    step.waits = [StreamWait(at(130), first.id)]
    passed = at(144)  # what it was to wait for had: one mark is both ends
    step.stalls = [Stall(at(140), at(141)), Stall(passed, passed), Stall(at(142), at(143))]
    step.final_waits = [FinalWait(at(150), [second.id]), FinalWait(at(152), [first.id, second.id])]
    step.final_waits[0].end = at(151)
    return step


def test_every_mark_lands_where_it_belongs():
    sent = decoded(encoded(Extractor(CountingDevice()).extract(full_step(), Telemetry())), RecordedStep)

    assert (sent.window_ms, sent.body_ms) == (100.0, 90.0)
    assert [(c.seq, of(c.start), of(c.end), c.reason) for c in sent.calls] == [
        (0, (10.0, 1100), (20.0, 1200), None),
        (9, None, None, "captured into a graph"),
        (1, (15.0, 1150), (25.0, 1250), None),
        (2, (None, 5), (None, 6), None),
    ]
    assert [(of(wait.start), wait.call) for wait in sent.waits] == [((30.0, 1300), ("0", 0))]
    assert [(of(stall.start), of(stall.end)) for stall in sent.stalls] == [
        ((40.0, 1400), (41.0, 1410)),
        ((44.0, 1440), (44.0, 1440)),
        ((42.0, 1420), (43.0, 1430)),
    ]
    assert [(of(wait.start), of(wait.end), wait.calls) for wait in sent.final_waits] == [
        ((50.0, 1500), (51.0, 1510), [("0", 1)]),
        ((52.0, 1520), None, [("0", 0), ("0", 1)]),
    ]
    assert {(call.group.key, *call.group.ranks) for call in sent.calls} == {("0", 0, 1)}
    assert len({call.group for call in sent.calls}) == 1


def test_host_marks_are_numbers_on_the_host_clock():
    step = step_of(0, Mark(1_000_000), Mark(3_000_000), Mark(4_000_000))
    step.stalls = [Stall(Mark(1_500_000), Mark(2_000_000))]
    sent = Extractor(HostClock()).extract(step, Telemetry())
    assert (sent.window_ms, sent.body_ms) == (3.0, 2.0)
    assert [(sent.ms_of(stall.start), sent.ms_of(stall.end)) for stall in sent.stalls] == [(0.5, 1.0)]


def test_the_step_that_waits_for_a_call_may_be_read_while_that_of_the_call_is_written():
    """On a CPU the thread that trains keeps a closed step while the sending thread writes the one before."""
    boundary, end = Mark(10_000_000), Mark(12_000_000)
    first = step_of(0, Mark(0), boundary, boundary)
    first.calls = [call(0, Mark(9_000_000), end)]
    second = step_of(1, boundary, Mark(19_000_000), Mark(20_000_000))
    second.stalls = [Stall(Mark(11_000_000), end)]
    written = Extractor(HostClock()).extract(first, Telemetry())
    kept = reader_of_kept(on_device=False)(second)
    assert written.ms_of(written.calls[0].end) == 12.0
    assert kept.ms_of(kept.stalls[0].end) == 2.0


@pytest.mark.parametrize("paused", [False, True])
def test_marks_go_back_once_and_the_windows_end_when_the_next_step_has_been_read(paused):
    """Between two steps in a row one mark is end and start; after a pause the body's end ends the window."""
    clock = CountingDevice()
    extractor = Extractor(clock)
    end = at(200)
    first = step_of(0, at(100), end if paused else at(190), end)
    passed = at(140)
    first.stalls = [Stall(at(120), at(130)), Stall(passed, passed)]
    second = step_of(1, at(260) if paused else end, at(290), at(300))

    extractor.extract(first, Telemetry())
    assert Counter(clock.given_back) == Counter([100, 120, 130, 140] + ([] if paused else [190]))
    assert end.event == 200

    sent = extractor.extract(second, Telemetry())
    assert sent.gap_ms == (60.0 if paused else 0.0)
    assert sent.window_ms == (40.0 if paused else 100.0)
    assert Counter(clock.given_back[5 - paused :]) == Counter([200, 260, 290] if paused else [200, 290])


def numbers(extractor: Extractor, step: RecordedStep) -> RecordedStep | None:
    """Do what the writer does at a poll."""
    return extractor.extract(step, Telemetry()) if extractor.ready(step, is_late=False) else None


@pytest.mark.parametrize(
    ("now_ms", "ready"),
    [
        pytest.param(199, False, id="the-window-is-open"),
        pytest.param(200, False, id="a-collective-runs-on"),
        pytest.param(220, True, id="all-has-ended"),
    ],
)
def test_a_step_is_read_when_the_device_has_passed_all_of_it(now_ms, ready):
    clock = CountingDevice()
    clock.now_ms = now_ms
    step = step_of(0, at(100), at(190), at(200))
    step.calls = [call(0, at(110), at(120)), call(1, at(180), at(220)), call(2, None, None, "outside")]
    assert (numbers(Extractor(clock), step) is not None) is ready
    assert bool(clock.given_back) is ready


def test_a_step_that_was_asked_too_early_is_read_whole_later():
    clock = CountingDevice()
    clock.now_ms = 200
    step, extractor = full_step(), Extractor(clock)
    step.calls[2].end = at(220)
    assert numbers(extractor, step) is None
    clock.now_ms = 220
    sent = numbers(extractor, step)
    assert sent is not None
    assert of(sent.calls[2].end) == (120.0, 2200)


def test_a_call_that_nobody_waits_for_holds_its_step_until_the_recorder_closes():
    step = step_of(0, at(100), at(190), at(200))
    step.calls = [call(0, at(110), None)]
    extractor = Extractor(CountingDevice())
    assert not extractor.ready(step, is_late=False)
    assert extractor.ready(step, is_late=True)
    assert step.calls[0].reason == "never waited for"
