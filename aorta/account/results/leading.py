"""Which numbers of a training sweep's trials are set against each other, and what a point keeps of them.

What leads is decided by account/judge/leading.py: in a trial as in its report, and in several trials
calibrated numbers where all have them. Raw numbers are off by a part of communication that differs between
loads, so they are no match for calibrated ones.

A point keeps its numbers under the names of summary.json: exposed_ms as measured, calibrated.exposed_ms
calibrated. What a calibration is good for is kept beside them, because no interval over steps holds it.
"""

from collections.abc import Iterable, Sequence

from aorta.account.judge.leading import (
    BESIDE_WORDS,
    LED,
    WORDS,
    accuracy,
    common_lead,
    is_raw_part,
    metric_of,
)
from aorta.account.metrics import meaning, metric_key, of_source
from aorta.account.model import Dataset, Lead
from aorta.account.results.schema import Metric, Point

ACCURACY = "accuracy"
"""Source of a point's metric beside those of a report: differences below it calibration does not tell."""
SOURCE = "events calibrated by kernels"


def calibrated(name: str) -> str:
    """'calibrated.exposed_ms'"""
    return of_source("calibrated", name)


def accuracy_key(name: str) -> str:
    """'accuracy.exposed_ms'"""
    return f"{ACCURACY}.{name}"


def is_beside(name: str) -> bool:
    """Returns True for the calibrated number of a metric, and for its accuracy."""
    return metric_key(name).source == "calibrated" or metric_key(name).name == ACCURACY


def lead_of(name: str, points: Sequence[Point]) -> Lead:
    """Lead of points that are set against each other; those that failed have no say."""
    measured = [point for point in points if point.status == "measured"]
    return common_lead("calibrated" if is_calibrated(point, name) else "raw" for point in measured)


def is_calibrated(point: Point, name: str) -> bool:
    """Returns True where calibrated numbers lead in the trial, and name has one."""
    metric = point.metrics.get(calibrated(name))
    return metric is not None and metric.value is not None


def leading_metric(point: Point, name: str, lead: Lead) -> Metric:
    return point.metrics[metric_of(lead, name)]


def accuracy_of(name: str, points: Iterable[Point]) -> float:
    """Between these points, where calibrated numbers are leading_metric."""
    metrics = [point.metrics.get(accuracy_key(name)) for point in points]
    return max(
        (metric.value for metric in metrics if metric is not None and metric.value is not None), default=0.0
    )


def why_raw(name: str, point: Point) -> str:
    """Reason why a point's calibrated number does not lead; sweeps of earlier versions kept none."""
    metric = point.metrics.get(calibrated(name))
    return (metric.reason if metric is not None else None) or "no calibrated numbers are kept of it"


def is_of_two_kinds(name: str) -> bool:
    """Returns True for a metric that may be calibrated."""
    return name in LED["calibrated"]


def accuracies(trial: Dataset, names: Iterable[str]) -> dict[str, Metric]:
    """accuracy.<name>: differences below it, in the unit of name, calibration does not tell."""
    by_name = {name: accuracy(name, [trial]) for name in names}
    return {
        accuracy_key(name): Metric(value=value, unit=meaning(name).unit, source=SOURCE)
        for name, value in by_name.items()
        if value is not None
    }


def word(point: Point, name: str, lead: Lead) -> str:
    """Kind of number that leading_metric() returns; '' where there is only one."""
    if metric_of(lead, name) != name:
        return WORDS[lead]
    has_kinds = is_of_two_kinds(name) or is_raw_part(name)
    return BESIDE_WORDS["calibrated"] if has_kinds and point.source == "events" else ""


def described(point: Point) -> str:
    return "  ".join(
        f"{name.rpartition('.')[2]}={value_text(value)}" for name, value in point.configuration.items()
    )


def value_text(value: object) -> str:
    return "unset" if value is None else str(value)
