"""The harness on made workloads: what is reported is what was planted."""

import gc
import threading
from statistics import median

import pytest

from aorta.account.results.schema import Point
from aorta.queues.harness.iterate import set_up
from aorta.queues.harness.measure import measure_point, measure_points, measure_this_rank
from tests.queues.sleep_workloads import Overlap, Sleeps, alone, plan


def value(found: Point, name: str) -> float:
    number = found.metrics[name].value
    assert number is not None
    return number


@pytest.mark.heavy
def test_a_point_says_what_was_planted() -> None:
    """4 naps of 5 ms on 2 threads: 10 ms, 400 naps/s, 2 at a time, a bound of 2. A busy machine may only
    make naps longer."""
    found = measure_point(plan(iterations=10), alone())
    assert found.status == "measured"
    assert 10 <= value(found, "latency_p50_ms") < 25
    assert 160 < value(found, "units_per_s") <= 400
    assert 1.4 < value(found, "achieved_concurrency") <= 2
    assert 1.4 < value(found, "placement_bound") <= 2
    assert 0.4 < value(found, "slowdown.nap") < 2.5
    assert value(found, "wall_per_iteration_ms") >= value(found, "latency_mean_ms")
    assert found.metrics["samples_per_s"].value is None
    assert found.metrics["queue_switch_us"].reason == "needs a GPU"
    assert found.metrics["peak_allocated_bytes"].reason == "no GPU"
    assert found.source == "threads"
    assert found.configuration["options"] == {"sleep_ms": 5.0, "pieces": 4, "fail": False, "stop": None}
    assert found.iterations == 10


def test_overlap_of_known_lengths() -> None:
    """Compute 8 beside communication 4 ms: all hidden, efficiency 1, 4 ms gained over serial."""
    # A busy machine may wake a thread ms late, in the iterations or in the legs, which are measured one after
    # another; without overlap none of the trials would hide anything, nor be better than serial.
    trials = (measure_point(plan(Overlap, leg_rounds=8, iterations=8), alone()) for _ in range(10))
    found = next(
        one
        for one in trials
        if value(one, "hidden_ms") > 0.7 * value(one, "comm_ms")
        and (one.metrics["overlap_efficiency"].value or 0) > 0.3
    )
    assert value(found, "comm_ms") >= 4
    (run,) = found.ranks
    assert set(run.leg_ms) == {"iteration", "compute", "comm", "serial"}
    assert {len(times) for times in run.leg_ms.values()} == {8}
    together, compute, comm, serial = (median(run.leg_ms[name]) for name in run.leg_ms)
    assert (compute >= 8, comm >= 4, serial >= 12) == (True, True, True)
    assert value(found, "gained_ms") == pytest.approx(serial - together)
    expected = (serial - together) / (serial - max(compute, comm))
    assert value(found, "overlap_efficiency") == pytest.approx(expected)
    assert found.collectives == "simulated"
    assert any("simulated" in note for note in found.notes)


@pytest.mark.heavy
def test_wrong_results_are_a_failed_point() -> None:
    found = measure_point(plan(fail=True, piece_iterations=0, iterations=2), alone())
    assert found.status == "failed"
    assert found.reason == "wrong results: rank 0: asked to fail"
    assert found.metrics["latency_mean_ms"].value is not None  # what was measured is still shown


@pytest.mark.heavy
def test_points_outside_the_range_are_skipped_and_say_why() -> None:
    plans = [plan(streams=count, piece_iterations=0, iterations=1) for count in (1, 9)]
    points = list(measure_points(plans, alone()))
    assert [one.status for one in points] == ["measured", "skipped"]
    assert "uses 1 to 8 streams, not 9" in (points[1].reason or "")


@pytest.mark.heavy
def test_the_budget_cuts_iterations() -> None:
    """10 ms an iteration, 0.12 s: at most 12 of 1000 iterations, and never fewer than 8."""
    found = measure_point(plan(iterations=1000, budget_s=0.12, piece_iterations=0), alone())
    assert found.iterations is not None
    assert 8 <= found.iterations <= 12
    assert any("iterations fit into the time budget" in note for note in found.notes)


def test_iterations_are_numbered_through_all_phases() -> None:
    with set_up(plan(pieces=1), alone()) as bench:
        bench.run(3)
        bench.run_pieces(2)
        workload = bench.workload
        assert isinstance(workload, Sleeps)
        assert [index for index, _, what in workload.order if what == "start"] == [0, 1, 2, 3, 4]


def test_a_workload_is_torn_down_and_its_threads_end_when_it_fails() -> None:
    before, made = threading.active_count(), []

    class Failing(Sleeps):
        def setup(self) -> None:
            super().setup()
            made.append(self)

        def iteration(self, index: int) -> None:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        measure_this_rank(plan(Failing), alone())
    gc.collect()
    assert made[0].torn_down
    assert threading.active_count() == before


def test_pieces_are_there_when_a_workload_is_asked_for_metrics() -> None:
    class Asking(Sleeps):
        def metrics(self) -> dict[str, float | None]:
            return {"num_pieces": float(sum(p.leg == "iteration" for p in self.context.pieces)), "x_ms": None}

    found = measure_point(plan(Asking, piece_iterations=2, sleep_ms=1.0), alone())
    assert found.metrics["num_pieces"].value == 8
    assert found.metrics["x_ms"].value is None
    assert found.metrics["x_ms"].unit == "ms"


def test_a_crash_is_a_failed_point_and_the_sweep_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    class Crashing(Sleeps):
        def iteration(self, index: int) -> None:
            raise ZeroDivisionError("planted")

    quick = {"piece_iterations": 0, "iterations": 1, "sleep_ms": 0.1}
    points = list(measure_points([plan(Crashing, **quick), plan(**quick)], alone()))
    assert [one.status for one in points] == ["failed", "measured"]
    assert points[0].reason == "ZeroDivisionError: planted"
    assert "Traceback" in capfd.readouterr().err
