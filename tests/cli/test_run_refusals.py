"""What `aorta run` and its neighbours refuse before anything runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from aorta.attach.coverage import is_held, other_runs, own_folder
from aorta.cli import run
from aorta.cli.ab import ab_command
from aorta.cli.job import capture_command
from aorta.cli.run import check_module, check_output, run_command
from aorta.errors import ConfigError
from aorta.records.launches import OUTER, VARIABLE, own_launches
from tests.records.plain_records import step
from tests.records.run_folders import run_record, write_run


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is no folder; choose another with -o"):
        check_output(tmp_path / "file" / "run")
    check_output(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_file_system_that_makes_no_folders_is_refused() -> None:
    with pytest.raises(ConfigError, match="/proc cannot be written; choose another with -o"):
        check_output(Path("/proc/aorta_run"))


@pytest.mark.parametrize("target", ["../loop:step", "loop:", ".loop:step", "loop:a..b", "a:b:c", "loop"])
def test_a_place_of_steps_in_another_form_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="--step-at must look like module:function"):
        run_command.main(["--step-at", target, "true"], standalone_mode=False)


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own_loop.py").write_text("")
    script = str(tmp_path / "train.py")
    with pytest.raises(ConfigError, match="there is no module nosuch_module"):
        check_module("nosuch_module:step", [sys.executable, script])
    check_module("own_loop:step", [sys.executable, script])
    check_module("json.decoder:step", [sys.executable, script])
    check_module("__main__:step", [sys.executable, script])
    check_module("nosuch_module:step", ["/usr/bin/env", script])


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(click.BadParameter, match=r"the path is empty; the current folder is '\.'"):
        run_command.main(["-o", "", "true"], standalone_mode=False)


@pytest.mark.processes
def test_a_command_that_fails_before_a_step_is_said_to_have_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command.main(["-o", str(tmp_path / "run"), "--", "sh", "-c", "exit 7"], standalone_mode=False)
    assert "the command ended with status 7 before a step" in capsys.readouterr().err


@pytest.mark.processes
def test_a_report_that_fails_does_not_change_the_status_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise KeyError("planted")

    monkeypatch.setattr("aorta.cli.report.write_and_print", fails)
    command = ["sh", "-c", f"sleep 0.05; echo > {tmp_path}/run.json; exit 7"]
    assert run_command.main(["-o", str(tmp_path), "--", *command], standalone_mode=False) == 7
    assert "the report failed, a mistake in aorta: KeyError: 'planted'" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "variables"),
    [([], {}), (["--continue"], {}), ([], {"SLURM_RESTART_COUNT": "1"}), ([], {"AORTA_RUN_ID": "a"})],
    ids=["new", "--continue", "requeue", "named"],
)
def test_an_earlier_run_is_not_that_of_a_command_that_recorded_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variables: dict[str, str],
) -> None:
    for name in ("SLURM_RESTART_COUNT", "AORTA_RUN_ID", "AORTA_CONTINUES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write_run(tmp_path, [step(0)], run_record(1, run_id="a"))
    (tmp_path / "mine.txt").write_text("")
    command = ["sh", "-c", f"sleep 0.05; echo > {tmp_path}/torch_profiler; exit 7"]
    assert run_command.main([*flags, "-o", str(tmp_path), "--", *command], standalone_mode=False) == 7
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"aorta: nothing was recorded in {tmp_path}: the command ended with status 7")
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("launch_")}
    if flags or variables:
        assert said[1:] == [f"aorta: the run in {tmp_path} is an earlier one"]
        assert {"run.json", "rank_0_metrics.jsonl"} <= left
        return
    (moved,) = tmp_path.glob("previous-*")
    assert said[1:] == [f"aorta: the earlier run of {tmp_path} is now in {moved}"]
    assert left == {"mine.txt", "torch_profiler", moved.name}
    assert {"run.json", "rank_0_metrics.jsonl"} <= {path.name for path in moved.iterdir()}


def test_a_run_that_was_moved_aside_is_named(tmp_path: Path) -> None:
    moved, again = tmp_path / "previous-1", tmp_path / "previous-2"
    for folder, run_ns, folder_ns in ((moved, 1, 9), (again, 7, 9), (tmp_path / "previous-0", 1, 2)):
        folder.mkdir()
        (folder / "run.json").write_bytes(b"{}")
        os.utime(folder / "run.json", ns=(run_ns, run_ns))
        os.utime(folder, ns=(folder_ns, folder_ns))
    assert list(other_runs(tmp_path, 5, tmp_path / "launch_own.jsonl")) == [
        f"aorta: the earlier run of {tmp_path} is now in {moved}",
        f"aorta: the command trained more than once; earlier runs are in {again}",
    ]


def test_a_command_beside_another_one_in_a_folder_reports_what_it_recorded_itself(tmp_path: Path) -> None:
    for folder, notes in ((tmp_path, "launch_other.jsonl"), (tmp_path / "process_7", "launch_own.jsonl")):
        write_run(folder, [step(0)], run_record(1, coverage={"launch_notes": notes}))
    for notes, recorded in (("other", tmp_path), ("own", tmp_path / "process_7"), ("neither", None)):
        assert own_folder(tmp_path, 0, tmp_path / f"launch_{notes}.jsonl") == recorded
        assert is_held(tmp_path, 0, tmp_path / f"launch_{notes}.jsonl") == (notes != "other")
    assert list(other_runs(tmp_path, 0, tmp_path / "launch_other.jsonl")) == []


def test_a_run_that_another_command_has_moved_is_found(tmp_path: Path) -> None:
    for folder, notes in ((tmp_path, "launch_other.jsonl"), (tmp_path / "previous-1", "launch_own.jsonl")):
        write_run(folder, [step(0)], run_record(1, coverage={"launch_notes": notes}))
    assert own_folder(tmp_path, 0, tmp_path / "launch_own.jsonl") == tmp_path / "previous-1"


def test_launches_within_each_other_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OUTER, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert own_launches() == []
    monkeypatch.setenv(VARIABLE, "/out/launch_b.jsonl")
    assert own_launches() == ["launch_b.jsonl"]
    monkeypatch.setenv(OUTER, "launch_a.jsonl")
    assert own_launches() == ["launch_a.jsonl", "launch_b.jsonl"]


LOOP = """
import sys, time, torch
from pathlib import Path

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    Path(f"trains_{sys.argv[1]}").touch()
while len([*Path().glob("trains_*")]) < 2:  # the other one has its folder then
    time.sleep(0.01)
