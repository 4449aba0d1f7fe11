"""A workload over its stream counts: speed-up, efficiency, bounds, and where more streams stop helping."""

import json
from collections.abc import Sequence

import numpy as np

from aorta.account.results.schema import Point, Scaling, streams_of, without_streams
from aorta.timeline.arrays import Floats
from aorta.timeline.noise import inflation
from aorta.timeline.statistics import MIN_STEPS

KNEE_SHARE = 0.95
NUM_DRAWS = 1000
THROUGHPUT = "units_per_s"


def scalings(points: Sequence[Point]) -> list[Scaling]:
    """One for each configuration that was measured at two stream counts or more."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        value = point.metrics[THROUGHPUT].value if THROUGHPUT in point.metrics else None
        if point.status == "measured" and value is not None:
            shared = json.dumps(without_streams(point.configuration), sort_keys=True)
            groups.setdefault(shared, []).append(point)
    ordered = [sorted(group, key=_streams) for group in groups.values()]
    return [_scaling(group) for group in ordered if len({_streams(point) for point in group}) > 1]


def _streams(point: Point) -> int:
    return streams_of(point.configuration)


def _value(point: Point, name: str) -> float | None:
    return point.metrics[name].value if name in point.metrics else None


def _scaling(points: Sequence[Point]) -> Scaling:
    first = points[0]
    streams = [_streams(point) for point in points]
    throughput = [_value(point, THROUGHPUT) or 0.0 for point in points]
    speedup = [rate / throughput[0] for rate in throughput]
    series = [np.max([run.iteration_ms for run in point.ranks], axis=0) for point in points]
    interval, reason = knee_interval(streams, throughput, series)
    return Scaling(
        workload=str(first.configuration["workload"]),
        configuration=without_streams(first.configuration),
        streams=streams,
        baseline_streams=streams[0],
        throughput=throughput,
        unit=first.metrics[THROUGHPUT].unit,
        speedup=speedup,
        efficiency=[rate * streams[0] / count for rate, count in zip(speedup, streams, strict=True)],
        bound=_over_first([_value(point, "placement_bound") for point in points]),
        knee=knee(streams, throughput),
        knee_interval=interval,
        knee_reason=reason,
    )


def _over_first(values: Sequence[float | None]) -> list[float | None]:
    """Values over that of the fewest streams; None where one of the two is not known."""
    first = values[0]
    return [None if value is None or not first else value / first for value in values]


def knee(streams: Sequence[int], throughput: Sequence[float]) -> int:
    """Fewest streams that reach KNEE_SHARE of the best throughput."""
    best = max(throughput)
    return next(count for count, rate in zip(streams, throughput, strict=True) if rate >= KNEE_SHARE * best)


def knee_interval(
    streams: Sequence[int], throughput: Sequence[float], series: Sequence[Floats]
) -> tuple[tuple[int, int] | None, str | None]:
    """95 % of the knees of redrawn sweeps: the iterations of every point are drawn again, in blocks."""
    fewest = min(len(values) for values in series)
    if fewest < MIN_STEPS:
        return None, f"{fewest} iterations at a point, {MIN_STEPS} are needed"
    rng = np.random.default_rng(0)
    means = np.stack([_drawn_means(values, rng) for values in series])
    drawn = np.array(throughput)[:, None] * np.stack([values.mean() for values in series])[:, None] / means
    knees = [knee(streams, column) for column in drawn.T.tolist()]
    low, high = np.percentile(knees, [2.5, 97.5], method="inverted_cdf")
    return (int(low), int(high)), None


def _drawn_means(values: Floats, rng: np.random.Generator) -> Floats:
    """Means of NUM_DRAWS redrawn series, in circular blocks as long as neighbours resemble each other."""
    num = len(values)
    try:
        block = int(np.clip(2 * float(inflation(values - values.mean())), 1, max(num // 4, 1)))
    except ImportError:  # scipy
        block = max(int(num ** (1 / 3)), 1)
    starts = rng.integers(0, num, (NUM_DRAWS, -(-num // block)))
    places = (starts[:, :, None] + np.arange(block)).reshape(NUM_DRAWS, -1)[:, :num] % num
    means: Floats = values[places].mean(axis=1)
    return means
