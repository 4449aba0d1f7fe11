import sys
from functools import cache
from pathlib import Path

import msgspec
import pytest

from aorta.hardware.part import load_hardware
from tests.larger_data import FOLDER, needs_data

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.kernel_sheets import (
    CALIBRATION,
    HELD_OUT,
    NUM_CONSTANTS,
    file_report,
    half_of,
    leave_one_out,
    residual_interval,
    sheet_names,
)


@cache
def report():
    folder = FOLDER / "h200"
    return {name: file_report(folder / name, load_hardware("h200")) for name in sheet_names(folder)}


@needs_data()
@pytest.mark.parametrize(
    ("name", "median_pct", "p90_pct"),
    [
        pytest.param("gemm.csv", 3, 8, id="gemm"),
        pytest.param("sdpa.csv", 6, 12, id="attention"),
        pytest.param("collectives_x2.csv", 10, 15, id="collectives-2"),
        pytest.param("collectives_x4.csv", 10, 25, id="collectives-4"),
        pytest.param("memory.csv", 5, 5, id="memory"),
    ],
)
def test_held_out_half_is_predicted(name, median_pct, p90_pct):
    held_out = report()[name].held_out
    assert held_out.num_rows >= 7
    assert held_out.median_abs_error_pct < median_pct
    assert held_out.p90_abs_error_pct < p90_pct


@needs_data()
@pytest.mark.parametrize("name", ["gemm.csv", "sdpa.csv", "collectives_x2.csv", "collectives_x4.csv"])
def test_the_fit_is_not_much_better_than_the_rest(name):
    """Few constants: what was fitted may be at most 4 points of median error ahead."""
    file = report()[name]
    assert file.held_out.median_abs_error_pct - file.calibration.median_abs_error_pct < 4


@needs_data()
def test_intervals_of_the_vendor_file_are_the_residuals():
    fitted = load_hardware("h200").efficiency
    rows = {name: [row for row in file.rows if row.judged] for name, file in report().items()}
    found = {
        "gemm": residual_interval(rows["gemm.csv"], NUM_CONSTANTS["gemm.csv"]),
        "collective": residual_interval(
            rows["collectives_x2.csv"] + rows["collectives_x4.csv"], NUM_CONSTANTS["collectives_x2.csv"]
        ),
    }
    for family in ("flash", "cudnn"):
        found[family] = residual_interval(
            [row for row in rows["sdpa.csv"] if row.name.startswith(family)], NUM_CONSTANTS["sdpa.csv"] // 2
        )
    for name, interval in found.items():
        assert getattr(fitted, name).interval.low == pytest.approx(interval.low, abs=0.01)
        assert getattr(fitted, name).interval.high == pytest.approx(interval.high, abs=0.01)


@needs_data()
def test_intervals_hold_about_as_many_as_they_say():
    held_out = report()["gemm.csv"].held_out
    assert 0.7 < held_out.in_interval < 0.9


@needs_data()
def test_every_row_of_every_file_is_in_the_report():
    for name, file in report().items():
        lines = len((FOLDER / "h200" / name).read_text().splitlines()) - 1
        assert len(file.rows) == lines * (2 if name == "sdpa.csv" else 1)
        assert file.calibration.num_rows + file.held_out.num_rows + file.not_judged.num_rows == len(file.rows)


def test_twins_are_in_the_same_half():
    assert half_of(1, 2) == half_of(1, 2)
    assert {half_of(n) for n in range(20)} == {CALIBRATION, HELD_OUT}


def test_leaving_out_widens_residuals():
    """10 rows, 2 constants: each residual over 1 - 2/10."""
    assert leave_one_out([0.08] * 10, 2) == pytest.approx([0.1] * 10)


def test_what_is_there_is_read(tmp_path):
    """One made-up copy, 10 % slower than 2 GiB over 4.3 TB/s and 3 us."""
    measured_ms = 1.1e3 * (2**31 / 4.3e12 + 3e-6)
    (tmp_path / "memory.csv").write_text(f"op,mib,ms,gib_per_s\ncopy,1024,{measured_ms},0\n")
    file = file_report(tmp_path / "memory.csv", load_hardware("h200"))
    assert file.median_abs_error_pct == pytest.approx(100 / 11)
    assert file.rows[0].error_pct == pytest.approx(-100 / 11)
    assert msgspec.json.decode(msgspec.json.encode(file))["calibration"]["num_rows"] == 0
