"""The ranks of a run beside each other; ranks and steps that are shown span by span."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from aorta.account.judge.cells import account_of
from aorta.account.metrics import MEMORY, THROTTLED, of_operation, operations
from aorta.account.model import Run, once_of_run
from aorta.account.rows import row_percentiles
from aorta.errors import ReportError
from aorta.timeline.arrays import Flags, Floats, Ints

MEDIANS = ("step_ms", "compute_ms", "exposed_ms", "sm_clock_mhz", "power_w")
HIGHEST = ("temperature_c", *MEMORY)
"""Metrics of a rank by the number over its steps that stands for them."""


@dataclass(frozen=True, slots=True)
class JudgedRank:
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


@once_of_run
def judged_ranks(run: Run) -> list[JudgedRank]:
    """The rank that costs the others most first; where nobody is known to be late, by time in compute."""
    reasons = operations(run.metrics, THROTTLED)
    columns = {
        **{name: _over_steps(run, name) for name in MEDIANS},
        **{name: _over_steps(run, name, 100) for name in HIGHEST},
        "lowest_clock_mhz": _over_steps(run, "sm_clock_mhz", 0),
    }
    shares = {reason: _means(run.values(of_operation(THROTTLED, reason))) for reason in reasons}
    caused, num_last, num_judged = _arrivals(run)
    rows = [
        JudgedRank(
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


# -- ranks and steps that are shown --------------------------------------------------------------------------


MAX_RANKS = 16
NUM_LATE = 4
"""Ranks that cost the others most are among them."""
MOST_RECORDS = 50_000
"""Steps of all ranks that a Perfetto trace holds unless more are asked for: a gigabyte of JSON at most."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What was asked for; None of what was not."""

    ranks: Collection[int] | None = None
    steps: tuple[int, int] | None = None
    """The first and the last global step."""

    def check(self, run: Run) -> None:
        """ReportError where the run has none of these steps, or lacks a rank."""
        missing = sorted(set(self.ranks or ()) - set(run.ranks))
        if missing:
            raise ReportError(f"--ranks: {run.label} has ranks {_ends(run.ranks)}, and no rank {missing[0]}")
        if not self.columns(run).any():
            first, last = self.steps or (0, 0)
            steps = [int(run.global_step[0]), int(run.global_step[-1])]
            raise ReportError(f"--steps: {run.label} has steps {_ends(steps)}, none from {first} to {last}")

    def columns(self, run: Run) -> Flags:
        """[step]: it was asked for, or nothing was."""
        if self.steps is None:
            return np.ones(run.num_steps, dtype=bool)
        return (run.global_step >= self.steps[0]) & (run.global_step <= self.steps[1])


def telling_ranks(run: Run, shown: Shown) -> list[int]:
    """Those asked for. Else all of few; of many the latest ones, and others spread evenly from the
    least to the most exposed."""
    if shown.ranks is not None:
        return sorted(shown.ranks)
    if len(run.ranks) <= MAX_RANKS:
        return list(run.ranks)
    late = [row.rank for row in judged_ranks(run)[:NUM_LATE]]
    exposed_ms = np.nan_to_num(run.values("exposed_ms")).mean(axis=1)
    order = [i for i in np.argsort(exposed_ms, kind="stable").tolist() if run.ranks[i] not in late]
    places: Ints = np.linspace(0, len(order) - 1, MAX_RANKS - len(late)).round().astype(np.int64)
    return sorted([*late, *(run.ranks[order[i]] for i in places.tolist())])


def traced(run: Run, shown: Shown) -> tuple[list[int], set[int] | None, str]:
    """Ranks and global steps of a Perfetto trace, and what it leaves out in words; None and '' of nothing.

    What was asked for is there whole. Of the rest, where there are more than MOST_RECORDS steps of all ranks,
    the telling ranks, and of those the steps in which the slowest rank took longest.
    """
    columns = np.flatnonzero(shown.columns(run))
    ranks = list(run.ranks) if shown.ranks is None else sorted(shown.ranks)
    if shown.ranks is None and len(ranks) * len(columns) > MOST_RECORDS:
        ranks = telling_ranks(run, shown)
    num_steps = max(MOST_RECORDS // len(ranks), 1)
    is_cut = shown.steps is None and num_steps < len(columns)
    if is_cut:
        step_ms = np.nan_to_num(run.metrics["step_ms"]).max(axis=0)
        columns = np.argsort(-step_ms, kind="stable")[:num_steps]
    steps = None if shown.steps is None and not is_cut else set(run.global_step[columns].tolist())
    parts = []
    if len(ranks) < len(run.ranks):
        parts.append(f"{len(ranks)} of {len(run.ranks)} ranks")
    if steps is not None and len(steps) < run.num_steps:
        parts.append(f"{len(steps)} of {run.num_steps} steps{', the slowest ones' if is_cut else ''}")
    return ranks, steps, " and ".join(parts)


def _ends(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
