"""Statistics of a run, and of the runs of a label together."""

import warnings
from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.load.evidence import comm_evidence
from aorta.account.load.rank.kernels import NAME_COUNT, NAME_TIME
from aorta.account.load.waits import is_of_transfer
from aorta.account.metrics import metric_key, of_operation
from aorta.account.model import CollectiveKind, CollectiveRow, Dataset, Run, Statistic
from aorta.account.numbers import none_if_nan
from aorta.account.rows import row_medians_and_percentile
from aorta.errors import ReportError
from aorta.timeline.collective import busbw_factor
from aorta.timeline.statistics import WARMUP_RULE, warmup_steps


def judge(run: Run, num_warmup: int | None = None) -> Run:
    """Statistics without the warm-up: num_warmup steps, or by WARMUP_RULE."""
    rule = "as asked for"
    if num_warmup is None:
        rule, num_warmup = WARMUP_RULE, _warmup_of(run)
    if num_warmup >= run.num_steps:
        raise ReportError(
            f"{run.label}: warm-up of {num_warmup} leaves no step: {run.num_steps} were recorded"
        )
    return msgspec.structs.replace(
        run,
        num_warmup=num_warmup,
        warmup_rule=rule,
        statistics={name: statistic(values[:, num_warmup:]) for name, values in run.metrics.items()},
        collective_rows=collective_rows(run, num_warmup),
    )


def _warmup_of(run: Run) -> int:
    """Steps of the warm-up, judged by those that were timed: the others lack what timing costs, and beside
    them all timed steps at the beginning would seem slow."""
    step_ms = run.metrics["step_ms"]
    timed = np.flatnonzero(~run.left_out)
    if len(timed) in (0, run.num_steps):
        return warmup_steps(step_ms)
    num_timed = warmup_steps(step_ms[:, timed])
    return int(timed[num_timed - 1]) + 1 if num_timed else 0


def dataset(label: str, runs: list[Run]) -> Dataset:
    """The runs of a label, which must be of the same kind."""
    for attribute, kinds in (
        ("ranks", sorted({len(judged.ranks) for judged in runs})),
        ("source", sorted({judged.source for judged in runs})),
    ):
        if len(kinds) > 1:
            raise ReportError(
                f"{label}: its runs differ in {attribute} ({', '.join(map(str, kinds))});"
                " runs that are not alike need labels of their own"
            )
    names = dict.fromkeys(name for judged in runs for name in judged.statistics)
    together = {name: _together([judged.statistics.get(name) for judged in runs]) for name in names}
    together |= {name: _together([None]) for name in names if is_unlike(runs, name)}
    return Dataset(label, runs, runs[0].statistics if len(runs) == 1 else together)


def statistic(values: NDArray[np.float64]) -> Statistic:
    """Statistic of values [rank, step] without the steps in which it was not measured (NaN)."""
    medians, p95 = row_medians_and_percentile(values, 95)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what no rank has: NaN, wanted here
        middle, least, greatest = np.nanmedian(medians), np.nanmin(medians), np.nanmax(medians)
        across_ranks = (middle, np.nanmedian(p95), least, greatest)
    return Statistic(*(none_if_nan(float(value)) for value in across_ranks))


def _together(of_runs: list[Statistic | None]) -> Statistic:
    measured = [statistic for statistic in of_runs if statistic is not None and statistic.median is not None]
    if len(measured) < len(of_runs):
        return Statistic(None, None, None, None)
    return Statistic(
        median=float(np.mean([statistic.median for statistic in measured if statistic.median is not None])),
        p95=float(np.mean([statistic.p95 for statistic in measured if statistic.p95 is not None])),
        min=min(statistic.min for statistic in measured if statistic.min is not None),
        max=max(statistic.max for statistic in measured if statistic.max is not None),
    )


Bandwidth = Literal["transfer", "duration"]
"""What a busbw_gb_s.<op> is over."""


