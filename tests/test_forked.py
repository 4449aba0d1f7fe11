"""Calls in copies of the process: what they write, raise and leave behind."""

import gc
import os
import signal
import sys
import threading

import pytest

from aorta.errors import ReportError
from aorta.processes import forked, no_garbage_collection

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where processes fork"),
]


def test_every_call_is_made_once_in_a_copy(tmp_path):
    def write(number):
        with open(tmp_path / str(number), "a") as file:
            file.write(f"{os.getpid()} ")

    done = list(forked([lambda number=number: write(number) for number in range(5)], 2))

    assert sorted(done) == [0, 1, 2, 3, 4]
    pids = {(tmp_path / str(number)).read_text() for number in range(5)}
    assert len(pids) == 5  # each written once
    assert f"{os.getpid()} " not in pids


def test_an_error_of_a_copy_is_raised_here_after_the_others_have_ended(tmp_path, capfd):
    def fail():
        raise ReportError("cannot write it")

    with pytest.raises(ReportError, match="cannot write it"):
        list(forked([fail, (tmp_path / "a").touch], 2))
    assert (tmp_path / "a").exists()
    assert capfd.readouterr().err == ""


def test_a_call_whose_copy_was_killed_is_made_again_here(tmp_path):
    own = os.getpid()

    def killed_in_a_copy():
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "here").touch()

    assert sorted(forked([killed_in_a_copy, int], 2)) == [0, 1]
    assert (tmp_path / "here").exists()


def test_a_child_of_a_fork_collects_garbage_where_another_thread_has_turned_that_off_for_a_while():
    is_off, may_end = threading.Event(), threading.Event()

    def walk():
        with no_garbage_collection():
            is_off.set()
            may_end.wait(30)

    thread = threading.Thread(target=walk)
    thread.start()
    assert is_off.wait(30)
    assert not gc.isenabled()
    child = os.fork()
    if not child:
        os._exit(gc.isenabled())
    with no_garbage_collection():
        may_end.set()
        thread.join()
        assert not gc.isenabled()  # this walk goes on
        if not (other := os.fork()):
            os._exit(gc.isenabled())
    assert gc.isenabled()
    assert [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in (child, other)] == [1, 0]
