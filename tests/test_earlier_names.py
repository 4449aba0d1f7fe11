"""Commands that were documented under another module's name keep it."""

import importlib
import runpy
import sys

import pytest

DOORS = {
    "aorta.hw_queue_eval.__main__": "aorta.queues.cli",
    "aorta.host_ir.__main__": "aorta.programs.cli",
}


@pytest.mark.parametrize(("earlier", "home"), DOORS.items())
def test_a_command_of_an_earlier_name_is_the_command_of_today(earlier, home):
    assert importlib.import_module(earlier).main is importlib.import_module(home).main


@pytest.mark.parametrize("command", ["hang", "merge"])
def test_the_profilers_of_old_are_commands_of_aorta(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "--help"])
    with pytest.raises(SystemExit) as ending:
        runpy.run_module(f"aorta.profilers.{command}", run_name="__main__")
    assert ending.value.code == 0
    assert f" {command} [OPTIONS] [RUN]" in capsys.readouterr().out.splitlines()[0]
