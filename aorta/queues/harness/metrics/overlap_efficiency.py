"""Overlap efficiency from interleaved legs: compute alone, communication alone, one after the other, and
overlapped.

    eta = (T_serial - T) / (T_serial - max(T_compute, T_comm))

1: the shorter one costs nothing. 0: as good as serial. Below 0: overlap loses.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from aorta.queues.harness.iterations.legs import ITERATION
from aorta.results.metrics import median_metric, not_measured
from aorta.results.schema import Interval, Metric

Floats = NDArray[np.float64]

NEEDED = ("compute", "comm", "serial")
NUM_DRAWS = 2000
MIN_ROUNDS = 8


def overlap_metrics(leg_ms: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Metric]:
    """Metrics of every rank's legs; the slowest rank of each round counts. {} where there are no legs."""
    names = list(leg_ms[0])
    if not names:
        return {}
    slowest = {name: np.array([legs[name] for legs in leg_ms]).max(axis=0) for name in names}
    metrics = {f"leg_{name}_ms": median_metric(values, "ms") for name, values in slowest.items()}
    if not all(name in slowest for name in NEEDED):
        return metrics
    return metrics | efficiency(slowest[ITERATION], *(slowest[name] for name in NEEDED))


def efficiency(together: Floats, compute: Floats, comm: Floats, serial: Floats) -> dict[str, Metric]:
    """Efficiency, time gained over serial, and what is left exposed, each with a bootstrap interval.

    All arguments hold one time per round, in ms. Rounds are resampled whole.
    """
    num = len(together)
    all_ms = np.stack([together, compute, comm, serial])
    t, c, m, s = (float(value) for value in np.median(all_ms, axis=1))
    drawn = np.random.default_rng(0).integers(0, num, (NUM_DRAWS, num))
    draws = np.median(all_ms[:, drawn], axis=2)
    dt, dc, dm, ds = draws
    room = ds - np.maximum(dc, dm)
    few = f"no interval: {num} rounds, {MIN_ROUNDS} are needed" if num < MIN_ROUNDS else None

    def metric(value: float, values: Floats, unit: str, higher: bool) -> Metric:
        low, high = np.percentile(values, [2.5, 97.5])
        return Metric(
            value=value,
            unit=unit,
            better="higher" if higher else "lower",
            interval=None if few else Interval(low=float(low), high=float(high)),
            error=None if few else float(values.std(ddof=1)),
            freedom=None if few else max((num - 1) / 2, 1.5),
            num=num,
            reason=few,
        )

    if float(np.percentile(room, 2.5)) <= 0:
        eta = not_measured("", "serial and the longer leg are within noise: nothing to gain", "higher")
    else:
        eta = metric((s - t) / (s - max(c, m)), (ds - dt) / room, "", True)
    return {
        "overlap_efficiency": eta,
        "gained_ms": metric(s - t, ds - dt, "ms", True),
        "exposed_over_compute_ms": metric(t - c, dt - dc, "ms", False),
        "overlap_bound_ms": metric(max(c, m), np.maximum(dc, dm), "ms", False),
    }
