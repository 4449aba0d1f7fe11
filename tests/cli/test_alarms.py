"""aorta top --alarm: where an alarm goes, and when watching is over."""

import json
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from aorta.account.judge.late import LateRank
from aorta.account.newest import Newest
from aorta.cli import job
from aorta.cli import main as command
from aorta.errors import BAD_INPUT, CANNOT_TELL, FINE, VIOLATED
from aorta.records.digests import SLOT
from aorta.records.writer import write_json
from tests.records.plain_records import run as plain_run

Top = Callable[..., Result]


def _look(number: int) -> job._Look:
    """Two ranks at step `number`, the second late from step 2 on."""
    slots = np.zeros(2, SLOT)
    slots["rank"], slots["world_size"], slots["global_step"] = (0, 1), 2, number
    slots["num_steps"], slots["median_step_ms"] = number + 1, 20.0
    late = LateRank(1, 6.0) if number >= 2 else None
    return job._Look(slots, Newest([], late), [], True)


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Top:
    """Runs the command on a job that ends after ten looks; nothing waits."""
    numbers = iter(range(10))

    def look(rows: int | None) -> job._Look:
        number = next(numbers)
        if number == 9:
            write_json(tmp_path / "run.json", plain_run(finished_unix_ns=2))
        return _look(number)

    monkeypatch.setattr(job, "_looks", lambda run: look)
    monkeypatch.setattr("aorta.cli.job.time.sleep", lambda seconds: None)
    return lambda *args: CliRunner().invoke(command, ["top", str(tmp_path), *map(str, args)])


def test_the_first_alarm_is_an_exit_status(top: Top) -> None:
    result = top("--alarm", "exit")
    assert (result.exit_code, result.stdout) == (
        VIOLATED,
        "straggler at step 4: rank 1 is late: it costs 6.0 ms a step\n",
    )


def test_an_alarm_is_a_line_of_a_file_until_the_job_ends(top: Top, tmp_path: Path) -> None:
    assert top("--alarm", tmp_path / "alarms.jsonl").exit_code == FINE
    (line,) = (tmp_path / "alarms.jsonl").read_text().splitlines()
    alarm = json.loads(line)
    assert (alarm["kind"], alarm["ranks"], alarm["global_step"]) == ("straggler", [1], 4)


def test_an_alarm_is_posted(top: Top) -> None:
    bodies: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert top("--alarm", f"http://127.0.0.1:{server.server_port}/hook").exit_code == FINE
        server.shutdown()
    assert [(body["kind"], body["ranks"]) for body in bodies] == [("straggler", [1])]


def test_a_target_that_cannot_be_told_is_said_and_watching_goes_on(top: Top, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = top("--alarm", tmp_path / "pipe")
    assert (result.exit_code, result.stderr.count("cannot tell")) == (FINE, 1)


def test_a_secret_of_a_web_address_is_not_printed(top: Top) -> None:
    result = top("--alarm", "http://user:pass@127.0.0.1:9/hook/T0KEN?key=S3CRET")
    assert "cannot tell" in result.stderr
    assert not any(secret in result.output for secret in ("pass@", "S3CRET", "T0KEN"))


def test_targets_that_cannot_be_are_refused(top: Top, tmp_path: Path) -> None:
    assert top("--alarm", tmp_path / "missing" / "file").exit_code == BAD_INPUT
    assert top("--alarm", "exit", "--once").exit_code == BAD_INPUT
    for wrong in (tmp_path, "http://", "http://127.0.0.1:abc/hook", "http://[::1"):
        assert top("--alarm", wrong).exit_code == BAD_INPUT


def test_a_job_without_a_step_cannot_be_told(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", plain_run(finished_unix_ns=2))
    assert CliRunner().invoke(command, ["top", str(tmp_path), "--alarm", "exit"]).exit_code == CANNOT_TELL
