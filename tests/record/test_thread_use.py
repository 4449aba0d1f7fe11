"""Use of the cores by a thread."""

import mmap
import os
import threading
import time

import pytest

from aorta.record import host as thread_use
from aorta.record.host import ThreadUse
from aorta.steps.record import host_use


@pytest.fixture
def use():
    use = ThreadUse()
    yield use
    use.close()


def test_work_is_cpu_time_and_sleep_is_neither(use):
    begin = use.read()
    time.sleep(0.05)
    asleep = use.read()
    busy(20_000_000)
    worked = use.read()

    cpu_ms = host_use(begin, asleep).cpu_ms
    assert cpu_ms < 20
    assert host_use(asleep, worked).cpu_ms >= 20


def test_work_of_another_thread_is_the_process_s_and_not_the_thread_s(use):
    begin = use.read()
    thread = threading.Thread(target=busy, args=(20_000_000,))
    thread.start()
    thread.join()
    used = host_use(begin, use.read())
    assert used.process_ms >= used.cpu_ms + 15
    assert used.cpu_ms < 15


@pytest.mark.skipif(thread_use.OF_THREAD is None, reason="the system tells no thread's use")
def test_pages_that_a_thread_is_the_first_to_write_are_faults_of_it_alone(use):
    num, before = 256, use.read()
    quiet = use.read()
    write_pages(num)
    written = use.read()
    thread = threading.Thread(target=write_pages, args=(num,))
    thread.start()
    thread.join()
    others = use.read()
    assert num <= host_use(quiet, written).faults <= num + 64
    assert host_use(before, quiet).faults < 64
    assert host_use(written, others).faults < num
    assert 0 <= host_use(quiet, written).system_ms < 1000


def test_what_was_not_asked_for_or_nobody_tells_is_not_known(use, monkeypatch):
    begin = use.read()
    assert host_use(begin, use.read(with_faults=False)).faults is None
    monkeypatch.setattr(thread_use, "OF_THREAD", None)
    used = host_use(begin, use.read())
    assert (used.faults, used.system_ms) == (None, None)


def write_pages(num):
    """As many as are new to the process, each alone: none is a large one."""
    with mmap.mmap(-1, num * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        for place in range(num):
            pages[place * mmap.PAGESIZE] = 1


def busy(ns):
    end_ns = time.thread_time_ns() + ns
    while time.thread_time_ns() < end_ns:
        pass


def test_readings_of_two_threads_are_not_compared(use):
    readings = [use.read()]
    thread = threading.Thread(target=lambda: readings.append(use.read()))
    thread.start()
    thread.join()
    readings.append(use.read())

    assert host_use(readings[0], readings[1]) is None
    assert host_use(readings[0], readings[2]) is not None
    assert host_use(readings[0], None) is None


def test_a_system_that_does_not_count_says_so(use, monkeypatch):
    monkeypatch.setattr(thread_use, "SCHEDSTAT", "/proc/no-such-file")
    begin, end = use.read(), use.read()
    used = host_use(begin, end)
    assert used.cpu_ms >= 0
    assert used.ready_ms is None


def test_what_the_file_holds_may_be_anything(use, monkeypatch, tmp_path):
    path = tmp_path / "schedstat"
    path.write_text("nothing\n")
    monkeypatch.setattr(thread_use, "SCHEDSTAT", str(path))
    assert use.read()[2] is None
    assert use.read()[2] is None


@pytest.mark.heavy
@pytest.mark.skipif(not os.path.exists(thread_use.SCHEDSTAT), reason="needs /proc/thread-self/schedstat")
def test_a_forked_process_reads_its_own_counters(use):
    """The file that the parent opened tells of the parent's thread."""
    parent = use.read()[0]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            thread = use.read()[0]
            os.write(writing, f"{thread} {os.readlink(f'/proc/self/fd/{use._file}')}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    thread, path = os.read(reading, 200).decode().split()
    os.close(reading)
    assert int(thread) == child != parent
    assert f"/{child}/" in path
