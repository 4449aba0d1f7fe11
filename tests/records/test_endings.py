"""Who ended an attempt: by signals, statuses, launchers' notes, and what native code wrote."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from aorta.records.deaths import Bystander, ending_of_status, last_words
from aorta.records.endings import attempt_ending, ending_text
from aorta.records.launches import LaunchNote, died_early, new_notes, note, read_notes
from aorta.records.schema import Ending
from aorta.records.state import LinesState, ProcessState, RankState
from aorta.records.writer import move_aside

HOST = socket.gethostname()
S = 1_000_000_000
PEER = Ending(kind="crashed", why="RuntimeError: Connection closed by peer [127.0.0.1]:49")
TIMEOUT = Ending(kind="crashed", why="RuntimeError: Timed out waiting 8000ms for recv operation to complete")
OWN = Ending(kind="crashed", why="ValueError: planted")


def rank(number: int, at_s: float | None, word: Ending | None = None, code: int | None = None) -> RankState:
    """A rank that ended at_s: with a word of its own, or with a code that the kernel told."""
    unix_ns = None if at_s is None else int(at_s * S)
    own = None if word is None else Ending(kind=word.kind, why=word.why, unix_ns=unix_ns)
    died = None if code is None else ending_of_status(code, "the kernel", int((at_s or 0) * S))
    process = ProcessState(
        run_id="a", attempt=0, rank=number, world_size=3, host=HOST, pid=2**22 + number, process_start=0.0,
        started_unix_ns=S, written_unix_ns=0, ending=own,
    )  # fmt: skip
    return RankState(process=process, lines=LinesState(attempt=0, closed_unix_ns=unix_ns, ending=died))


def failure(number: int, at_s: float, code: int, is_sent: bool = False) -> LaunchNote:
    return LaunchNote(
        kind="failure", unix_ns=int(at_s * S), host=HOST, code=code, pid=2**22 + number, is_sent=is_sent
    )


@pytest.mark.parametrize(
    ("states", "notes", "text"),
    [
        pytest.param(
            [rank(0, 5.1, PEER), rank(1, 5.0, code=-11), rank(2, 5.2, code=-15)], [],
            "killed on rank 1: SIGSEGV: a fault in native code", id="a-fault-and-its-victims",
        ),
        pytest.param(
            [rank(0, 5.0, PEER), rank(1, 5.01, code=-9), rank(2, 5.2, code=-15)], [],
            "killed on rank 1: SIGKILL: nobody says", id="seen-late-on-a-busy-machine",
        ),
        pytest.param(
            [rank(0, 5.0, PEER), rank(1, 35.0, code=-9), rank(2, 5.2, PEER)], [],
            "crashed on rank 0: RuntimeError: Connection closed", id="a-launcher-kills-after-its-grace",
        ),
        pytest.param(
            [rank(0, 5.0, PEER), rank(1, 5.1, code=-15), rank(2, 5.1, PEER)],
            [failure(1, 5.2, -15), failure(0, 5.3, 1, True)],
            "killed on rank 1: SIGTERM: somebody ended it", id="terminated-by-somebody",
        ),
        pytest.param(
            [rank(0, 5.0, OWN), rank(1, 5.1, code=-15), rank(2, 5.1, code=-15)],
            [failure(0, 5.05, 1), failure(1, 5.2, -15, True), failure(2, 5.2, -15, True)],
            "crashed on rank 0: ValueError: planted", id="terminated-by-the-launcher",
        ),
        pytest.param(
            [rank(0, 5.0, code=-15), rank(1, 5.1, code=-15), rank(2, 5.1, code=-15)], [],
            "stopped by SIGTERM of all ranks", id="all-terminated",
        ),
        pytest.param(
            [rank(0, 5.0, code=-15), rank(1, 5.1, code=-15), rank(2, 5.1, code=-15)],
            [failure(1, 5.2, -15), failure(0, 5.3, -15, True), failure(2, 5.3, -15, True)],
            "killed on rank 1: SIGTERM", id="all-terminated-after-one",
        ),
        pytest.param(
            [rank(0, 5.0, PEER), rank(1, 4.9, code=7), rank(2, 5.2, code=-15)], [],
            "crashed on rank 1: exit status 7, without an exception", id="a-status",
        ),
        pytest.param(
            [rank(0, 5.0, PEER), rank(1, 4.9, Ending(kind="finished")), rank(2, 5.2, code=-15)], [],
            "crashed on rank 1: left with exit status 0 while the other ranks went on", id="left-early",
        ),
        pytest.param(
            [rank(0, 5.0, PEER), rank(1, 4.9, Ending(kind="finished")), rank(2, 5.2, code=-15)],
            [failure(1, 4.95, 3), failure(0, 5.1, 1, True)],
            "crashed on rank 1: exit status 3, without an exception", id="sys.exit",
        ),
        pytest.param(
            [rank(0, 9.0, TIMEOUT), rank(1, 9.3, code=-15), rank(2, 9.1, PEER)],
            [failure(0, 9.1, 1), failure(1, 9.3, -15, True)],
            "hung on rank 1: rank 0 waited in vain: RuntimeError: Timed out", id="one-never-came",
        ),
        pytest.param(
            [rank(0, 5.0, code=-2), rank(1, 5.0, code=-15), rank(2, 5.1, code=-9)],
            [LaunchNote(kind="signal", unix_ns=5 * S, host=HOST, signal="SIGINT")],
            "stopped by SIGINT, sent to the command (Ctrl-C)", id="ctrl-c",
        ),
        pytest.param(
            [rank(0, 5.0, OWN), rank(1, 5.1, code=-15), rank(2, 5.1, PEER)],
            [LaunchNote(kind="signal", unix_ns=9 * S, host=HOST, signal="SIGINT")],
            "crashed on rank 0: ValueError: planted", id="ctrl-c-after-a-crash",
        ),
    ],
)  # fmt: skip
def test_the_first_failure_is_named_and_not_its_victims(
    states: list[RankState], notes: list[LaunchNote], text: str
) -> None:
    ending = attempt_ending(states, 3, is_over=True, notes=notes)
    assert ending is not None
    assert ending_text(ending).startswith(text)


def test_a_launchers_note_tells_how_a_rank_ended_of_which_nobody_else_does() -> None:
    states = [rank(0, None), rank(1, 5.0, PEER), rank(2, 5.1, PEER)]
    ending = attempt_ending(states, 3, notes=[failure(0, 4.9, -6)])
    assert ending is not None
    assert ending_text(ending) == "killed on rank 0: SIGABRT: native code gave up"
    assert (ending.signal, ending.told_by) == ("SIGABRT", "the launcher")


def test_a_process_that_ended_with_status_0_without_a_word_has_finished() -> None:
    """As one that closed all its files: the command was that process."""
    end = LaunchNote(kind="end", unix_ns=6 * S, host=HOST, pid=2**22)
    ending = attempt_ending([rank(0, 5.0)], 1, is_over=True, notes=[end])
    assert ending is not None
    assert (ending.kind, ending.unix_ns) == ("finished", 5 * S)
    other = attempt_ending([rank(1, 5.0)], 1, is_over=True, notes=[end])
    assert other is not None
    assert ending_text(other).startswith("killed on rank 1: left no word")


def test_starts_that_never_trained_are_told_once_each() -> None:
    notes = [
        LaunchNote(kind="failure", unix_ns=2 * S, host=HOST, code=1, pid=1, rank=1, why="no module"),
        LaunchNote(kind="failure", unix_ns=2 * S + 1, host=HOST, code=-15, pid=2, rank=0, is_sent=True),
        LaunchNote(kind="failure", unix_ns=9 * S, host=HOST, code=-9, pid=3, rank=0, restarts=1),
    ]
    early = died_early(notes, known_pids=[3], started_ns=[5 * S])
    assert [(event.rank, event.why) for event in early] == [(1, "no module")]


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ("step 1\nterminate called without an exception\n", "terminate called without an exception"),
        (
            "terminate called after throwing 'gloo::EnforceNotMet'\n  what():  [enforce fail at x]\n",
            "what():  [enforce fail at x]",
        ),
        (
            "[rank0]:[E1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout\n"
            "[rank1]:[E1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: mine\n",
            "[rank1]:[E1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: mine",
        ),
        ("loss 1.0\nall is well\n", None),
    ],
)  # fmt: skip
def test_what_native_code_wrote_is_found_among_the_lines_of_all_ranks(log: str, text: str | None) -> None:
    assert last_words(log, 1) == text


def test_notes_are_read_back_and_a_new_run_keeps_those_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, own = new_notes(tmp_path), new_notes(tmp_path)
    note(old, "end", code=1)
    note(own, "failure", code=-9, rank=2)
    (tmp_path / "launch_bad.jsonl").write_bytes(b"\xff\n{}\n[1]\n")
    assert [event.kind for event in read_notes(tmp_path)] == ["end", "failure"]
    monkeypatch.setenv("AORTA_LAUNCH_NOTES", str(own))
    move_aside(tmp_path)
    assert [event.rank for event in read_notes(tmp_path)] == [2]


@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, None), (signal.SIGTERM, None), (None, 7)])
def test_the_kernel_tells_how_a_process_ended(number: signal.Signals | None, status: int | None) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        if number is not None:
            os.kill(os.getpid(), number)
            time.sleep(60)
        os._exit(7)
    bystander = Bystander(pid, rank=0)
    os.write(writing, b"x")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a fork of gigabytes of tests takes a while to end
    ending = bystander.ending()
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
    assert ending is not None
    assert (ending.signal, ending.exit_status) == (None if number is None else number.name, status)
