"""Kernel records beside a loop: when everything has come, and whose the driver's buffers are."""

import ctypes

import numpy as np
import pytest
import torch

from aorta.device import kernel_records
from aorta.device.kernel_records import KernelRecords
from aorta.record.journal import Journal
from aorta.record.kernel_source import KernelSource
from aorta.record.open_steps import OpenSteps
from aorta.steps.notes import RECORD_DTYPE, CollectiveCall, Group, Mark, RecordedStep, What


class Function:
    """One function of the library; notes its calls."""

    def __init__(self, act):
        self.act = act

    def __call__(self, *args):
        return self.act(*args)


class Library:
    """A driver that gives back what the test puts into `coming`, a list of marks a take."""

    def __init__(self):
        self.called = []
        self.coming = []
        self.num_lent = 0
        self.passed = 0
        self.aorta_kernels_version = lambda: 130_101
        for name in ("claim", "start", "stop", "flush"):
            note = Function(lambda *args, name=name: self.called.append(name))
            setattr(self, f"aorta_kernels_{name}", note)
        self.aorta_kernels_mark = Function(lambda stream, number: self._mark(number))
        self.aorta_kernels_passed = Function(lambda: self.passed)
        self.aorta_kernels_name = Function(lambda index: b"")
        self.aorta_kernels_num_lent = Function(lambda: self.num_lent)
        self.aorta_kernels_take = Function(self._take)

    def _mark(self, number):
        self.passed = number
        return 0

    def _take(self, out, most, taken):
        marks = self.coming.pop(0) if self.coming else []
        rows = np.zeros(len(marks), RECORD_DTYPE)
        rows["what"], rows["name"] = What.MARK, marks
        ctypes.memmove(out, rows.ctypes.data, rows.nbytes)
        taken._obj.num_taken, taken._obj.settled = len(marks), 1


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def source(library, monkeypatch):
    monkeypatch.setattr(KernelRecords, "synchronize", lambda self: None)
    source = KernelSource("auto")
    source.records = KernelRecords(library, torch.device("cpu"))
    source.records.start()
    yield source
    source.records = None


def test_the_newest_mark_has_come_in_whatever_order_records_come(library, source):
    first, second = source.mark(0), source.mark(0)
    library.coming = [[second, first]]
    source.records.poll()
    assert source.records.has_every_mark()


def is_complete(source):
    return source.records.poll(closing=True)[-1].complete_ns > 0


def test_all_has_come_with_the_record_of_the_last_mark(library, source):
    """A device that has passed a mark need not have told so, and no buffer need be out."""
    first, second = source.mark(0), source.mark(0)
    library.coming = [[first], [second]]
    assert not is_complete(source)
    assert is_complete(source)


def test_a_buffer_that_is_out_may_hold_records(library, source):
    library.coming = [[source.mark(0)], []]
    library.num_lent = 1
    assert not is_complete(source)
    library.num_lent = 0
    assert is_complete(source)


def test_a_mark_that_the_driver_refused_is_not_waited_for(library, source):
    library.aorta_kernels_mark.act = lambda stream, number: 1
    assert source.mark(0) == 0
    assert is_complete(source)


def test_buffers_are_claimed_once_and_again_after_another_client(library, source):
    source.pause()
    source.wake()
    assert library.called.count("claim") == 1
    source.pause()
    source._yield_to_profiler()  # a profiler, while the recorder is paused
    assert library.called[-2:] == ["stop", "flush"]
    source._resume()
    assert library.called.count("claim") == 2


def test_what_the_tracer_takes_of_a_launch_is_measured_before_its_first_record_and_after_it(
    library, monkeypatch
):
    """3 us before, 4.4 us once it was on, but for a burst in which another thread had the core."""
    clock = {"ns": 0, "launches": 0}

    def launch(cycles):
        clock["launches"] += 1
        is_disturbed = clock["launches"] < 50
        clock["ns"] += 4_400 if "start" in library.called else 3_000 + 9_000 * is_disturbed

    library.aorta_kernels_prepare_marks = lambda: 0
    monkeypatch.setattr(kernel_records, "_cupti_library", lambda: library)
    monkeypatch.setattr(KernelRecords, "_prove", lambda records: library.called.append("prove"))
    monkeypatch.setattr(kernel_records.time, "perf_counter_ns", lambda: clock["ns"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", launch)

    records = KernelRecords.open(torch.device("cpu"))

    assert records.launch_us == pytest.approx(1.4)
    assert records.is_on
    assert library.called == ["claim", "start", "prove", "stop", "start"]


@pytest.mark.parametrize(
    ("before_us", "after_us", "slower_us"),
    [
        ([3.0, 3.1, 3.2, 3.3], [4.4, 4.4, 4.5, 9.0], pytest.approx(1.4)),
        ([3.0, 3.1, 3.2, 3.3], [3.02, 3.05, 3.1, 3.1], 0.0),  # CUPTI was on before, for another client
        ([3.0, 3.8, 4.0, 4.4], [3.2, 3.6, 4.1, 4.2], None),  # may be any of 0 to 1 us
        ([3.9, 3.9, 4.0, 4.4], [3.2, 3.9, 4.1, 4.2], None),  # a host whose clock went up meanwhile
    ],
)
def test_a_difference_that_launches_vary_by_tells_nothing(before_us, after_us, slower_us):
    assert kernel_records.slower_by_us(before_us, after_us) == slower_us


def test_what_is_issued_after_the_last_body_is_in_no_step():
    journal, group = Journal(), Group("0", "default", [0, 1], "nccl")
    step = journal.current = RecordedStep(0, 0, 0, None)
    step.by_kernels = True
    for issued_ns in (10, 30):
        journal.add_call(CollectiveCall(group, "all_reduce", 64, "float32", False, issued_ns=issued_ns))
    step.body_end = Mark(20)
    OpenSteps(journal, None, None).finish()

    assert [call.issued_ns for call in step.calls] == [10]
    assert journal.num_outside == {"all_reduce": 1}
    assert journal.num_seen == {"all_reduce": 2}
