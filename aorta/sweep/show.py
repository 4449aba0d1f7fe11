"""Text, table and picture of a sweep: trials by their objective, the best first.

A lead is the kind of number, raw or calibrated, by which all trials are ranked.
"""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from aorta.account.judge.leading import with_word
from aorta.account.model import Lead
from aorta.account.numbers import quantity as report_quantity
from aorta.account.results.leading import (
    accuracy_of,
    calibrated,
    described,
    is_calibrated,
    is_of_two_kinds,
    lead_of,
    leading_metric,
    value_text,
    why_raw,
    word,
)
from aorta.account.results.schema import Metric, Point
from aorta.sweep.spec import SweepSpec

MOST_ROWS = 40
"""Trials shown in the table and in the picture."""


def ranked(spec: SweepSpec, points: list[Point]) -> list[Point]:
    """Measured trials, the best first, by one kind of number."""
    lead = lead_of(spec.objective, points)
    measured = [point for point in points if point.status == "measured"]
    return sorted(measured, key=lambda point: _value(spec, point, lead), reverse=spec.maximizes())


def answer(spec: SweepSpec, points: list[Point]) -> str:
    """One line: the best trial, and whether the next one is worse beyond noise."""
    order = ranked(spec, points)
    if not order:
        return "no trial was measured"
    lead, best = lead_of(spec.objective, points), order[0]
    text = f"best {spec.objective} {number(spec, best, lead)}: {described(best)}"
    equals = [point for point in order[1:] if _is_same(spec, best, point, lead)]
    if equals:
        noise = "its noise" if lead == "raw" else "its noise or the calibration error"
        text += f"; within {noise}: {len(equals)} of {len(order) - 1} others"
    return text


def note(spec: SweepSpec, points: list[Point]) -> str:
    """Sentence why raw numbers rank although some trial has calibrated ones; empty where that is not so."""
    name = spec.objective
    measured = [point for point in points if point.status == "measured"]
    lacking = [point for point in measured if not is_calibrated(point, name)]
    explained = [point for point in lacking if calibrated(name) in point.metrics]
    if not is_of_two_kinds(name) or not lacking or len(lacking) == len(measured) and not explained:
        return ""
    num = len(measured) - len(lacking)
    though = f", though {num} of {len(measured)} trials have calibrated ones" if num else ""
    example = (explained or lacking)[0]
    return f"raw numbers rank{though}: {described(example)}: {why_raw(name, example)}"


def table(spec: SweepSpec, points: list[Point]) -> Table:
    """Table of the trials, the best first and the failed ones with their reasons last."""
    names = list(spec.choices())
    lead = lead_of(spec.objective, points)
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column(spec.objective, justify="right")
    rows.add_column("95 %")
    rows.add_column("source")
    for name in names:
        rows.add_column(name, justify="right")
    order = ranked(spec, points)
    for point in order[:MOST_ROWS]:
        metric = leading_metric(point, spec.objective, lead)
        source = with_word(point.source, word(point, spec.objective, lead))
        cells = (_cell(point, name) for name in names)
        rows.add_row(quantity(metric), _interval(metric), source, *cells)
    if len(order) > MOST_ROWS:
        rows.add_row("...", f"{len(order) - MOST_ROWS} more")
    for point in (point for point in points if point.status != "measured"):
        rows.add_row("failed", escape(point.reason or ""), "", *(_cell(point, name) for name in names))
    return rows


def draw(spec: SweepSpec, points: list[Point], path: Path) -> Path:
    """Write a PNG of the objectives with their intervals, the best on top; return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lead = lead_of(spec.objective, points)
    order = ranked(spec, points)[:MOST_ROWS]
    figure = Figure(figsize=(9, max(2.0, 0.26 * len(order) + 1.2)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, point in enumerate(order):
        metric = leading_metric(point, spec.objective, lead)
        if ends := _ends(metric):
            axis.plot(ends, [place, place], color="#4477aa", linewidth=2)
        axis.plot([_value(spec, point, lead)], [place], "o", color="#4477aa", markersize=5)
    if order:
        axis.axvline(_value(spec, order[0], lead), color="#000000", alpha=0.3, linewidth=0.8)
    axis.set_yticks(range(len(order)), [described(point) for point in order], fontsize=8)
    axis.invert_yaxis()
    unit = order[0].metrics[spec.objective].unit if order else ""
    kind = word(order[0], spec.objective, lead) if order else ""
    axis.set_xlabel(f"{with_word(with_word(spec.objective, unit), kind)}: median over steps, 95 %")
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def quantity(metric: Metric) -> str:
    if metric.value is None:
        return "n/a"
    return report_quantity(metric.value, metric.unit or "", extra_digits=1)


def number(spec: SweepSpec, point: Point, lead: Lead) -> str:
    """The trial's objective as text, such as `2.1 ms, calibrated`."""
    return with_word(quantity(leading_metric(point, spec.objective, lead)), word(point, spec.objective, lead))


def _interval(metric: Metric) -> str:
    ends = _ends(metric)
    if ends is None:
        return "n/a"
    unit = "bytes" if metric.unit == "bytes" else ""
    low, high = (report_quantity(end, unit, extra_digits=1) for end in ends)
    return f"{low} to {high}"


def _ends(metric: Metric) -> tuple[float, float] | None:
    """Low and high end of the metric's interval, where both are known."""
    interval = metric.interval
    if interval is None or interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high


def _is_same(spec: SweepSpec, first: Point, second: Point, lead: Lead) -> bool:
    """True if nothing shows a difference. A calibration error is the same in all steps, so that no interval
    holds it: it is compared with the difference by itself."""
    name = spec.objective
    if lead == "calibrated":
        difference = abs(_value(spec, first, lead) - _value(spec, second, lead))
        if difference < accuracy_of(name, (first, second)):
            return True
    return _overlaps(leading_metric(first, name, lead), leading_metric(second, name, lead))


def _overlaps(first: Metric, second: Metric) -> bool:
    """True if the intervals overlap, or one is not known."""
    if first.interval is None or second.interval is None:
        return True
    low = max(first.interval.low or 0.0, second.interval.low or 0.0)
    high = [i.high for i in (first.interval, second.interval) if i.high is not None]
    return len(high) < 2 or low <= min(high)


def _value(spec: SweepSpec, point: Point, lead: Lead) -> float:
    value = leading_metric(point, spec.objective, lead).value
    assert value is not None
    return value


def _cell(point: Point, name: str) -> str:
    return escape(value_text(point.configuration.get(name)))
