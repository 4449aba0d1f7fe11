import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.projection.calibrate import calibrate
from aorta.projection.cli import main
from aorta.projection.validate import quantile, validate

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
measured = pytest.mark.skipif(not DATA.is_dir(), reason="measured data are not here (../shared/data)")


@pytest.fixture(scope="module")
def report():
    return validate(DATA)["files"]


@measured
def test_measured_steps(report):
    steps = report["steps.jsonl"]
    assert steps["median_abs_error_pct"] <= 6
    assert steps["p90_abs_error_pct"] <= 15
    assert steps["held_out"]["median_abs_error_pct"] <= 6
    assert len(steps["rows"]) == 38


@measured
def test_published_throughput(report):
    published = report["measured_throughput.csv"]
    assert published["median_abs_error_pct"] <= 8
    assert published["p90_abs_error_pct"] <= 18
    assert published["dense"]["p90_abs_error_pct"] <= 12
    assert published["median_abs_error_pct"] < published["naive_mfu"]["median_abs_error_pct"] * 1.5
    assert {"llama2-7b", "qwen2.5-7b"} <= set(published["unverified_models"])


@measured
def test_nothing_is_dropped_silently(report):
    published = report["measured_throughput.csv"]
    lines = (DATA / "public" / "measured_throughput.csv").read_text().splitlines()
    shown = published["rows"] + published["incomplete_rows"] + published["left_out"]
    assert len(shown) == len(lines) - 1
    assert all(row["reason"] for row in published["left_out"])


@measured
def test_calibration_beats_or_keeps_what_it_starts_from():
    found = calibrate(DATA)
    assert found["calibration"]["median_abs_error_pct"] <= 4
    assert found["held_out"]["median_abs_error_pct"] <= 6


STEP = {
    "name": "tiny",
    "world": 1,
    "dp": 1,
    "tp": 1,
    "ep": 1,
    "mbs": 1,
    "seq": 4096,
    "grad_accum": 1,
    "compile": False,
    "model": {"h": 4096, "f": 14336, "nh": 32, "nkv": 8, "V": 128256, "L": 6},
    "step_ms": 95.0,
    "tok_s_gpu": 43000.0,
}


def test_folder_with_one_file_is_enough(tmp_path):
    (tmp_path / "steps.jsonl").write_text(json.dumps(STEP) + "\n")
    files = validate(tmp_path)["files"]
    assert list(files) == ["steps.jsonl"]
    assert files["steps.jsonl"]["rows"][0]["error_pct"] == pytest.approx(0, abs=15)


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
    result = CliRunner().invoke(main, ["validate", "--data", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.stderr


def test_empty_folder_is_an_error(tmp_path):
    result = CliRunner().invoke(main, ["validate", "--data", str(tmp_path)])
    assert result.exit_code == 2


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