"""


def test_two_commands_that_begin_at_once_in_a_folder_each_keep_their_records(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", "out", "--"]
    started = [
        subprocess.Popen(
            [*command, sys.executable, "loop.py", num], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for num in ("40", "70")
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert ["rank 0: 40 steps" in said[0], "rank 0: 70 steps" in said[1]] == [True, True]
    assert ["another command records into out" in text for text in said].count(True) == 1
    assert not any("killed" in text or "more processes" in text for text in said)
    assert not [*(tmp_path / "out").glob("previous-*")]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (ab_command, "--minutes"),
        (ab_command, "--timeout-s"),
        (capture_command, "--timeout-s"),
    ],
)
def test_a_duration_that_is_no_number_is_refused(command: click.Command, option: str) -> None:
    with pytest.raises(click.BadParameter, match="nan is no number"):
        command.main(
            [option, "nan", *(["true"] if command is ab_command else [])],
            standalone_mode=False,
        )


@pytest.mark.processes
@pytest.mark.parametrize("has_driver", [True, False], ids=["AMD", "none"])
def test_the_tool_of_rocprofiler_is_named_where_amds_driver_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    monkeypatch.setattr(run, "AMD_DRIVER", str(tmp_path) if has_driver else "/no/driver")
    monkeypatch.delenv("ROCP_TOOL_LIBRARIES", raising=False)
    out = tmp_path / "variables"
    command = ["sh", "-c", f"env > {out}"]
    run_command.main(["--kernels", "on", "-o", str(tmp_path / "run"), "--", *command], standalone_mode=False)
    assert ("ROCP_TOOL_LIBRARIES=" in out.read_text()) == has_driver


@pytest.mark.processes
def test_a_limit_of_hangs_turns_the_watchdog_on(tmp_path: Path) -> None:
    command = ["sh", "-c", f'printf %s "$AORTA_RUN" > {tmp_path}/settings']
    run_command.main(
        ["--hang-timeout-s", "3", "-o", str(tmp_path / "run"), "--", *command], standalone_mode=False
    )
    settings = json.loads((tmp_path / "settings").read_text())
    assert (settings["hang"], settings["hang_timeout_s"]) == (True, 3.0)
