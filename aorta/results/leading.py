"""Trials of training sweeps, set against each other: by which of their numbers, and what they are called.

What leads in a trial is decided as in its report (report/judge/leading.py). Raw numbers are off by a part of
communication that differs between loads, so they are no match for calibrated ones: these lead where every
trial has them, and raw ones of all trials otherwise.

A point keeps its numbers under the names of summary.json: exposed_ms as measured, calibrated.exposed_ms
calibrated. What a calibration is good for is kept beside them, because no interval over steps holds it.
"""

from collections.abc import Iterable, Sequence

from aorta.report.judge.leading import metric_of
from aorta.report.model import Lead
from aorta.results.schema import Metric, Point

CALIBRATED, ACCURACY = "calibrated.", "accuracy."


def lead_of(name: str, points: Sequence[Point]) -> Lead:
    """What leads where these points are set against each other; those that failed have no say."""
    measured = [point for point in points if point.status == "measured"]
    return "calibrated" if measured and all(is_calibrated(point, name) for point in measured) else "raw"


def is_calibrated(point: Point, name: str) -> bool:
    """Whether calibrated numbers lead in the trial, and name has one."""
    found = point.metrics.get(CALIBRATED + name)
    return found is not None and found.value is not None


def taken(point: Point, name: str, lead: Lead) -> Metric:
    return point.metrics[metric_of(lead, name)]


def accuracy_of(name: str, points: Iterable[Point]) -> float:
    """Between these points, where calibrated numbers are taken."""
    found = [point.metrics.get(f"{ACCURACY}{name}") for point in points]
    return max((one.value for one in found if one is not None and one.value is not None), default=0.0)


def why_raw(name: str, point: Point) -> str:
    """Of a point whose calibrated number does not lead; sweeps of earlier versions kept none."""
    found = point.metrics.get(CALIBRATED + name)
    return (found.reason if found is not None else None) or "no calibrated numbers are kept of it"


def described(point: Point) -> str:
    return "  ".join(
        f"{name.rpartition('.')[2]}={value_text(value)}" for name, value in point.configuration.items()
    )


def value_text(value: object) -> str:
    return "unset" if value is None else str(value)
