"""Calls in copies of the process: what they write, raise and leave behind."""

import os
import signal
import sys

import pytest

from aorta.errors import ReportError
from aorta.processes import forked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="calls are made one after the other"),
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
