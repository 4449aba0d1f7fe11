"""From the numbers of every step to summary.json: what was seen, over steps and over ranks."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aorta.errors import ReportError
from aorta.report.judge.collectives import collective_rows
from aorta.report.load.bandwidths import is_of_transfer
from aorta.report.load.rank.kernels import NAME_COUNT, NAME_TIME
from aorta.report.metrics import metric_key, of_operation
from aorta.report.model import (
    Comparison,
    ConfidenceInterval,
    Dataset,
    JudgedRun,
    Lead,
    MetricComparison,
    Run,
    Statistic,
    StepWork,
)
from aorta.report.numbers import none_if_nan
from aorta.report.rows import row_blocks, row_medians_and_percentile
from aorta.timeline.statistics import WARMUP_RULE, warmup_steps

SCHEMA = 1
OF_CALLS = ("duration_ms", "transfer_ms", "wait_ms", "busbw_gb_s", "count", "bytes")
"""Metrics of the collectives of an operation."""
BOUNDS_OF_HOST_BOUND = (
    "there compute, comm and hidden are upper bounds, exposed may be off either way"
    " (marks can fire before the kernels they stand for)"
)
RAW_BOUNDS_OF_HOST_BOUND = (
    "there raw compute, comm and hidden are upper bounds and raw exposed may be off either way;"
    " calibrated numbers allow for it"
)


def judge(run: Run, num_warmup: int | None = None) -> JudgedRun:
    """Statistics without the warm-up: num_warmup steps, or by WARMUP_RULE."""
    rule = "as asked for"
    if num_warmup is None:
        rule, num_warmup = WARMUP_RULE, warmup_steps(run.metrics["step_ms"])
    if num_warmup >= run.num_steps:
        raise ReportError(
            f"{run.label}: warm-up of {num_warmup} leaves no step: {run.num_steps} were recorded"
        )
    return JudgedRun(
        run=run,
        num_warmup=num_warmup,
        warmup_rule=rule,
        statistics={name: statistic(values[:, num_warmup:]) for name, values in run.metrics.items()},
        collectives=collective_rows(run, num_warmup),
    )


def dataset(label: str, runs: list[JudgedRun]) -> Dataset:
    """The runs of a label, which must be of the same kind."""
    for attribute, kinds in (
        ("ranks", sorted({len(judged.run.ranks) for judged in runs})),
        ("source", sorted({judged.run.source for judged in runs})),
    ):
        if len(kinds) > 1:
            raise ReportError(
                f"{label}: its runs differ in {attribute} ({', '.join(map(str, kinds))});"
                " runs that are not alike need labels of their own"
            )
    names = dict.fromkeys(name for judged in runs for name in judged.statistics)
    together = {name: _together([judged.statistics.get(name) for judged in runs]) for name in names}
    together |= {name: _together([None]) for name in names if _is_unlike(runs, name)}
    return Dataset(label, runs, runs[0].statistics if len(runs) == 1 else together)


def statistic(values: NDArray[np.float64]) -> Statistic:
    """Statistic of values [rank, step] without the steps in which it was not measured (NaN)."""
    medians, p95 = row_medians_and_percentile(values, 95)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what no rank has: NaN, wanted here
        middle, least, greatest = np.nanmedian(medians), np.nanmin(medians), np.nanmax(medians)
        across_ranks = (middle, np.nanmedian(p95), least, greatest)
    return Statistic(*(none_if_nan(float(value)) for value in across_ranks))


def summary(datasets: Iterable[Dataset], comparison: Comparison | None) -> dict[str, Any]:
    """summary.json."""
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "datasets": {entry.label: _dataset_summary(entry) for entry in datasets},
        "reference": comparison.reference if comparison else None,
        "candidate": comparison.candidate if comparison else None,
        "comparison": {},
    }
    if comparison is not None:
        result["comparison"] = {name: _row(metric) for name, metric in comparison.metrics.items()}
        result["headline"] = comparison.headline
        result["main"] = comparison.main
        result["work"] = None if comparison.work is None else _work(comparison.work)
        result["scope"] = comparison.scope
        result["num_judged"] = comparison.num_judged
        result["differences"] = comparison.differences
        result["decomposition"] = _decomposition(comparison)
        result["comparison_notes"] = comparison.notes
    return result


def timed_steps(judged: JudgedRun) -> NDArray[np.bool_]:
    """[judged step]: some rank has raw numbers of compute or communication. Where times are taken in one
    step of many (recording.timed_every), the other steps have no such numbers, raw or calibrated."""
    return judged.once("timed_steps", lambda: _timed_steps(judged))


def _timed_steps(judged: JudgedRun) -> NDArray[np.bool_]:
    is_timed = np.zeros(judged.num_steps, dtype=bool)
    for name in ("compute_ms", "comm_ms"):
        values = judged.values(name)
        for rows in row_blocks(values.shape):
            is_timed |= np.isfinite(values[rows]).any(axis=0)
    return is_timed


def values_where_timed(judged: JudgedRun, name: str) -> NDArray[np.float64]:
    """judged.values(name) without the steps that were not timed, for a metric that these do not have. They
    were left out by plan, whatever happened in them: what remains is a sample, and not a choice."""
    values = judged.values(name)
    return values[:, timed_steps(judged) | np.isfinite(values).any(axis=0)]


def host_bound_steps(judged: JudgedRun) -> int | None:
    """Judged steps in which some rank was host-bound; None where no rank knows."""
    host_bound = judged.run.host_bound[:, judged.num_warmup :]
    return None if np.isnan(host_bound).all() else int((host_bound == 1).any(axis=0).sum())


def share_host_bound(judged: JudgedRun) -> float | None:
    """host_bound_steps over the judged steps of which it is known; None where of none."""
    num_host_bound = host_bound_steps(judged)
    return None if num_host_bound is None else num_host_bound / _num_known_host_bound(judged)


def _num_known_host_bound(judged: JudgedRun) -> int:
    """Judged steps of which some rank knows whether it was host-bound."""
    return int((~np.isnan(judged.run.host_bound[:, judged.num_warmup :])).any(axis=0).sum())


def host_bound_text(runs: Sequence[JudgedRun], lead: Lead) -> str:
    """Number of judged steps that were host-bound, and the effect on their numbers; '' where none was."""
    num_host_bound = sum(host_bound_steps(judged) or 0 for judged in runs)
    if num_host_bound == 0:
        return ""
    bounds = RAW_BOUNDS_OF_HOST_BOUND if lead == "calibrated" else BOUNDS_OF_HOST_BOUND
    num_steps = sum(_num_known_host_bound(judged) for judged in runs)
    return f"host-bound: {num_host_bound} of {num_steps} steps; {bounds}"


Bandwidth = Literal["transfer", "duration"]
"""What a busbw_gb_s.<op> is over."""


def bandwidths(runs: Iterable[JudgedRun], name: str) -> set[Bandwidth]:
    """The bases of the bandwidth called name in the runs that have it; empty for other metrics. A projection
    has no say: nothing waits in it, so that both are the same."""
    key = metric_key(name)
    if key.name != "busbw_gb_s" or key.source:
        return set()
    runs_with_it = (
        judged.run
        for judged in runs
        if name in judged.statistics and judged.statistics[name].median is not None
    )
    return {
        "transfer" if is_of_transfer(run.metrics, key.operation) else "duration"
        for run in runs_with_it
        if run.source != "projected"
    }


def _is_unlike(runs: Iterable[JudgedRun], name: str) -> bool:
    """Returns True where a mean over the runs would be of unlike things."""
    return len(bandwidths(runs, name)) > 1


def why_missing(dataset: Dataset, name: str) -> str:
    """Reason why the dataset has no statistic of this name."""
    if _is_unlike(dataset.runs, name):
        return "not the same thing in all of its runs: ranks were matched in some of them only"
    return missing(dataset.first).get(name) or not_given(dataset.first, name)


def missing(judged: JudgedRun) -> dict[str, str]:
    """Metrics that no judged step has, and why."""
    reasons = judged.run.not_measured
    return {
        name: reasons.get(name) or _reason(judged, name)
        for name, values in judged.statistics.items()
        if values.median is None
    }


def not_given(judged: JudgedRun, name: str) -> str:
    """Reason why a run has no such metric."""
    key = metric_key(name)
    is_of_calls = key.name in OF_CALLS and bool(key.operation)
    is_absent = of_operation("count", key.operation) not in judged.statistics
    if is_of_calls and is_absent and judged.run.has_details.any():
        return f"no {key.operation} was recorded"
    if key.name in (NAME_TIME, NAME_COUNT):
        return "no kernel of this name is among those with most time"
    return f"not given by source {judged.run.source}"


def _reason(judged: JudgedRun, name: str) -> str:
    if name == "overlap_ratio" and judged.statistics["comm_ms"].median == 0:
        return "there was no communication"
    key = metric_key(name)
    size = judged.statistics.get(of_operation("bytes", key.operation))
    if key.name == "busbw_gb_s" and size is not None and size.median == 0:
        return "it carries no bytes"
    return not_given(judged, name)


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


def _dataset_summary(dataset: Dataset) -> dict[str, Any]:
    result = _run_summary(dataset.first) | {"leading": dataset.lead}
    if len(dataset.runs) > 1:
        runs = [_run_summary(run) | {"path": str(run.run.path)} for run in dataset.runs]
        for run in runs:
            del run["ranks"], run["collectives"]
        host_bound_counts = [run["host_bound_steps"] for run in runs]
        unlike = {
            name: why_missing(dataset, name) for name in dataset.statistics if _is_unlike(dataset.runs, name)
        }
        result["not_measured"] |= unlike
        result |= {
            "ranks": {
                str(rank): {"total": _sum_of_totals(dataset, rank)} for rank in dataset.first.run.ranks
            },
            "steps": dataset.statistics,
            "num_steps": sum(run.num_steps for run in dataset.runs),
            "warmup": {
                "num_steps": sum(run.num_warmup for run in dataset.runs),
                "rule": dataset.first.warmup_rule + ", in each run",
            },
            "host_bound_steps": None if None in host_bound_counts else sum(host_bound_counts),
            "notes": [f"run {i}: {note}" for i, run in enumerate(dataset.runs) for note in run.run.notes],
            "num_runs": len(runs),
            "runs": runs,
        }
    return result


def _run_summary(judged: JudgedRun) -> dict[str, Any]:
    run = judged.run
    result: dict[str, Any] = {
        "source": run.source,
        "ranks": {str(rank): {"total": total} for rank, total in run.totals.items()},
        "steps": judged.statistics,
        "num_steps": judged.num_steps,
        "warmup": {"num_steps": judged.num_warmup, "rule": judged.warmup_rule},
        "host_bound_steps": host_bound_steps(judged),
        "collectives": judged.collectives,
        "not_measured": missing(judged),
        "attempts": [] if run.run is None else run.run.attempts,
        "story": run.story,
        "notes": run.notes,
    }
    if run.other_sources:
        result["other_sources"] = {
            source: _run_summary(judge(other_run, 0)) for source, other_run in run.other_sources.items()
        }
    return result


def _sum_of_totals(dataset: Dataset, rank: int) -> dict[str, float | int | None]:
    totals = [judged.run.totals[rank] for judged in dataset.runs if rank in judged.run.totals]
    sums: dict[str, float | int | None] = {}
    for name in totals[0]:
        values = [total[name] for total in totals]
        measured = [value for value in values if value is not None]
        sums[name] = sum(measured) if len(measured) == len(values) else None
    return sums


def _row(metric: MetricComparison) -> dict[str, Any]:
    return {
        "reference": metric.reference,
        "candidate": metric.candidate,
        "ratio": metric.ratio,
        "interval": _bounds(metric.interval),
        "verdict": metric.verdict,
        "reason": metric.reason,
        "unit": metric.unit,
        "better": metric.direction,
        "difference": metric.difference,
        "difference_interval": _bounds(metric.difference_interval),
        "reference_interval": _bounds(metric.reference_interval),
        "candidate_interval": _bounds(metric.candidate_interval),
        "detectable": metric.detectable,
        "p_value": metric.p_value,
        "p_adjusted": metric.p_adjusted,
        "reference_metric": metric.reference_metric,
        "candidate_metric": metric.candidate_metric,
    }


def _decomposition(comparison: Comparison) -> dict[str, Any] | None:
    decomposition = comparison.decomposition
    if decomposition is None:
        return None
    rows = {}
    for part in (decomposition.step, *decomposition.parts):
        rows[part.name] = {
            "reference_ms": part.reference_ms,
            "candidate_ms": part.candidate_ms,
            "difference_ms": part.difference_ms,
            "interval": _bounds(part.interval),
        }
    step = rows.pop(decomposition.step.name)
    return {
        "step": step,
        "parts": rows,
        "estimator": decomposition.estimator,
        "of_work": decomposition.of_work,
        "notes": decomposition.notes,
    }


def _work(work: StepWork) -> dict[str, float]:
    """Tokens of a step per GPU on both sides."""
    return {"reference": work.reference, "candidate": work.candidate, "ratio": work.ratio}


def _bounds(interval: ConfidenceInterval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
