"""Two documents: which configurations got slower, by how much, and whether that can be told.

A metric is judged by the 95 % interval of test over baseline, turned so that above 1 is worse:
all of it above 1 + threshold is a regression, all of it at or below is none, and anything else cannot be
told from these iterations. Several documents on a side are several runs, and then runs are what varies.
With a single run on a side nothing says how much runs differ: a regression of queues must then exceed the
threshold by what they are taken to differ by, or it cannot be told. False alarms are worse than none.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from aorta.account.results.schema import Document, Interval, Metric, Point, Value
from aorta.errors import EXIT_CODES
from aorta.timeline.statistics import Estimate, contrast

Verdict = Literal["regression", "no regression", "cannot tell", "not judged"]

JUDGED = ("units_per_s", "latency_p50_ms", "latency_p95_ms", "overlap_efficiency")
"""Others are shown."""
ABSOLUTE = ("overlap_efficiency",)
"""Judged by the difference instead of the ratio: it may be 0."""

RUNS_DIFFER = {"events": 0.05, "threads": 0.5}
"""By source, the allowance for a single run. Blocks of one process on an H200 differed by 3 %; worker threads
on a busy machine by far more."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one configuration."""

    configuration: dict[str, Value]
    metric: str
    unit: str
    baseline: float | None
    test: float | None
    ratio: float | None
    """Test over baseline."""
    interval: Interval | None
    """95 % of the ratio; of the difference for overlap_efficiency."""
    verdict: Verdict
    reason: str | None = None


class ResultComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Document that `compare --json` prints."""

    threshold: float
    verdict: Verdict
    rows: list[Compared]
    only_baseline: list[dict[str, Value]]
    """Configurations without a measured partner."""
    only_test: list[dict[str, Value]]
    differences: dict[str, list[str]]
    """Settings of the two sides that differ: [baseline, test]."""
    notes: list[str]

    @property
    def exit_status(self) -> int:
        return EXIT_CODES[self.verdict]


def compare(
    baseline: Sequence[Document], test: Sequence[Document], threshold: float, any_device: bool = False
) -> ResultComparison:
    """Matches points by configuration, wherever they stand."""
    old, new = _points(baseline, any_device), _points(test, any_device)
    shared = [key for key in old if key in new]
    missing = [old[key][0].configuration for key in old if key not in new]
    notes = [
        f"{side}: {_short(point.configuration)} {point.status}: {point.reason}"
        for side, documents in (("baseline", baseline), ("test", test))
        for document in documents
        for point in document.points
        if point.status != "measured"
    ]
    differences = _differences(baseline[0], test[0])
    rows = [row for key in shared for row in _rows(old[key], new[key], threshold)]
    if not any_device and "devices" in differences:
        elsewhere = "measured on another device; --any-device compares all the same"
        rows = [
            row
            if row.verdict == "not judged"
            else msgspec.structs.replace(row, verdict="cannot tell", reason=elsewhere)
            for row in rows
        ]
    if not shared:
        notes.append("no configuration was measured on both sides")
    return ResultComparison(
        threshold=threshold,
        verdict=_overall(rows, missing=bool(missing), broken=_broke(missing, test)),
        rows=rows,
        only_baseline=missing,
        only_test=[new[key][0].configuration for key in new if key not in old],
        differences=differences,
        notes=notes,
    )


def _points(documents: Iterable[Document], any_device: bool) -> dict[str, list[Point]]:
    """Measured points by configuration; those of several documents are several runs of the same."""
    by_configuration: dict[str, list[Point]] = {}
    for document in documents:
        for point in document.points:
            if point.status == "measured":
                by_configuration.setdefault(_key(point, any_device), []).append(point)
    return by_configuration


def _key(point: Point, any_device: bool) -> str:
    configuration = dict(point.configuration)
    if any_device:
        configuration.pop("device", None)
    return json.dumps([configuration, point.collectives], sort_keys=True)


def _broke(missing: Sequence[dict[str, Value]], test: Sequence[Document]) -> bool:
    """A configuration that the baseline measured failed in the test."""
    points = [point for document in test for point in document.points]
    return any(point.status == "failed" and point.configuration in missing for point in points)


def _overall(rows: Sequence[Compared], missing: bool, broken: bool) -> Verdict:
    """A configuration that is gone cannot pass, a single regression is enough."""
    verdicts = {row.verdict for row in rows}
    if broken or "regression" in verdicts:
        return "regression"
    if missing or "cannot tell" in verdicts or "no regression" not in verdicts:
        return "cannot tell"
    return "no regression"


def _rows(old: Sequence[Point], new: Sequence[Point], threshold: float) -> list[Compared]:
    names = dict.fromkeys((*old[0].metrics, *new[0].metrics))
    rows = []
    for name in names:
        sides = [[point.metrics[name] for point in side if name in point.metrics] for side in (old, new)]
        single = min(len(side) for side in sides) == 1
        allowance = RUNS_DIFFER.get(old[0].source, RUNS_DIFFER["events"]) if single else 0.0
        row = _row(old[0].configuration, name, sides[0], sides[1], threshold)
        lower = next(metric for side in sides for metric in side).better == "lower"
        rows.append(_allowed(row, threshold, allowance, lower))
    return rows


def _allowed(row: Compared, threshold: float, allowance: float, lower: bool) -> Compared:
    """A regression that is within what single runs may differ by cannot be told."""
    if row.verdict != "regression" or row.interval is None or not allowance:
        return row
    low, high = row.interval.low, row.interval.high
    assert low is not None
    assert high is not None
    if row.metric in ABSOLUTE:
        least = (low if lower else -high) - threshold
    else:
        least = (low if lower else 1 / high) - 1 - threshold
    if least > allowance:
        return row
    return msgspec.structs.replace(
        row,
        verdict="cannot tell",
        reason=f"one run on a side, and runs may differ by {100 * allowance:g} %: give several of each",
    )


def _row(
    configuration: dict[str, Value],
    name: str,
    old: Sequence[Metric],
    new: Sequence[Metric],
    threshold: float,
) -> Compared:
    first = next(iter((*old, *new)))
    values = [_mean(side) for side in (old, new)]
    ratio = values[1] / values[0] if values[0] and values[1] is not None else None
    row = Compared(
        configuration=configuration, metric=name, unit=first.unit, baseline=values[0], test=values[1],
        ratio=ratio, interval=None, verdict="not judged",
    )  # fmt: skip
    if first.better == "neither" or name not in JUDGED:
        return row
    if values[0] is None and values[1] is None:
        return row
    if values[0] is None or values[1] is None:
        side, metrics = ("baseline", old) if values[0] is None else ("test", new)
        reason = next((metric.reason for metric in metrics if metric.reason), "not there")
        return msgspec.structs.replace(row, verdict="cannot tell", reason=f"{side}: not measured: {reason}")
    estimates = [[_estimate(metric) for metric in side] for side in (old, new)]
    measured = [[side_estimate for side_estimate in side if side_estimate is not None] for side in estimates]
    if not all(known and len(known) == len(side) for known, side in zip(measured, estimates, strict=True)):
        reason = next((m.reason for m in (*old, *new) if m.error is None and m.reason), "no interval")
        verdict: Verdict = "not judged" if name == "latency_p95_ms" else "cannot tell"
        return msgspec.structs.replace(row, verdict=verdict, reason=reason)
    return _judged(row, measured[0], measured[1], first.better == "lower", threshold)


def _judged(
    row: Compared, old: Sequence[Estimate], new: Sequence[Estimate], lower: bool, threshold: float
) -> Compared:
    contrasted = contrast(old, new)
    if row.metric in ABSOLUTE:
        low, high = contrasted.difference_interval
        worse, limit = ((low, high) if lower else (-high, -low)), threshold
    elif contrasted.ratio_interval is None or contrasted.ratio_interval[0] <= 0:
        return msgspec.structs.replace(row, verdict="cannot tell", reason="an interval reaches 0")
    else:
        low, high = contrasted.ratio_interval
        worse, limit = ((low, high) if lower else (1 / high, 1 / low)), 1 + threshold
    verdict: Verdict = "cannot tell"
    if worse[0] > limit:
        verdict = "regression"
    elif worse[1] <= limit:
        verdict = "no regression"
    reason = f"the interval holds the threshold of {100 * threshold:g} %"
    return msgspec.structs.replace(
        row,
        interval=Interval(low=low, high=high),
        verdict=verdict,
        reason=reason if verdict == "cannot tell" else None,
    )


def _mean(metrics: Sequence[Metric]) -> float | None:
    values = [metric.value for metric in metrics if metric.value is not None]
    return sum(values) / len(values) if values else None


def _estimate(metric: Metric) -> Estimate | None:
    if metric.value is None or metric.error is None or metric.freedom is None:
        return None
    return Estimate(metric.value, metric.error, metric.freedom)


def _differences(old: Document, new: Document) -> dict[str, list[str]]:
    """Differences between the places where the two sides ran."""
    differences = {}
    names = [
        ", ".join(dict.fromkeys(str(device.get("name")) for device in d.setting.devices)) for d in (old, new)
    ]
    if names[0] != names[1]:
        differences["devices"] = names
    for kind in ("versions", "environment"):
        a, b = getattr(old.setting, kind), getattr(new.setting, kind)
        for name in sorted({*a, *b}):
            if a.get(name) != b.get(name):
                differences[f"{kind}.{name}"] = [str(a.get(name)), str(b.get(name))]
    for name in ("queues", "backend"):
        a, b = getattr(old.setting, name), getattr(new.setting, name)
        if a != b:
            differences[name] = [str(a), str(b)]
    return differences


def _short(configuration: Mapping[str, Value]) -> str:
    return " ".join(
        f"{name}={value}" for name, value in configuration.items() if name in ("workload", "streams")
    )
