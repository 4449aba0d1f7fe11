"""What a sweep prints: no number is cut on 80 columns, and a speed-up above its bound is questioned."""

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from aorta.account.results.schema import Interval, Metric, Point, Scaling
from aorta.queues.cli.show import _sweep, questions
from tests.queues.documents import point

WIDEST = 0.012345
"""Of the numbers that are printed, those just above a power of ten need most characters."""


def scaling(speedup: list[float], bound: list[float | None]) -> Scaling:
    count = len(speedup)
    return Scaling(
        workload="made", configuration={}, streams=list(range(1, count + 1)),
        baseline_streams=1, throughput=speedup, unit="units/s", speedup=speedup,
        efficiency=[WIDEST / 10] * count, bound=bound, knee=1,
        knee_interval=None,
    )  # fmt: skip


def rated(streams: int, low: float | None, high: float | None, unit: str = "units/s") -> Point:
    made = point(streams)
    interval = None if low is None else Interval(low=low, high=high)
    rate = Metric(value=98765.4, unit=unit, interval=interval)
    small = Metric(value=WIDEST, unit="ms")
    latencies = dict.fromkeys(("latency_p50_ms", "latency_p99_ms", "achieved_concurrency"), small)
    return msgspec.structs.replace(made, metrics=made.metrics | latencies | {"units_per_s": rate})


@pytest.mark.parametrize("unit", ["kernels/s", "operations/s", "GEMMs and collectives/s"])
def test_no_number_of_a_sweep_is_cut_on_80_columns(unit: str) -> None:
    points = [rated(streams, 1.0, 123456.7, unit) for streams in (1, 64)]
    made = msgspec.structs.replace(scaling([WIDEST] * 2, [WIDEST] * 2), streams=[1, 64])
    output = StringIO()
    Console(file=output, width=80).print(_sweep(points, made))
    text = output.getvalue()
    assert "…" not in text
    assert unit in text
    assert text.count("98765") == 2
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("low", "high", "bound", "said"),
    [
        (150.0, 170.0, 2.0, None),
        (150.0, 170.0, 1.3, "beyond the scatter: at 1 streams more than the placement of work held it up"),
        (120.0, 200.0, 1.5, "within the scatter of the rates"),
        (None, None, 1.5, "no interval tells it from scatter"),
        (150.0, 170.0, None, None),
    ],
    ids=["below", "above", "scatter", "no-interval", "no-bound"],
)
def test_a_speed_up_above_its_bound_is_questioned(
    low: float | None, high: float | None, bound: float | None, said: str | None
) -> None:
    # one stream gives 95 to 105 a second, two give 160: a speed-up of 1.6, at least low / 105
    lines = questions([rated(1, 95.0, 105.0), rated(2, low, high)], scaling([1.0, 1.6], [1.0, bound]))
    if said is None:
        assert lines == []
    else:
        assert lines[0].startswith(f"speed-up above its bound at 2 streams: {said}")
