"""Factors fitted to measured steps, and the file that takes them to a projection."""

import json

import pytest
from click.testing import CliRunner

from aorta.projection.calibrate import calibrate, quantile
from aorta.projection.cli import main
from tests.larger_data import FOLDER, needs_data
from tests.projection.step_line import STEP


@pytest.mark.heavy
@needs_data()
def test_calibration_beats_or_keeps_what_it_starts_from():
    found = calibrate(FOLDER)
    assert found["calibration"]["median_abs_error_pct"] <= 4
    assert found["held_out"]["median_abs_error_pct"] <= 6


def test_the_factors_of_own_runs_are_used(h200_run, tmp_path):
    """calibrate reads the folders that aorta.training leaves; performance takes what it wrote."""
    mine, job = tmp_path / "mine.json", ["--model", "llama3-8b", "--gpu-arch", "h200", "--json"]
    done = CliRunner().invoke(main, ["calibrate", "--measurements", str(h200_run), "--output", str(mine)])
    assert done.exit_code == 0, done.output
    factors = json.loads(mine.read_text())["factors"]
    found = CliRunner().invoke(main, ["explain", "--no-ablation", *job, "--calibration", str(mine)])
    assert json.loads(found.stdout)["factors"].items() >= factors.items()


def test_runs_of_several_parts_are_one_line(h200_run):
    other = h200_run.parent / "other"
    other.mkdir()
    for path in h200_run.iterdir():
        (other / path.name).write_text(path.read_text().replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    result = CliRunner().invoke(main, ["calibrate", "--measurements", str(h200_run.parent)])
    assert result.exit_code == 2
    assert "has runs on h100 and h200; give a folder with runs on one GPU" in result.stderr


def test_nothing_to_calibrate_on_is_one_line(tmp_path):
    result = CliRunner().invoke(main, ["calibrate", "--measurements", str(tmp_path)])
    assert result.exit_code == 2
    assert "has neither steps.jsonl nor folders of runs" in result.stderr


def test_single_runs_calibrate_and_hold_nothing_out(tmp_path):
    (tmp_path / "steps.jsonl").write_text(json.dumps(STEP) + "\n")
    assert calibrate(tmp_path)["held_out"] is None


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        pytest.param(0.5, 2.5, id="median"),
        pytest.param(0.0, 1.0, id="least"),
        pytest.param(1.0, 4.0, id="most"),
    ],
)
def test_quantile_is_linear_between_values(share, expected):
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == expected
