"""Two sweeps of training runs against each other: calibrated numbers where both sides have them."""

import json
from collections.abc import Mapping, Sequence

import msgspec

from aorta.account.metrics import without_source
from aorta.account.results.compare import Compared, ResultComparison, Verdict, compare
from aorta.account.results.leading import (
    accuracy_of,
    calibrated,
    described,
    is_beside,
    is_calibrated,
    lead_of,
    leading_metric,
    why_raw,
)
from aorta.account.results.schema import Document, Metric, Point, Value

_ANY = "comm_ms"
"""In every trial, and calibrated where anything is."""
Trials = Mapping[str, list[Point]]
"""Of both sides, by configuration."""


def compare_sweeps(
    baseline: Sequence[Document], test: Sequence[Document], threshold: float, any_device: bool = False
) -> ResultComparison:
    """Rows of training runs are named calibrated.exposed_ms where calibrated numbers lead in every run of
    the configuration on both sides, and are otherwise of raw numbers. Other documents as compare() has it.

    Runs whose calibrated numbers differ by less than the calibration error show no regression.
    """
    trials = _measured_trials((*baseline, *test))
    old, new = ([_led(document, trials) for document in side] for side in (baseline, test))
    comparison = compare(old, new, threshold, any_device)
    rows = [_judged(row, trials) for row in comparison.rows]
    return msgspec.structs.replace(
        comparison,
        rows=rows,
        verdict=_overall(comparison, rows, test),
        notes=[*comparison.notes, *_notes(comparison, trials)],
    )


def _measured_trials(documents: Sequence[Document]) -> Trials:
    trials: dict[str, list[Point]] = {}
    for document in documents:
        for point in document.points:
            if document.kind == "training" and point.status == "measured":
                trials.setdefault(_key(point.configuration), []).append(point)
    return trials


def _key(configuration: Mapping[str, Value]) -> str:
    return json.dumps(configuration, sort_keys=True)


def _led(document: Document, trials: Trials) -> Document:
    """The document with one kind of number for each metric."""
    if document.kind != "training":
        return document
    points = [
        msgspec.structs.replace(point, metrics=_led_metrics(point, trials.get(_key(point.configuration), [])))
        for point in document.points
    ]
    return msgspec.structs.replace(document, points=points)


def _led_metrics(point: Point, alike: Sequence[Point]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for name, raw in point.metrics.items():
        if is_beside(name):
            continue
        if lead_of(name, alike) == "calibrated":
            metric = leading_metric(point, name, "calibrated")
            metrics[calibrated(name)] = msgspec.structs.replace(metric, better=raw.better)
        else:
            metrics[name] = raw
    return metrics


def _judged(row: Compared, trials: Trials) -> Compared:
    """A calibration is off by the same in all steps, which no interval holds."""
    name = without_source(row.metric)
    if row.verdict != "regression" or name == row.metric or row.baseline is None or row.test is None:
        return row
    if abs(row.test - row.baseline) >= accuracy_of(name, trials[_key(row.configuration)]):
        return row
    reason = "the difference is smaller than the calibration error"
    return msgspec.structs.replace(row, verdict="cannot tell", reason=reason)


def _overall(comparison: ResultComparison, rows: Sequence[Compared], test: Sequence[Document]) -> Verdict:
    if comparison.verdict != "regression" or rows == comparison.rows:
        return comparison.verdict
    failed = [
        point.configuration for document in test for point in document.points if point.status == "failed"
    ]
    is_broken = any(configuration in failed for configuration in comparison.only_baseline)
    is_worse = any(row.verdict == "regression" for row in rows)
    return "regression" if is_worse or is_broken else "cannot tell"


def _notes(comparison: ResultComparison, trials: Trials) -> list[str]:
    """Note on configurations of which some runs are calibrated, and not all."""
    compared = {_key(row.configuration) for row in comparison.rows}
    of_both = [points for key, points in trials.items() if key in compared]
    mixed = [
        points
        for points in of_both
        if any(is_calibrated(point, _ANY) for point in points) and lead_of(_ANY, points) == "raw"
    ]
    if not mixed:
        return []
    point = next(point for point in mixed[0] if not is_calibrated(point, _ANY))
    return [
        f"raw numbers are compared of {len(mixed)} of {len(of_both)} configurations, though some runs of"
        f" these have calibrated ones: {described(point)}: {why_raw(_ANY, point)}"
    ]
