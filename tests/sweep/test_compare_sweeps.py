"""Two sweeps of training runs: calibrated numbers meet calibrated ones, or raw ones are compared."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.account.results.compare_sweeps import compare_sweeps
from aorta.account.results.schema import Document, Interval, Metric, Point, Setting, write_document
from aorta.queues.cli.compare import compare_command
from tests.dist.launch import run_python

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(
    platform="cpu", devices=[], world_size=1, backend=None, versions={}, environment={}, queues="none"
)


def metric(value, **changes):
    """Known to 0.5 %."""
    error = 0.005 * value
    return Metric(
        value=value, unit="ms", interval=Interval(low=value - 2 * error, high=value + 2 * error), error=error,
        freedom=20.0, **changes,
    )  # fmt: skip


def point(x=1, raw=2.0, calibrated=None, good_for=0.2):
    metrics = {name: metric(value, better="lower") for name, value in (("comm_ms", 4.0), ("exposed_ms", raw))}
    if calibrated is not None:
        metrics["calibrated.comm_ms"] = metric(4.0)
        metrics["calibrated.exposed_ms"] = metric(calibrated)
        metrics["accuracy.exposed_ms"] = Metric(value=good_for, unit="ms")
    return Point(configuration={"a.x": x}, status="measured", metrics=metrics, source="events")


def sweep(*points):
    return Document(kind="training", created_unix_ns=1, setting=SETTING, points=list(points))


def compared(baseline, test):
    return compare_sweeps([sweep(*baseline)], [sweep(*test)], 0.05)


def verdicts(found):
    return {row.metric: row.verdict for row in found.rows}


def test_calibrated_numbers_are_judged_where_both_sides_have_them():
    """Raw ones alone would be a regression by half."""
    found = compared([point(raw=2.0, calibrated=2.0)], [point(raw=3.0, calibrated=2.0)])
    assert verdicts(found) == {
        "calibrated.comm_ms": "no regression",
        "calibrated.exposed_ms": "no regression",
    }
    assert found.verdict == "no regression"
    assert found.notes == []


def test_a_regression_that_only_calibrated_numbers_show_is_one():
    found = compared([point(raw=2.0, calibrated=2.0)], [point(raw=2.0, calibrated=3.0)])
    assert verdicts(found)["calibrated.exposed_ms"] == "regression"
    assert found.exit_status == 1


def test_where_one_side_has_them_raw_ones_are_compared_and_it_is_said():
    found = compared([point(calibrated=1.0), point(2)], [point(), point(2)])
    assert verdicts(found) == {"comm_ms": "no regression", "exposed_ms": "no regression"}
    assert found.verdict == "no regression"
    assert found.notes == [
        "raw numbers are compared of 1 of 2 configurations, though some runs of these have calibrated ones:"
        " x=1: no calibrated numbers are kept of it"
    ]


def test_what_calibration_does_not_tell_is_no_regression():
    """0.15 ms of 2 are 7.5 % and surely no chance, but calibration is good for 0.2."""
    found = compared([point(calibrated=2.0)], [point(calibrated=2.15)])
    (row,) = [row for row in found.rows if row.metric == "calibrated.exposed_ms"]
    assert (row.verdict, row.reason) == (
        "cannot tell",
        "the difference is smaller than the calibration error",
    )
    assert found.verdict == "cannot tell"


def test_a_configuration_that_broke_stays_a_regression():
    broken = Point(configuration={"a.x": 2}, status="failed", reason="too much")
    found = compared([point(calibrated=2.0), point(2)], [point(calibrated=2.15), broken])
    assert found.verdict == "regression"


@pytest.mark.parametrize(
    ("calibrated", "status"),
    [pytest.param(None, 1, id="raw"), pytest.param(2.0, 0, id="calibrated")],
)
def test_script_and_command_name_the_numbers_that_they_judge(tmp_path, calibrated, status):
    files = []
    for name, raw in (("a", 2.0), ("b", 3.0)):
        files.append(tmp_path / f"{name}.json")
        write_document(files[-1], sweep(point(raw=raw, calibrated=calibrated)))
    told = CliRunner().invoke(compare_command, ["-b", str(files[0]), "-t", str(files[1])])
    assert told.exit_code == status, told.output
    assert ("calibrated.exposed_ms" in told.output) == (calibrated is not None)
    command = [ROOT / "scripts" / "analyze_sweep_results.py", "--plot", tmp_path / "c.png"]
    result = run_python(*command, "--baseline", files[0], "--test", files[1])
    assert result.returncode == status, result.stderr
    assert ("calibrated.exposed_ms" in result.stdout) == (calibrated is not None)
