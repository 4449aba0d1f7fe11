"""Memory by phase, from a stand-in for the allocator's counters: it is told a size, and keeps the peak."""

from types import SimpleNamespace

import pytest

from aorta.record.phase_memory import BACKWARD, FORWARD, PhaseMemory
from aorta.steps.notes import RecordedStep


class Allocator:
    def __init__(self):
        self.now = self.peak = 0

    def reaches(self, *sizes):
        for size in sizes:
            self.now = size
            self.peak = max(self.peak, size)

    def memory_of(self, index):
        return self.now, self.now, self.peak, 0, 0

    def memory_limit_bytes(self, index):
        return 1000


@pytest.fixture
def allocator():
    return Allocator()


@pytest.fixture
def memory(allocator):
    return PhaseMemory(allocator)


def one_step(memory, allocator, number, forward, backward, optimizer, left_out=None):
    step = RecordedStep(number, number, 0, None)
    step.left_out = left_out
    memory.begin_step(step, 0)
    allocator.reaches(*forward)
    memory.ends(FORWARD, step)
    allocator.reaches(*backward)
    memory.ends(BACKWARD, step)
    allocator.reaches(*optimizer)
    memory.end_step(step)
    return step


def test_a_phase_in_which_the_peak_rose_has_that_peak(memory, allocator):
    one_step(memory, allocator, 0, [10], [10], [10])
    step = one_step(memory, allocator, 1, [90, 60], [120, 30], [25])
    assert step.phase_peaks == (90, 120, 30)
    assert step.memory == (25, 25, 120, 0, 0)


def test_where_it_did_not_rise_a_phase_has_what_was_at_its_ends(memory, allocator):
    one_step(memory, allocator, 0, [90, 60], [120, 30], [20])
    step = one_step(memory, allocator, 1, [90, 60], [110, 30], [20])
    assert step.phase_peaks == (60, 60, 30)


def test_after_steps_that_were_left_out_a_rise_is_of_no_phase(memory, allocator):
    one_step(memory, allocator, 0, [60], [30], [20])
    one_step(memory, allocator, 1, [60], [500, 30], [20], left_out="not recorded")
    step = one_step(memory, allocator, 2, [60], [70, 30], [20])
    assert step.phase_peaks == (60, 60, 30)


def test_the_counters_are_only_read(memory, allocator):
    frozen = SimpleNamespace(memory_of=allocator.memory_of, memory_limit_bytes=lambda index: None)
    step = one_step(PhaseMemory(frozen), allocator, 0, [50], [70, 10], [10])
    assert allocator.peak == 70
    assert step.phase_peaks == (50, 70, 10)


def test_a_program_near_its_limit_is_looked_at_once_before_a_backward_pass(memory, allocator):
    told = []
    memory.near = lambda step, limit: told.append((step.global_step, limit))
    for number, most in enumerate([900, 949, 950, 960]):
        one_step(memory, allocator, number, [most], [100], [100])
    assert told == [(2, 1000)]
