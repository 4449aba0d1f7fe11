"""A trace is written by a child that may crash; real children, no GPU."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from aorta.config.structs import ProfilingConfig
from aorta.record import profiler
from aorta.record.profiler import ProfilerWindow, export_trace, in_child, writes_chrome
from tests.limits import AT_ONCE_S


def settings(**changes: object) -> ProfilingConfig:
    defaults: dict[str, object] = {"enabled": True, "wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    return ProfilingConfig(**(defaults | changes))  # type: ignore[arg-type]


@pytest.mark.processes
def test_a_child_writes_the_same_trace(tmp_path: Path) -> None:
    with ProfilerWindow(settings(export="child", chrome_trace=False), tmp_path, rank=0) as window:
        for step in range(4):
            with torch.profiler.record_function(f"global_step_{step}"):
                torch.ones(4).sum()
            window.step(step)
    assert len(window.cycle_traces) == 2
    names = {event.get("name") for event in json.loads(window.cycle_traces[1].read_bytes())["traceEvents"]}
    assert {"global_step_3", "aten::sum"} <= names


@pytest.mark.processes
def test_a_crash_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def crash() -> None:
        path.write_text("half")
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(OSError, match="was ended by SIGSEGV"):
        in_child(crash, 10, path)
    assert not path.exists()


@pytest.mark.processes
def test_a_child_that_does_not_end_is_ended(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(OSError, match="did not end within 0.2 s"):
        in_child(lambda: time.sleep(60), 0.2, tmp_path / "trace.json")
    assert time.monotonic() - started_s < AT_ONCE_S


@pytest.mark.processes
def test_an_error_in_the_child_is_an_error_here(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="ended with status 1"):
        in_child(lambda: 1 / 0, 10, tmp_path / "trace.json")


@pytest.mark.processes
def test_a_lock_of_another_thread_stays_locked_in_the_child(tmp_path: Path) -> None:
    """The case that the time limit is for."""
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(OSError, match="did not end within"):
            in_child(lock.acquire, 0.3, tmp_path / "trace.json")
    finally:
        done.set()
        thread.join()


@pytest.mark.processes
@pytest.mark.parametrize(("rocm", "mode"), [(True, "auto"), (False, "child")])
def test_on_rocm_a_child_writes_by_default(
    rocm: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "is_rocm", lambda: rocm)
    path = tmp_path / "trace.json"
    export_trace(lambda name: Path(name).write_text(str(os.getpid())), path, settings(export=mode))
    assert int(path.read_text()) != os.getpid()


@pytest.mark.processes
def test_elsewhere_the_process_writes_itself(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    export_trace(lambda name: Path(name).write_text(str(os.getpid())), path, settings())
    assert int(path.read_text()) == os.getpid()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rocm", "asked", "written", "said"),
    [(False, None, True, False), (True, None, False, True), (True, True, True, False)],
)
def test_chrome_traces_are_off_on_rocm_unless_asked_for(
    rocm: bool,
    asked: bool | None,
    written: bool,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(profiler, "is_rocm", lambda: rocm)
    assert writes_chrome(settings(chrome_trace=asked)) == written
    assert ("its export has crashed runs" in caplog.text) == said
