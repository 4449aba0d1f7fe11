"""From the numbers of every step to summary.json: what was seen, over steps and over ranks."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.errors import ReportError
from aorta.report.load import Dataset

WARMUP_FACTOR = 1.2
WARMUP_SHARE = 3
WARMUP_RULE = (
    f"the leading steps whose slowest rank took more than {WARMUP_FACTOR} x the median of the run's"
    f" second half; at least one, at most 1 in {WARMUP_SHARE}; none of fewer than 3"
)
WARMUP_SHORT = f"slower than {WARMUP_FACTOR} x the later median, at least one"
TOTAL_SUMS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
NOT_JUDGED = "one run per side, and no statistics are applied yet: the ratio of two medians is no verdict"


@dataclass(frozen=True, slots=True)
class Statistic:
    """A metric over the judged steps."""

    median: float | None
    """Median over ranks of each rank's median over steps."""
    p95: float | None
    """Median over ranks of each rank's 95th percentile over steps."""
    min: float | None
    """Least of the ranks' medians."""
    max: float | None


@dataclass(frozen=True, slots=True)
class Judged:
    """A Dataset with its warm-up steps told apart."""

    dataset: Dataset
    num_warmup: int
    warmup_rule: str
    statistics: dict[str, Statistic]
    totals: dict[int, dict[str, float | int | None]]
    """Per rank the fields of aorta.timeline.types.Total; None for what some step did not measure."""

    @property
    def num_steps(self) -> int:
        return self.dataset.num_steps - self.num_warmup

    def values(self, metric: str) -> NDArray[np.float64]:
        """[rank, step] of the judged steps."""
        return self.dataset.metrics[metric][:, self.num_warmup :]


def judge(dataset: Dataset, num_warmup: int | None = None) -> Judged:
    """Statistics without the warm-up: num_warmup steps, or by WARMUP_RULE."""
    rule = "as asked for"
    if num_warmup is None:
        rule, num_warmup = WARMUP_RULE, warmup_steps(dataset.metrics["step_ms"])
    if num_warmup >= dataset.num_steps:
        raise ReportError(
            f"{dataset.label}: warm-up of {num_warmup} leaves no step: {dataset.num_steps} were recorded"
        )
    return Judged(
        dataset=dataset,
        num_warmup=num_warmup,
        warmup_rule=rule,
        statistics={name: statistic(values[:, num_warmup:]) for name, values in dataset.metrics.items()},
        totals={rank: _total(dataset, i) for i, rank in enumerate(dataset.ranks)},
    )


def warmup_steps(step_ms: NDArray[np.float64]) -> int:
    """How many leading steps WARMUP_RULE leaves out. step_ms is [rank, step]."""
    num_steps = step_ms.shape[1]
    if num_steps < 3:
        return 0
    slowest = np.where(np.isnan(step_ms), -np.inf, step_ms).max(axis=0)
    limit = WARMUP_FACTOR * float(np.median(slowest[num_steps // 2 :]))
    num = 1
    while num < num_steps // WARMUP_SHARE and slowest[num] > limit:
        num += 1
    return num


def statistic(values: NDArray[np.float64]) -> Statistic:
    """Of [rank, step]. Steps in which the metric was not measured are left out of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank without any value gives NaN, wanted here
        medians = np.nanmedian(values, axis=1)
        p95 = np.nanmedian(np.nanpercentile(values, 95, axis=1))
        middle, least, most = np.nanmedian(medians), np.nanmin(medians), np.nanmax(medians)
    return Statistic(_number(middle), _number(p95), _number(least), _number(most))


def summary(
    judged: list[Judged], reference: str | None = None, candidate: str | None = None
) -> dict[str, Any]:
    """summary.json."""
    by_label = {one.dataset.label: one for one in judged}
    return {
        "schema": 1,
        "datasets": {label: _dataset_summary(one) for label, one in by_label.items()},
        "reference": reference,
        "candidate": candidate,
        "comparison": comparison(by_label[reference], by_label[candidate])
        if reference is not None and candidate is not None
        else {},
    }


def comparison(reference: Judged, candidate: Judged) -> dict[str, Any]:
    """Medians side by side, for every metric that either run has."""
    reason = NOT_JUDGED
    if reference.dataset.source != candidate.dataset.source:
        reason = (
            f"sources differ ({reference.dataset.source}, {candidate.dataset.source}), and so do their"
            f" definitions of compute; {NOT_JUDGED}"
        )
    rows = {}
    for name in dict.fromkeys((*reference.statistics, *candidate.statistics)):
        a, b = (side.statistics.get(name) for side in (reference, candidate))
        a_median, b_median = (None if s is None else s.median for s in (a, b))
        rows[name] = {
            "reference": a_median,
            "candidate": b_median,
            "ratio": b_median / a_median if a_median and b_median is not None else None,
            "interval": None,
            "verdict": "not judged",
            "reason": reason,
        }
    return rows


def _dataset_summary(judged: Judged) -> dict[str, Any]:
    dataset = judged.dataset
    result: dict[str, Any] = {
        "source": dataset.source,
        "ranks": {str(rank): {"total": total} for rank, total in judged.totals.items()},
        "steps": judged.statistics,
        "num_steps": judged.num_steps,
        "warmup": {"num_steps": judged.num_warmup, "rule": judged.warmup_rule},
        "host_bound_steps": host_bound_steps(judged),
        "not_measured": missing(judged),
        "notes": dataset.notes,
    }
    if dataset.other_sources:
        result["other_sources"] = {
            source: _dataset_summary(judge(other, 0)) for source, other in dataset.other_sources.items()
        }
    return result


def host_bound_steps(judged: Judged) -> int | None:
    """Judged steps in which some rank was host-bound; None where no rank knows."""
    known = judged.dataset.host_bound[:, judged.num_warmup :]
    return None if np.isnan(known).all() else int((known == 1).any(axis=0).sum())


def missing(judged: Judged) -> dict[str, str]:
    """Metrics that no judged step has, and why."""
    reasons = judged.dataset.not_measured
    return {
        name: reasons.get(name) or _reason(judged, name)
        for name, values in judged.statistics.items()
        if values.median is None
    }


def _reason(judged: Judged, name: str) -> str:
    if name == "overlap_ratio" and judged.statistics["comm_ms"].median == 0:
        return "there was no communication"
    return f"not given by source {judged.dataset.source}"


def _total(dataset: Dataset, row: int) -> dict[str, float | int | None]:
    """Over every step read, warm-up included.

    Step windows meet and do not overlap, and a step's numbers are clipped to its window, so that
    their sum is the set arithmetic over all windows together.
    """
    sums = {name: _number(dataset.metrics[name][row].sum()) for name in TOTAL_SUMS}
    return {
        "span_ms": _number(dataset.metrics["step_ms"][row].sum()),
        **sums,
        "num_kernels": None,  # records do not count kernels
        "num_collectives": int(dataset.num_collectives[row].sum()),
    }


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
