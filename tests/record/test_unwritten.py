"""Closed steps survive the process that closed them: what is kept of them, and who makes lines of it."""

import json
import os
import socket
import textwrap
import time

import msgspec
import pytest

from aorta.account.load.rank.reduce import with_unwritten
from aorta.record.sending import KILLED_BEFORE_READ, reader_of_kept
from aorta.records.files import state_name, steps_name, unwritten_name
from aorta.records.run_identity import process_start
from aorta.records.state import ProcessState, StateFile
from aorta.records.writer import LineWriter
from aorta.steps.unwritten import SPARE_BYTES, UnwrittenSteps, unwritten_steps
from tests.dist.launch import run_python
from tests.record.ended_runs import run
from tests.record.sink_steps import SETTINGS, closed_step

LIMIT_S = 60


def kept(path):
    return unwritten_steps(path, (SETTINGS.run_id, SETTINGS.attempt), None)


def test_of_a_gpus_step_is_kept_what_the_host_knows(tmp_path):
    steps = UnwrittenSteps(tmp_path / "kept", SETTINGS, reader_of_kept(True))
    steps.keep(closed_step(4), num_before=0)
    (record,) = kept(tmp_path / "kept")
    assert (record.global_step, record.tokens, record.lr, record.num_collectives) == (4, 32, 0.5, 3)
    assert record.host_ms == pytest.approx(900e-6)
    assert (record.step_ms, record.loss, record.collectives, record.overlap.comm_ms) == (None,) * 4
    for name in ("step_ms", "loss", "collectives", "overlap", "device"):
        assert record.not_measured[name] == KILLED_BEFORE_READ


def test_of_a_step_that_events_time_nothing_is_kept(tmp_path):
    steps = UnwrittenSteps(tmp_path / "kept", SETTINGS, reader_of_kept(True))
    steps.keep(closed_step(0, by_kernels=False), num_before=0)
    steps.keep(closed_step(1), num_before=1)
    assert [record.global_step for record in kept(tmp_path / "kept")] == [1]


@pytest.mark.parametrize("num_behind", [0, 1, 40])
def test_the_file_holds_the_steps_that_are_not_safe_and_does_not_grow(tmp_path, num_behind):
    """A device that is always behind leaves no moment in which all steps are safe."""
    path = tmp_path / "kept"
    steps = UnwrittenSteps(path, SETTINGS, reader_of_kept(True))
    for number in range(1500):
        steps.keep(closed_step(number), num_before=min(number, num_behind))
        if number % 97 == 0 or number == 1499:
            unsafe = list(range(max(0, number - num_behind), number + 1))
            assert [record.global_step for record in kept(path)][-len(unsafe) :] == unsafe
    assert path.stat().st_size < 3 * SPARE_BYTES
    steps.close()
    assert not path.exists()


def test_the_process_that_writes_lines_makes_them_of_what_it_was_not_sent(tmp_path):
    path = tmp_path / steps_name(0)
    LineWriter.create(path).close()
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from aorta.record.sending import ProcessSink, reader_of_kept
        from aorta.steps.notes import Frame
        from aorta.steps.unwritten import UnwrittenSteps
        from tests.record.sink_steps import SETTINGS, closed_step, steps
        sink = ProcessSink(SETTINGS, Path({str(path)!r}), lambda record: None)
        kept = UnwrittenSteps(Path({str(tmp_path / unwritten_name(0))!r}), SETTINGS, reader_of_kept(True))
        for number in (3, 4, 5, 6):
            kept.keep(closed_step(number), num_before=number - 3)
        for step in steps(5):  # those of the numbers 3 and 4 are sent and kept
            sink.put(Frame(step=step))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert run_python("-c", script).returncode == -9
    deadline = time.monotonic() + LIMIT_S
    while (tmp_path / unwritten_name(0)).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [line["global_step"] for line in lines] == list(range(7))
    assert [line["step_ms"] is None for line in lines] == [False] * 5 + [True] * 2


@pytest.mark.parametrize("is_written", [True, False])
def test_a_reader_takes_kept_steps_where_nobody_writes_them_any_more(tmp_path, is_written):
    LineWriter.create(tmp_path / steps_name(0)).close()
    UnwrittenSteps(tmp_path / unwritten_name(0), SETTINGS, reader_of_kept(True)).keep(
        closed_step(0), num_before=0
    )
    state = ProcessState(
        run_id="r", attempt=0, rank=0, world_size=1, host=socket.gethostname(), pid=os.getpid(),
        process_start=None, started_unix_ns=0, written_unix_ns=0, writer_pid=os.getpid(),
        writer_start=process_start(os.getpid()) if is_written else 1.0,
    )  # fmt: skip
    file = StateFile(tmp_path / state_name(0), 0)
    file.write(state)
    file.close()
    records = list(with_unwritten(tmp_path / steps_name(0), []))
    assert [record.global_step for record in records] == ([] if is_written else [0])


def test_a_job_that_was_killed_before_its_first_line_starts_again(tmp_path):
    run(tmp_path, "killed", AORTA_RUN_ID="one")
    (tmp_path / unwritten_name(0)).unlink(missing_ok=True)
    (tmp_path / steps_name(0)).write_bytes(b'{"a line that was cut')
    assert run(tmp_path, "closed", AORTA_RUN_ID="one").returncode == 0
    lines = [json.loads(line) for line in (tmp_path / steps_name(0)).read_bytes().splitlines()]
    assert [(line["attempt"], line["global_step"]) for line in lines] == [(1, number) for number in range(6)]
    assert [
        attempt["attempt"] for attempt in json.loads((tmp_path / "run.json").read_bytes())["attempts"]
    ] == [0, 1]


def test_a_file_of_another_run_in_the_place_of_the_own_is_moved_aside(tmp_path):
    run(tmp_path, "killed", AORTA_RUN_ID="one")
    line = {"run_id": "other", "global_step": 7}
    (tmp_path / steps_name(0)).write_bytes(msgspec.json.encode(line) + b"\n")
    assert run(tmp_path, "closed", AORTA_RUN_ID="one").returncode == 0
    (aside,) = tmp_path.glob(f"previous-*/{steps_name(0)}")
    assert msgspec.json.decode(aside.read_bytes()) == line