def bandwidths(runs: Iterable[Run], name: str) -> set[Bandwidth]:
    """The bases of the bandwidth called name in the runs that have it; empty for other metrics. A projection
    has no say: nothing waits in it, so that both are the same."""
    key = metric_key(name)
    if key.name != "busbw_gb_s":
        return set()
    runs_with_it = (
        judged for judged in runs if name in judged.statistics and judged.statistics[name].median is not None
    )
    return {
        "transfer" if is_of_transfer(run.metrics, key.operation) else "duration"
        for run in runs_with_it
        if run.source != "projected"
    }


def is_unlike(runs: Iterable[Run], name: str) -> bool:
    """Returns True where a mean over the runs would be of unlike things."""
    return len(bandwidths(runs, name)) > 1


Floats = NDArray[np.float64]


def collective_rows(run: Run, num_warmup: int) -> list[CollectiveRow]:
    """Rows of the collectives of the steps after the first num_warmup, the longest in a step first."""
    judged = np.flatnonzero(run.has_collectives) >= num_warmup
    rows = [_row(kind, judged) for kind in run.collectives] if judged.any() else []
    present = [row for row in rows if row.count_per_step > 0]
    return sorted(present, key=lambda row: -(row.count_per_step * (row.duration_ms or 0.0)))


def _row(kind: CollectiveKind, judged: NDArray[np.bool_]) -> CollectiveRow:
    durations, waits, transfers = (
        _medians(values[:, judged]) for values in (kind.duration_ms, kind.wait_ms, kind.transfer_ms)
    )
    duration, transfer = _median(durations), _median(transfers)
    moved_in = transfer or duration
    busbw = None
    if kind.bytes and kind.num_ranks and moved_in:  # neither unknown nor 0 bytes, as a barrier's
        busbw = kind.bytes / moved_in / 1e6 * busbw_factor(kind.op, kind.num_ranks)
    return CollectiveRow(
        op=kind.op,
        bytes=kind.bytes,
        dtype=kind.dtype,
        num_ranks=kind.num_ranks,
        stream=kind.stream,
        count_per_step=float(np.nanmean(kind.count[:, judged])),
        duration_ms=duration,
        duration_min_ms=min(durations, default=None),
        duration_max_ms=max(durations, default=None),
        wait_ms=_median(waits),
        transfer_ms=transfer,
        busbw_gb_s=busbw,
    )


def _medians(values: Floats) -> list[float]:
    """Over steps, of each rank that has any."""
    return [float(np.median(measured)) for row in values if len(measured := row[~np.isnan(row)])]


def _median(medians: list[float]) -> float | None:
    return float(np.median(medians)) if medians else None


OF_CALLS = ("duration_ms", "transfer_ms", "wait_ms", "busbw_gb_s", "count", "bytes")
"""Metrics of the collectives of an operation."""


def why_missing(dataset: Dataset, name: str) -> str:
    """Reason why the dataset has no statistic of this name."""
    if is_unlike(dataset.runs, name):
        return "not the same thing in all of its runs: ranks were matched in some of them only"
    return missing(dataset.first).get(name) or not_given(dataset.first, name)


def missing(judged: Run) -> dict[str, str]:
    """Metrics that no judged step has, and why."""
    reasons = judged.not_measured
    return {
        name: reasons.get(name) or _reason(judged, name)
        for name, values in judged.statistics.items()
        if values.median is None
    }


def not_given(judged: Run, name: str) -> str:
    """Reason why a run has no such metric."""
    key = metric_key(name)
    is_of_calls = key.name in OF_CALLS and bool(key.operation)
    is_absent = of_operation("count", key.operation) not in judged.statistics
    if is_of_calls and is_absent and judged.has_details.any():
        return f"no {key.operation} was recorded"
    if key.name in (NAME_TIME, NAME_COUNT):
        return "no kernel of this name is among those with most time"
    return f"not given by source {judged.source}"


def _reason(judged: Run, name: str) -> str:
    if name == "overlap_ratio" and judged.statistics["comm_ms"].median == 0:
        evidence = comm_evidence(judged)
        if evidence.num_ranks > 1 and not evidence.is_found:
            return evidence.absence
        return "there was no communication"
    key = metric_key(name)
    size = judged.statistics.get(of_operation("bytes", key.operation))
    if key.name == "busbw_gb_s" and size is not None and size.median == 0:
        return "it carries no bytes"
    return not_given(judged, name)
