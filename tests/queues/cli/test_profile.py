"""Which profiler runs, and how it is called."""

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.queues.cli import main
from aorta.queues.cli.profile import command_line, installed


@pytest.mark.parametrize(
    ("hip", "has_gpu", "tools", "expected"),
    [
        (True, True, ("rocprofv3", "nsys"), "rocprofv3"),
        (False, True, ("rocprofv3", "nsys"), "nsys"),
        (False, True, (), "torch"),
        (True, True, ("nsys",), "torch"),
        (False, False, ("nsys",), "torch"),
    ],
)
def test_the_vendors_profiler_where_it_is_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hip: bool,
    has_gpu: bool,
    tools: tuple[str, ...],
    expected: str,
) -> None:
    for tool in tools:
        path = tmp_path / tool
        path.write_text("#!/bin/sh\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed(hip, has_gpu) == expected


@pytest.mark.parametrize("profiler", ["rocprofv3", "nsys"])
def test_the_run_comes_last_and_the_trace_where_it_was_asked_for(profiler: str) -> None:
    run = ["python", "-m", "aorta.hw_queue_eval", "run", "moe"]
    command = command_line(profiler, Path("traces"), "moe_streams8", run)  # type: ignore[arg-type]
    assert command[0] == profiler
    assert command[-len(run) :] == run
    assert any("moe_streams8" in part for part in command)


@pytest.mark.heavy
def test_profile_leaves_a_trace(tmp_path: Path) -> None:
    arguments = [
        "profile",
        "tiny_kernel_stress",
        "--streams",
        "2",
        "--profiler",
        "torch",
        "--iterations",
        "2",
    ]
    arguments += ["--profile-dir", str(tmp_path), "--no-pieces", "--warmup", "1", "--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    path = tmp_path / "tiny_kernel_stress_streams2_rank0.pt.trace.json"
    assert path.exists()
    assert f"wrote {path}" in result.stdout
    operations = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "cpu_op"]
    assert len({event["tid"] for event in operations}) == 2  # of the two workers that stand for streams
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2
    assert "already exists" in again.stderr


def test_a_profiler_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(main, ["profile", "tiny_kernel_stress", "--profiler", "nsys"])
    assert result.exit_code == 2
    assert result.stderr == "error: --profiler nsys is not on PATH\n"


@pytest.mark.heavy
def test_a_profiler_that_wrote_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nsys"
    tool.write_text("#!/bin/sh\nexit 0\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    arguments = ["profile", "tiny_kernel_stress", "--profiler", "nsys", "--profile-dir", str(tmp_path / "p")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "error: nsys wrote no trace into" in result.stderr
