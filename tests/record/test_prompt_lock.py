"""Samples show where a thread is, and the program's own switch interval is left as it is."""

import os
import sys
import time
from collections import Counter
from random import Random

import pytest

from aorta.record import prompt_lock
from aorta.record import stacks as sampling
from aorta.record.journal import Journal
from aorta.record.prompt_lock import waits_soon
from aorta.record.stacks import StackSampler
from aorta.records.stacks import joined, read_stacks
from aorta.steps.notes import RecordedStep

WITH_LOCK = pytest.mark.skipif(not prompt_lock._has_lock(), reason="this Python has no lock")


@pytest.fixture(autouse=True)
def own_interval():
    """One that does not come back whole where it is cut off to microseconds."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0010015)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before_s)


class Stopping:
    """Does something in the middle of a wait."""

    def __init__(self, work=lambda: None):
        self.work = work
        self.seen_s = None

    def acquire(self, *, timeout):
        self.seen_s = sys.getswitchinterval()
        self.work()
        return False


@WITH_LOCK
def test_an_interval_lasts_for_the_wait_and_comes_back_whole(own_interval):
    for _ in range(300):
        waits_soon(stopping := Stopping(), Random())
        assert stopping.seen_s < 1e-4
    assert sys.getswitchinterval() == own_interval


def test_an_interval_comes_back_where_the_wait_fails(own_interval):
    def fails():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        waits_soon(Stopping(fails), Random())
    assert sys.getswitchinterval() == own_interval


def test_what_the_program_sets_in_between_stays():
    waits_soon(Stopping(lambda: sys.setswitchinterval(0.01)), Random())
    assert sys.getswitchinterval() == 0.01


@WITH_LOCK
def test_ours_that_the_program_sets_later_goes_with_the_next_wait(own_interval):
    waits_soon(stopping := Stopping(), Random())
    sys.setswitchinterval(stopping.seen_s)
    waits_soon(Stopping(), Random())
    assert sys.getswitchinterval() == own_interval


def test_a_shorter_one_of_the_program_is_left(monkeypatch):
    sys.setswitchinterval(0.000005)
    waits_soon(stopping := Stopping(), Random())
    assert sys.getswitchinterval() == pytest.approx(5e-6, abs=1e-6)
    assert stopping.seen_s is None


def test_a_forked_process_has_the_programs_own(own_interval):
    codes = []

    def forks():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == own_interval else 1)
        codes.append(os.waitpid(child, 0)[1])

    waits_soon(Stopping(forks), Random())
    assert codes == [0]


def counts(end_s):
    while time.monotonic() < end_s:
        pass


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose kernel tells that no other thread runs"
)
@WITH_LOCK
def test_a_thread_is_seen_between_calls_that_let_go_of_the_lock(tmp_path, monkeypatch):
    """It runs Python for 4 of 5 ms, with the lock for all of them: without the wait it is seen in none."""
    sys.setswitchinterval(60.0)
    monkeypatch.setattr(sampling, "CPU_SHARE", 1.0)
    journal = Journal()
    journal.current = RecordedStep(sampling.NUM_WARM, 0, 0, None, host_start_ns=time.monotonic_ns())
    sampler = StackSampler(journal)
    sampler.write_to(tmp_path / "stacks")
    sampler.start()
    while sampler._num_samples < 100:
        counts(time.monotonic() + 0.004)
        time.sleep(0.001)
    sampler.stop()
    stacks, us = joined(read_stacks(tmp_path / "stacks")), Counter()
    for sample in stacks.samples:
        us[any(frame.function == "counts" for frame in stacks.path(sample.node))] += sample.us
    assert us[True] > us[False] / 10
    assert sys.getswitchinterval() == 60.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel tells who waits for a core")
@WITH_LOCK
def test_a_call_that_holds_the_lock_for_long_is_seen_in_its_line(tmp_path, monkeypatch):
    """60 ms in C with the lock, 20 ms without: a wait behind the call would see what comes after it."""
    monkeypatch.setattr(sampling, "CPU_SHARE", 1.0)
    journal = Journal()
    journal.current = RecordedStep(sampling.NUM_WARM, 0, 0, None, host_start_ns=time.monotonic_ns())
    sampler, held_s, began_s = StackSampler(journal), 0.0, time.monotonic()
    sampler.write_to(tmp_path / "stacks")
    sampler.start()
    while sampler._num_samples < 60:
        at_s = time.monotonic()
        adds(3_000_000)
        held_s += time.monotonic() - at_s
        time.sleep(0.02)
    share = held_s / (time.monotonic() - began_s)
    sampler.stop()
    stacks, us = joined(read_stacks(tmp_path / "stacks")), Counter()
    for sample in stacks.samples:
        us[any(frame.function == "adds" for frame in stacks.path(sample.node))] += sample.us
    assert us[True] / us.total() > 0.7 * share


def adds(number):
    return sum(range(number))
