"""Measured runs as rows: what is found below a folder, what is read, what is left out and why."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.cli import main
from aorta.errors import BAD_INPUT, ConfigError
from aorta.projection import measured_runs
from aorta.projection.cli import main as project_command
from aorta.projection.measured_runs import read_runs, read_steps
from aorta.records.reader import read_steps as read_lines
from tests.projection.step_line import STEP


def test_files_are_sorted_and_links_not_followed(tmp_path: Path) -> None:
    for name in ("b/x.json", "a/c/x.json", "x.json", "a/y.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert measured_runs.files_below(tmp_path, "x*.json") == [
        tmp_path / "a/c/x.json", tmp_path / "b/x.json", tmp_path / "x.json"
    ]  # fmt: skip
    assert measured_runs.folders_below(tmp_path) == [
        tmp_path,
        tmp_path / "a",
        tmp_path / "a/c",
        tmp_path / "b",
    ]


def test_a_folder_that_goes_while_it_is_walked_is_left_out(tmp_path: Path, monkeypatch) -> None:
    scandir = measured_runs.os.scandir

    def gone(place):
        if Path(place).name == "gone":
            raise FileNotFoundError(place)
        return scandir(place)

    (tmp_path / "gone").mkdir()
    (tmp_path / "x.json").touch()
    monkeypatch.setattr(measured_runs.os, "scandir", gone)
    assert measured_runs.files_below(tmp_path, "*.json") == [tmp_path / "x.json"]


def test_the_root_of_a_machine_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measured_runs, "MOST_FOLDERS", 50)
    result = CliRunner().invoke(main, ["project", "calibrate", "--measurements", "/"])
    assert result.exit_code == BAD_INPUT
    assert result.output == "error: /: holds more than 50 folders; give the one with the measurements\n"
    with pytest.raises(ConfigError, match="is not a folder"):
        measured_runs.folders_below(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "line 1", id="not-json"),
        pytest.param(json.dumps(STEP | {"world": 3}), "line 1", id="axes-do-not-fill"),
        pytest.param(json.dumps({"name": "x"}), "line 1", id="missing-keys"),
    ],
)
def test_damaged_steps_are_named(tmp_path, text, message):
    (tmp_path / "steps.jsonl").write_text(text)
    result = CliRunner().invoke(project_command, ["calibrate", "--measurements", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.stderr


def test_steps_without_optional_fields_and_with_others(tmp_path):
    bare = {key: STEP[key] for key in ("name", "world", "dp", "mbs", "seq", "model", "step_ms")}
    broken = STEP | {"name": "odd", "model": STEP["model"] | {"nh": "many"}}
    lines = [json.dumps(bare), json.dumps(STEP | {"host": "node7"}), json.dumps(broken), ""]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines))
    (first, second), (left_out,) = read_steps(tmp_path / "steps.jsonl")
    assert first.plans == second.plans
    assert (left_out.name, left_out.reason) == ("line 3 (odd)", "model has no whole number 'nh'")


def test_runs_of_the_trainer_are_rows(h200_run):
    ((row,), _) = read_runs(h200_run.parent)
    assert (row.name, row.group["world"], row.group["form"]) == ("fsdp", 2, "dp")
    medians = []
    for rank in range(2):
        steps = [step.step_ms for step in read_lines(h200_run / f"rank_{rank}_metrics.jsonl")]
        later = sorted(steps[len(steps) // 2 :])
        medians.append((later[(len(later) - 1) // 2] + later[len(later) // 2]) / 2)
    assert row.step_ms == pytest.approx(max(medians))


def test_runs_that_cannot_be_compared_say_why(h200_run):
    for name, change in {
        "fp32": lambda run: run["config"]["training"].update(precision="fp32"),
        "cpu": lambda run: [device.update(name="AMD EPYC") for device in run["devices"]],
        "bare": lambda run: run.update(layout=None),
    }.items():
        other = h200_run.parent / name
        shutil.copytree(h200_run, other)
        run = json.loads((other / "run.json").read_text())
        change(run)
        (other / "run.json").write_text(json.dumps(run))
    (h200_run.parent / "broken").mkdir()
    (h200_run.parent / "broken" / "run.json").write_text("{")
    rows, left_out = read_runs(h200_run.parent)
    assert [row.name for row in rows] == ["fsdp"]
    reasons = {row.name: row.reason for row in left_out}
    assert "fp32" in reasons["fp32"]
    assert "AMD EPYC" in reasons["cpu"]
    assert "no layout" in reasons["bare"]
    assert "not a run record" in reasons["broken"]
