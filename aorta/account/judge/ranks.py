"""The ranks of a run beside each other."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.cells import account_of
from aorta.account.metrics import THROTTLED, of_operation, operations
from aorta.account.model import Run
from aorta.account.rows import row_percentiles

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank over the judged steps. Medians over its steps, None where it was not measured."""

    rank: int
    step_ms: float | None
    compute_ms: float | None
    exposed_ms: float | None
    caused_ms: float | None
    """What each of the other ranks is exposed in waiting for this one, the mean over steps."""
    num_last: int
    num_judged: int
    sm_clock_mhz: float | None
    lowest_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    """The highest."""
    peak_memory_bytes: float | None
    reserved_memory_bytes: float | None
    device_memory_bytes: float | None
    """The highest, as of the other memory."""
    throttling: dict[str, float]
    """Reason -> part of the steps."""

    @property
    def share_last(self) -> float:
        return self.num_last / self.num_judged if self.num_judged else 0.0


def rank_rows(judged: Run) -> list[RankRow]:
    """The rank that costs the others most first; where nobody is known to be late, by time in compute."""
    return list(judged.once("rank_rows", lambda: _rank_rows(judged)))


def _rank_rows(run: Run) -> list[RankRow]:
    reasons = operations(run.metrics, THROTTLED)
    columns = {
        "step_ms": _over_steps(run, "step_ms"),
        "compute_ms": _over_steps(run, "compute_ms"),
        "exposed_ms": _over_steps(run, "exposed_ms"),
        "sm_clock_mhz": _over_steps(run, "sm_clock_mhz"),
        "lowest_clock_mhz": _over_steps(run, "sm_clock_mhz", 0),
        "power_w": _over_steps(run, "power_w"),
        "temperature_c": _over_steps(run, "temperature_c", 100),
        "peak_memory_bytes": _over_steps(run, "peak_memory_bytes", 100),
        "reserved_memory_bytes": _over_steps(run, "reserved_memory_bytes", 100),
        "device_memory_bytes": _over_steps(run, "device_memory_bytes", 100),
    }
    shares = {reason: _means(run.values(of_operation(THROTTLED, reason))) for reason in reasons}
    caused, num_last, num_judged = _arrivals(run)
    rows = [
        RankRow(
            rank=rank,
            **{name: _or_none(values[i]) for name, values in columns.items()},
            caused_ms=_or_none(caused[i]),
            num_last=int(num_last[i]),
            num_judged=int(num_judged[i]),
            throttling={name: float(values[i]) for name, values in shares.items() if values[i] > 0},
        )
        for i, rank in enumerate(run.ranks)
    ]
    return sorted(
        rows, key=lambda row: (-(row.caused_ms or 0.0), -row.share_last, -(row.compute_ms or 0.0), row.rank)
    )


def _arrivals(judged: Run) -> tuple[Floats, Floats, Floats]:
    """Per rank over the judged steps: its cost to the others in a step, how often it came last, of how many
    collectives."""
    run_arrivals = judged.arrivals
    if run_arrivals is None:
        zeros = np.zeros(len(judged.ranks))
        return np.full(len(judged.ranks), np.nan), zeros, zeros
    exposed = account_of(judged).exposed
    return (
        np.zeros(len(judged.ranks)) if exposed is None else exposed.caused_ms.mean(axis=1),
        run_arrivals.num_last[:, judged.judged_steps].sum(axis=1),
        run_arrivals.num_judged[:, judged.judged_steps].sum(axis=1),
    )


def _over_steps(judged: Run, name: str, percentile: float = 50) -> Floats:
    """Percentile of each rank over the judged steps; NaN where it has no value."""
    if name not in judged.metrics:
        return np.full(len(judged.ranks), np.nan)
    statistic = judged.statistics.get(name)
    if statistic is not None and statistic.median is None:
        return np.full(len(judged.ranks), np.nan)
    return row_percentiles(judged.values(name), (percentile,))[0]


def _means(values: Floats) -> Floats:
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
