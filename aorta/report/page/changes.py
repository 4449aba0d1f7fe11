"""What is different, whether it is real, and where the difference of the step time comes from."""

import math
from collections.abc import Sequence
from typing import Any

from aorta.report.model import Comparison, Interval, MetricComparison, Part
from aorta.report.page.answer import change_text, interval_text, verdict_mark
from aorta.report.page.markup import Markup, tag
from aorta.report.page.parts import (
    Column,
    at_percent,
    bar,
    bullets,
    cell,
    chart,
    empty,
    filterable,
    section,
    sentence,
    table,
)
from aorta.report.page.words import counted, percent, quantity, title

PART_NAMES = {
    "exposed_wait": "exposed, waiting for a rank",
    "exposed_transfer": "exposed, transfer",
    "exposed": "exposed communication",
    "exposed_copy": "copies alone",
}


def changes(comparison: Comparison) -> Markup:
    decomposition = comparison.decomposition
    if decomposition is None:
        parts: Any = empty(
            "The difference of the step times was not taken apart: a part of it was not measured."
        )
    else:
        all_parts = [*decomposition.parts, decomposition.step]
        ends = [x for p in all_parts for x in (0.0, p.difference_ms, *_ends(p)) if math.isfinite(x)]
        axis = min(ends), max(ends)
        parts = [
            table(
                "Where the difference comes from",
                [("", "", False), (comparison.reference, "ms", True), (comparison.candidate, "ms", True),
                 ("difference", "ms", True), ("95 %", "ms", True), ("", "", False)],
                [_part_row(part, axis, part is decomposition.step) for part in all_parts],
            ),
            tag("p", "Less time is left of the line, more is right of it."
                     f" {sentence(decomposition.estimator)}.", class_="note"),
            bullets(decomposition.notes),
        ]  # fmt: skip
    known = [m for m in comparison.metrics.values() if m.reference is not None or m.candidate is not None]
    judged = [metric for metric in known if metric.verdict != "not judged"]
    rest = [metric for metric in known if metric.verdict == "not judged"]
    reach = _ratio_reach(judged)
    axis_title = f"{percent(math.exp(-reach) - 1, sign=True)} to {percent(math.exp(reach) - 1, sign=True)}"
    sides: list[Column] = [
        ("metric", "", False), (comparison.reference, "", True), (comparison.candidate, "", True),
        ("difference", "", True), ("change", "", True),
    ]  # fmt: skip
    judged_columns: list[Column] = [
        *sides, (f"ratio, {axis_title}", "", False), ("detectable", "", True), ("p, Holm", "", True),
        ("verdict", "", False),
    ]  # fmt: skip
    verdicts: Any = empty("No metric could be judged.")
    if judged:
        rows = [_judged_row(metric, reach) for metric in judged]
        verdicts = [
            table("Judged metrics", judged_columns, rows, sortable=True),
            tag(
                "p",
                "Change: candidate against reference, with its 95 % interval. Detectable: the smallest true"
                " difference that such runs show in four comparisons of five. p allows for"
                f" {counted(comparison.num_judged, 'judged metric')}.",
                class_="note",
            ),
        ]
    others = None
    if rest:
        columns: list[Column] = [*sides, ("why", "", False)]
        others = tag(
            "details",
            tag("summary", f"{counted(len(rest), 'metric')} without a verdict"),
            filterable(
                "metrics", "Metrics without a verdict", columns, [_other_row(metric) for metric in rest]
            ),
        )
    return section(
        "changes",
        "What changed",
        parts,
        tag("h3", "Verdicts"),
        verdicts,
        bullets(comparison.notes),
        others,
    )


def _ends(part: Part) -> tuple[float, float] | tuple[()]:
    return () if part.interval is None else (part.interval.low, part.interval.high)


