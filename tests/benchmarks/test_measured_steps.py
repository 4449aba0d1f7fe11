"""Measured runs as rows: what is found below a folder, what is read, what is left out and why."""

import json
import sys
from pathlib import Path

import pytest

from aorta.errors import ConfigError
from tests.projection.step_line import STEP

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection import measured_steps
from projection.measured_steps import read_steps


def test_files_are_sorted_and_links_not_followed(tmp_path: Path) -> None:
    for name in ("b/x.json", "a/c/x.json", "x.json", "a/y.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert measured_steps.files_below(tmp_path, "x*.json") == [
        tmp_path / "a/c/x.json", tmp_path / "b/x.json", tmp_path / "x.json"
    ]  # fmt: skip
    assert measured_steps.folders_below(tmp_path) == [
        tmp_path,
        tmp_path / "a",
        tmp_path / "a/c",
        tmp_path / "b",
    ]


def test_a_folder_that_goes_while_it_is_walked_is_left_out(tmp_path: Path, monkeypatch) -> None:
    scandir = measured_steps.os.scandir

    def gone(place):
        if Path(place).name == "gone":
            raise FileNotFoundError(place)
        return scandir(place)

    (tmp_path / "gone").mkdir()
    (tmp_path / "x.json").touch()
    monkeypatch.setattr(measured_steps.os, "scandir", gone)
    assert measured_steps.files_below(tmp_path, "*.json") == [tmp_path / "x.json"]


def test_the_root_of_a_machine_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measured_steps, "MOST_FOLDERS", 50)
    with pytest.raises(ConfigError, match="/: holds more than 50 folders; give the one"):
        measured_steps.files_below(Path("/"), "*")
    with pytest.raises(ConfigError, match="is not a folder"):
        measured_steps.folders_below(tmp_path / "none")


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
    with pytest.raises(ConfigError, match=message):
        read_steps(tmp_path / "steps.jsonl")


def test_steps_without_optional_fields_and_with_others(tmp_path):
    bare = {key: STEP[key] for key in ("name", "world", "dp", "mbs", "seq", "model", "step_ms")}
    broken = STEP | {"name": "odd", "model": STEP["model"] | {"nh": "many"}}
    lines = [json.dumps(bare), json.dumps(STEP | {"host": "node7"}), json.dumps(broken), ""]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines))
    (first, second), (left_out,) = read_steps(tmp_path / "steps.jsonl")
    assert first.plans == second.plans
    assert (left_out.name, left_out.reason) == ("line 3 (odd)", "model has no whole number 'nh'")
