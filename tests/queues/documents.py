"""Documents made by hand: points with chosen throughputs and spreads."""

from typing import Any

import numpy as np

from aorta.account.results.metrics import mean_metric, median_metric, rate_metric
from aorta.account.results.schema import Checked, Document, Memory, Metric, Point, RankRun, Setting, Status


def rank_run(iteration_ms: list[float], rank: int = 0) -> RankRun:
    return RankRun(
        rank=rank,
        device="made",
        iteration_ms=iteration_ms,
        enqueue_ms=[0.1] * len(iteration_ms),
        device_ms=sum(iteration_ms),
        wall_ms=sum(iteration_ms),
        launch_bound=False,
        operations=1,
        samples=0,
        units=10,
        memory=Memory(reason="made"),
        check=Checked(ok=True, detail="made"),
        concurrency=None,
        leg_ms={},
        workload_metrics={},
        device_bound_ms=Metric(value=None, unit="ms", reason="made"),
        notes=[],
        telemetry=None,
        telemetry_reason="made",
    )


def point(
    streams: int = 1, ms: float = 10.0, spread: float = 0.01, num: int = 40, seed: int = 0, **more: Any
) -> Point:
    """10 units an iteration; iteration times are normal with that relative spread."""
    status: Status = more.pop("status", "measured")
    options = more.pop("options", {"size": 1})
    source = more.pop("source", "events")
    configuration = {"workload": "made", "streams": streams, "sync_mode": "per_iteration", "size": "small",
                     "seed": 0, "device": "cpu", "world_size": 1, "options": options} | more  # fmt: skip
    if status != "measured":
        return Point(configuration=configuration, status=status, reason="asked to")
    series = ms * (1 + spread * np.random.default_rng(seed).normal(size=num))
    mean = mean_metric(series, "ms")
    rate = 1e4 / float(series.mean())
    return Point(
        configuration=configuration,
        status=status,
        metrics={
            "latency_mean_ms": mean,
            "latency_p50_ms": median_metric(series, "ms"),
            "units_per_s": rate_metric(10, mean, rate, "units/s"),
        },
        source=source,
        ranks=[rank_run(series.tolist())],
    )


def document(*points: Point, device: str = "made", **versions: str | None) -> Document:
    return Document(
        kind="queues",
        created_unix_ns=1,
        setting=Setting(
            platform="cpu",
            devices=[{"name": device}],
            world_size=1,
            backend=None,
            versions=versions,
            environment={},
            queues="none",
        ),
        points=list(points),
    )