def _part_row(part: Part, axis: tuple[float, float], is_sum: bool) -> Markup:
    kind = next(
        (name for name in ("exposed_wait", "exposed", "compute", "idle") if part.name.startswith(name)), ""
    )
    marks: list[Markup] = []
    if axis[1] > axis[0]:
        at = [1 + 98 * (x - axis[0]) / (axis[1] - axis[0]) for x in (0.0, part.difference_ms, *_ends(part))]
        low, high = sorted(at[:2])
        colour = "m-sum" if is_sum else f"m-{kind.removeprefix('exposed_') or 'other'}"
        marks.append(bar(low, high, colour, 3, 12))
        if len(at) == 4:
            marks.append(
                tag("line", x1=at_percent(at[2]), x2=at_percent(at[3]), y1="9", y2="9", class_="halo")
            )
            marks.append(
                tag("line", x1=at_percent(at[2]), x2=at_percent(at[3]), y1="9", y2="9", class_="whisker")
            )
        marks.append(tag("line", x1=at_percent(at[0]), x2=at_percent(at[0]), y1="0", y2="18", class_="axis"))
    name = "step (the sum)" if is_sum else PART_NAMES.get(part.name, part.name.replace("_", " "))
    cells = [
        tag("th", name, scope="row"),
        cell(part.reference_ms), cell(part.candidate_ms), cell(part.difference_ms, sign=True),
        tag("td", interval_text(part.interval, sign=True), class_="num"),
        tag("td", chart(marks, 18, f"{quantity(part.difference_ms, 'ms', sign=True)}"), class_="wide"),
    ]  # fmt: skip
    return tag("tr", cells, class_="sum" if is_sum else None)


def _ratio_reach(metrics: Sequence[MetricComparison]) -> float:
    """Half width of the ratio axis, as a logarithm: all intervals, between 2 % and a factor of four."""
    ends = [
        abs(math.log(x))
        for m in metrics
        for x in ((m.interval.low, m.interval.high) if m.interval else (m.ratio,))
        if x is not None and 0 < x < math.inf
    ]
    return min(max(0.02, *ends), math.log(4)) if ends else 0.02


def _judged_row(metric: MetricComparison, reach: float) -> Markup:
    ratio = metric.ratio
    drawn = None
    if ratio is not None and ratio > 0:
        kind = metric.verdict if metric.verdict in ("better", "worse") else "none"
        drawn = chart(_ratio_marks(ratio, metric.interval, reach, kind), 18, f"ratio {ratio:.3f}")
    why = tag("div", metric.reason, class_="why") if metric.reason else None
    return tag(
        "tr",
        _sides_cells(metric),
        tag("td", drawn, class_="dots"),
        cell(metric.detectable, text=quantity(metric.detectable, metric.unit)),
        cell(metric.p_adjusted, text=_p_text(metric.p_adjusted)),
        tag("td", verdict_mark(metric.verdict), why),
    )


def _ratio_marks(ratio: float, interval: Interval | None, reach: float, kind: str) -> list[Markup]:
    """On a logarithmic axis with 1 in the middle; an arrow where the ratio is beyond its ends."""

    def at(value: float) -> str:
        share = math.log(value) / reach if value > 0 else -1.0
        return at_percent(50 + 46 * max(-1.0, min(1.0, share)))

    marks = [tag("line", x1="50%", x2="50%", y1="0", y2="18", class_="axis")]
    if interval is not None:
        marks.append(
            tag(
                "line", x1=at(interval.low), x2=at(interval.high), y1="9", y2="9", class_=f"interval v-{kind}"
            )
        )
    if abs(math.log(ratio)) <= reach * (1 + 1e-9):
        return [*marks, tag("circle", cx=at(ratio), cy="9", r="3.5", class_=f"v-{kind}")]
    sign, x, anchor = ("\u25b6", "100%", "end") if ratio > 1 else ("\u25c0", "0%", "start")
    return [*marks, tag("text", sign, x=x, y="13", text_anchor=anchor, class_=f"beyond v-{kind}")]


def _other_row(metric: MetricComparison) -> Markup:
    return tag("tr", _sides_cells(metric), tag("td", metric.reason, class_="why"))


def _sides_cells(metric: MetricComparison) -> list[Markup]:
    name = title(metric.name) + (f", {metric.unit}" if metric.unit else "")
    return [
        tag("th", name, scope="row"),
        cell(metric.reference),
        cell(metric.candidate),
        cell(metric.difference, sign=True),
        cell(metric.ratio, text=change_text(metric)),
    ]


def _p_text(value: float | None) -> str:
    return "n/a" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"
