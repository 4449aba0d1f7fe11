"""What `aorta run` and its neighbours refuse before anything runs."""

import sys
from pathlib import Path

import click
import pytest

from aorta.cli import run
from aorta.cli.ab import ab_command
from aorta.cli.job import capture_command, top_command
from aorta.cli.run import check_module, check_output, run_command
from aorta.errors import ConfigError


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


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (ab_command, "--minutes"),
        (ab_command, "--timeout"),
        (capture_command, "--timeout-s"),
        (top_command, "--every-s"),
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
