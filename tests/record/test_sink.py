"""The resolving process writes what EventSteps in this thread would."""

import os
import signal
import textwrap
import threading
import time
from pathlib import Path

import msgspec
import pytest

from aorta.record.sending import ProcessSink, ThreadSink
from aorta.records.schema import StepRecord
from aorta.records.writer import LineWriter
from aorta.steps.notes import Frame
from tests.dist.launch import run_python
from tests.limits import LIMIT_S
from tests.record.sink_steps import SETTINGS, steps

pytestmark = pytest.mark.processes  # the sink's own


def test_both_ways_write_the_same_lines(tmp_path):
    got: list[StepRecord] = []
    LineWriter.create(tmp_path / "process").close()
    process = ProcessSink(SETTINGS, tmp_path / "process", got.append)
    thread = ThreadSink(SETTINGS, LineWriter.create(tmp_path / "thread"), lambda record: None)
    for sink in (process, thread):
        for number, step in enumerate(steps(6)):
            sink.put(Frame(step=step, reply=number % 2 == 0))
        assert sink.close(LIMIT_S) == 0
    lines = (tmp_path / "process").read_bytes()
    assert lines == (tmp_path / "thread").read_bytes()
    records = [msgspec.json.decode(line, type=StepRecord) for line in lines.splitlines()]
    assert [record.global_step for record in got] == [0, 2, 4]
    assert got[1] == records[2]


def test_steps_are_written_when_the_training_process_is_killed(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from aorta.record.sending import ProcessSink
        from aorta.steps.notes import Frame
        from tests.record.sink_steps import SETTINGS, steps
        sink = ProcessSink(SETTINGS, Path({str(tmp_path / "lines")!r}), lambda record: None)
        for step in steps(5):
            sink.put(Frame(step=step, reply=True))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    LineWriter.create(tmp_path / "lines").close()
    assert run_python("-c", script).returncode == -9
    wait_for_lines(tmp_path / "lines", 5)


def test_a_dead_resolving_process_is_said_once_and_does_not_raise(tmp_path, caplog):
    LineWriter.create(tmp_path / "lines").close()
    sink = ProcessSink(SETTINGS, tmp_path / "lines", lambda record: None)
    sink._process.kill()
    sink._process.wait()
    for step in steps(50):
        sink.put(Frame(step=step))
    assert sink.close(5.0) == 50
    assert sum("recording stopped" in message for message in caplog.messages) == 1


def test_a_process_that_takes_nothing_holds_nothing_up_for_longer_than_the_limit(
    tmp_path, caplog, monkeypatch
):
    """More than a pipe holds: it stands in the middle of a frame."""
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(sleeper))
    LineWriter.create(tmp_path / "lines").close()
    sink = ProcessSink(SETTINGS, tmp_path / "lines", lambda record: None)
    many = steps(1) * 2000
    sending = threading.Thread(target=lambda: [sink.put(Frame(step=step)) for step in many], daemon=True)
    sending.start()
    sending.join(1.0)
    assert sending.is_alive()
    assert sink.close(1.0) == sink._num_steps
    sending.join(LIMIT_S)
    assert not sending.is_alive()
    assert sink._process.returncode == -signal.SIGKILL
    assert "takes nothing" in caplog.text
    assert "steps of it are missing" in caplog.text


def test_a_process_that_is_stopped_goes_on_when_the_run_ends(tmp_path):
    LineWriter.create(tmp_path / "lines").close()
    sink = ProcessSink(SETTINGS, tmp_path / "lines", lambda record: None)
    os.kill(sink.pid, signal.SIGSTOP)
    for step in steps(20):
        sink.put(Frame(step=step))
    assert sink.close(LIMIT_S) == 0
    assert (tmp_path / "lines").read_bytes().count(b"\n") == 20


def test_a_process_that_was_stopped_for_a_while_loses_nothing(tmp_path):
    LineWriter.create(tmp_path / "lines").close()
    sink = ProcessSink(SETTINGS, tmp_path / "lines", lambda record: None)
    os.kill(sink.pid, signal.SIGSTOP)
    continued = threading.Timer(0.5, os.kill, (sink.pid, signal.SIGCONT))
    continued.start()
    for step in steps(400):
        sink.put(Frame(step=step))
    assert sink.close(LIMIT_S) == 0
    assert (tmp_path / "lines").read_bytes().count(b"\n") == 400
    continued.join()


def test_lines_that_a_killed_process_leaves_are_not_counted_as_lost(tmp_path, caplog):
    LineWriter.create(tmp_path / "lines").close()
    sink = ProcessSink(SETTINGS, tmp_path / "lines", lambda record: None)
    for step in steps(5):
        sink.put(Frame(step=step))
    wait_for_lines(tmp_path / "lines", 5)
    os.kill(sink.pid, signal.SIGKILL)
    sink._process.wait()
    for step in steps(3):
        sink.put(Frame(step=step))
    assert sink.close(5.0) == 3
    assert "3 steps of it are missing" in caplog.text


def wait_for_lines(path, num):
    deadline = time.monotonic() + LIMIT_S
    while path.read_bytes().count(b"\n") < num:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_that_cannot_be_written_is_said_and_counted(tmp_path):
    sink = ProcessSink(SETTINGS, Path("/dev/full"), lambda record: None)
    for step in steps(3):
        sink.put(Frame(step=step))
    assert sink.close(LIMIT_S) == 3
