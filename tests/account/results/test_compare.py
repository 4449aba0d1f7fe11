"""Comparison: matched by configuration, regression, no regression, and what cannot be told."""

import msgspec
import pytest

from aorta.account.results.compare import compare
from aorta.account.results.schema import Metric, Point
from tests.queues.documents import document, point


@pytest.mark.parametrize(
    ("test_ms", "spread", "verdict", "status"),
    [
        pytest.param(10.0, 0.01, "no regression", 0, id="same"),
        pytest.param(8.0, 0.01, "no regression", 0, id="faster"),
        pytest.param(10.2, 0.01, "no regression", 0, id="slower-within-threshold"),
        pytest.param(12.0, 0.01, "regression", 1, id="slower"),
        pytest.param(10.5, 0.05, "cannot tell", 3, id="interval-holds-the-threshold"),
        pytest.param(10.0, 0.6, "cannot tell", 3, id="too-noisy"),
    ],
)
def test_verdicts(test_ms: float, spread: float, verdict: str, status: int) -> None:
    old = document(point(ms=10.0, spread=spread, seed=1))
    new = document(point(ms=test_ms, spread=spread, seed=2))
    found = compare([old], [new], 0.05)
    assert found.verdict == verdict
    assert found.exit_status == status


@pytest.mark.parametrize(
    ("source", "test_ms", "verdict"),
    [
        pytest.param("events", 10.9, "cannot tell", id="as-much-as-runs-differ"),
        pytest.param("events", 11.5, "regression", id="more"),
        pytest.param("threads", 13.0, "cannot tell", id="threads-differ-more"),
        pytest.param("threads", 20.0, "regression", id="twice"),
        pytest.param("threads", 5.0, "no regression", id="quicker"),
    ],
)
def test_a_single_run_must_be_worse_by_more_than_runs_differ(
    source: str, test_ms: float, verdict: str
) -> None:
    old = document(point(ms=10.0, seed=1, source=source))
    found = compare([old], [document(point(ms=test_ms, seed=2, source=source))], 0.05)
    assert found.verdict == verdict
    if verdict == "cannot tell":
        assert {row.reason for row in found.rows if row.verdict == verdict} == {
            f"one run on a side, and runs may differ by {5 if source == 'events' else 50} %: "
            "give several of each"
        }


def test_several_runs_need_no_allowance() -> None:
    old = [document(point(ms=10.0 + 0.01 * seed, seed=seed)) for seed in range(3)]
    new = [document(point(ms=10.9 + 0.01 * seed, seed=10 + seed)) for seed in range(3)]
    assert compare(old, new, 0.05).verdict == "regression"


def test_position_does_not_matter() -> None:
    """Two stream counts in opposite order: by position one would be twice as slow."""
    old = document(point(1, 10, seed=1), point(2, 5, seed=2))
    new = document(point(2, 5, seed=3), point(1, 10, seed=4))
    found = compare([old], [new], 0.05)
    assert found.verdict == "no regression"
    assert {row.configuration["streams"] for row in found.rows} == {1, 2}


def test_one_bad_point_is_enough() -> None:
    old = document(point(1, 10, seed=1), point(2, 5, seed=2))
    new = document(point(1, 10, seed=3), point(2, 6, seed=4))
    found = compare([old], [new], 0.05)
    assert found.exit_status == 1
    assert {row.configuration["streams"] for row in found.rows if row.verdict == "regression"} == {2}


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"size": 2}},
        {"streams": 2},
        {"sync_mode": "none"},
        {"world_size": 2},
        {"workload": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_configurations_are_not_compared(change: dict[str, object]) -> None:
    found = compare([document(point())], [document(point(**change))], 0.05)  # type: ignore[arg-type]
    assert found.rows == []
    assert found.exit_status == 3
    assert "no configuration was measured on both sides" in found.notes


def test_a_configuration_that_vanished_cannot_pass() -> None:
    old = document(point(1, seed=1), point(2, seed=2))
    found = compare([old], [document(point(1, seed=3))], 0.05)
    assert found.exit_status == 3
    assert [one["streams"] for one in found.only_baseline] == [2]


def test_a_new_configuration_passes_and_is_named() -> None:
    found = compare([document(point(1, seed=1))], [document(point(1, seed=3), point(4))], 0.05)
    assert found.exit_status == 0
    assert [one["streams"] for one in found.only_test] == [4]


def test_a_point_that_fails_now_is_a_regression() -> None:
    found = compare([document(point(1))], [document(point(1, status="failed"))], 0.05)
    assert found.exit_status == 1


def test_points_skipped_on_both_sides_do_not_count() -> None:
    skipped = point(64, status="skipped")
    found = compare([document(point(1, seed=1), skipped)], [document(point(1, seed=2), skipped)], 0.05)
    assert found.exit_status == 0


def test_another_device_is_not_judged_unless_allowed() -> None:
    old, new = document(point(seed=1), device="H200"), document(point(seed=2), device="MI300X")
    assert compare([old], [new], 0.05).exit_status == 3
    assert compare([old], [new], 0.05, any_device=True).exit_status == 0


def test_few_iterations_cannot_tell() -> None:
    found = compare([document(point(num=5))], [document(point(num=5))], 0.05)
    assert found.exit_status == 3
    assert "5 iterations, 8 are needed" in str([row.reason for row in found.rows])


def test_several_runs_are_judged_by_their_spread() -> None:
    """Runs of 9, 10 and 11 ms: others of 9.6 to 11.6 are no news, though 11.6 against 10 alone would be."""
    old = [document(point(ms=ms, seed=seed)) for seed, ms in enumerate((9.0, 10.0, 11.0))]
    new = [document(point(ms=ms, seed=seed)) for seed, ms in enumerate((10.6, 9.6, 11.6), 5)]
    assert compare(old[1:2], new[2:], 0.02).verdict == "regression"
    assert compare(old, new, 0.02).verdict == "cannot tell"


def test_what_differs_about_the_machines_is_listed() -> None:
    found = compare([document(point(), torch="2.11")], [document(point(), torch="2.13")], 0.05)
    assert found.differences == {"versions.torch": ["2.11", "2.13"]}


def test_efficiency_is_judged_by_its_difference() -> None:
    """0.9 to 0.7 is beyond 0.05 and what runs differ by; from 0.02 to 0.01 is not, though it halves."""

    def with_eta(value: float) -> Point:
        eta = Metric(value=value, unit="", better="higher", error=0.005, freedom=20)
        made = point(seed=1)
        return msgspec.structs.replace(made, metrics=made.metrics | {"overlap_efficiency": eta})

    assert compare([document(with_eta(0.9))], [document(with_eta(0.7))], 0.05).exit_status == 1
    assert compare([document(with_eta(0.02))], [document(with_eta(0.01))], 0.05).exit_status == 0
