"""The page's section on a comparison: the parts of the step-time difference, then a verdict per metric."""

import math
from collections.abc import Sequence

from aorta.account.judge.cells import CELLS
from aorta.account.judge.compare import CALLED
from aorta.account.model import Comparison, ConfidenceInterval, Decomposition, MetricComparison, Part
from aorta.page.parts import (
    TIMES,
    Column,
    Markup,
    at_percent,
    bar,
    bullets,
    cell,
    cell_mark,
    chart,
    counted,
    empty,
    filterable,
    folded,
    interval_text,
    number,
    numeric,
    percent,
    quantity,
    row,
    section,
    sentence,
    setting_cell,
    swatch,
    table,
    tag,
    title,
)
from aorta.page.table import parts_shown
from aorta.timeline.statistics import LEVEL

MOST_SETTINGS = 8
VERDICT_SIGNS = {
    "better": "\u2713",
    "worse": "\u2717",
    "different": "\u25c6",
    "same": "=",
    "cannot tell": "?",
}
"""Signs beside the verdict's word, so that colour alone never tells it. No arrows: a better value may be
higher or lower."""


def changes(comparison: Comparison) -> Markup:
    measured = [
        metric
        for metric in comparison.metrics.values()
        if (metric.reference is not None or metric.candidate is not None)
    ]
    measured.sort(key=lambda metric: metric.name != comparison.main)
    judged = [metric for metric in measured if metric.verdict != "not judged"]
    unjudged = [metric for metric in measured if metric.verdict == "not judged"]
    return section(
        "changes",
        "What changed",
        _settings(comparison),
        _parts(comparison),
        bullets(comparison.notes),
        tag("h3", "Verdicts"),
        _verdicts(comparison, judged) if judged else empty("No metric could be judged."),
        _unjudged_rows(comparison, unjudged, is_open=not judged) if unjudged else None,
    )


def _settings(comparison: Comparison) -> list[Markup]:
    """What is configured otherwise: what is compared, before what it does."""
    if not comparison.differences and not comparison.is_described:
        return []  # a note says that it is not known
    if not comparison.differences:
        return [tag("p", "No recorded setting, version or device differs.", class_="note")]
    columns: list[Column] = [
        ("", "", False), ("setting that differs", "", False), (comparison.reference, "", False),
        (comparison.candidate, "", False),
    ]  # fmt: skip
    rows = [
        tag("tr", tag("td", row.group), tag("th", row.name, scope="row"), setting_cell(row.reference),
            setting_cell(row.candidate))
        for row in comparison.differences
    ]  # fmt: skip
    name = "Settings that differ"
    shown = [table(name, columns, rows[:MOST_SETTINGS], class_="narrow")]
    if more := rows[MOST_SETTINGS:]:
        shown.append(folded(f"{len(more)} more settings differ", table(name, columns, more, class_="narrow")))
    return shown


def _parts(comparison: Comparison) -> list[Markup | None]:
    """Table of the parts that the step-time difference consists of."""
    decomposition = comparison.decomposition
    if decomposition is None:
        return [empty(f"The difference in step time is not broken down: {_why_whole(comparison)}.")]
    parts = [*parts_shown(decomposition), decomposition.step]
    has_intervals = any(part.interval is not None for part in parts)
    longest = max(max(part.reference_ms, part.candidate_ms, *_ends(part)) for part in parts)
    columns: list[Column] = [
        ("", "", False), (comparison.reference, "ms", True), (comparison.candidate, "ms", True),
        ("difference", "ms", True), *([(LEVEL, "ms", True)] if has_intervals else []), ("", "", False),
    ]  # fmt: skip
    rows = [_part_row(part, longest, has_intervals, part is decomposition.step) for part in parts]
    no_interval = "" if has_intervals else " No interval can be given: too few such steps."
    text = (
        f"Filled: {comparison.candidate}; the frame: {comparison.reference}, on one axis; the line: where the"
        f" filled bar may end. {sentence(decomposition.estimator)}.{no_interval}"
    )
    return [
        tag("p", f"Times: {decomposition.of_work}.", class_="lead") if decomposition.of_work else None,
        table("Where the difference comes from", columns, rows),
        tag("p", text, class_="note"),
        _phases(comparison, decomposition) if decomposition.phases else None,
        bullets(decomposition.notes),
    ]


def _phases(comparison: Comparison, decomposition: Decomposition) -> Markup:
    columns: list[Column] = [
        ("phase", "", False), (comparison.reference, "ms", True), (comparison.candidate, "ms", True),
        ("difference", "ms", True), (LEVEL, "ms", True), ("most of it in", "", False),
    ]  # fmt: skip
    rows = [
        row(
            phase.title,
            *_times(phase.part),
            numeric(interval_text(phase.part.interval)),
            tag("td", tag("code", phase.line) if phase.line else None),
        )
        for phase in decomposition.phases
    ]
    return table("The same step by phase", columns, rows)


def _why_whole(comparison: Comparison) -> str:
    rows = (comparison.metrics.get(name) for name in ("step_ms", "compute_ms"))
    reasons = [row.reason for row in rows if row is not None and row.difference is None and row.reason]
    return reasons[0] if reasons else "a part of it was not measured"


def _verdicts(comparison: Comparison, judged: Sequence[MetricComparison]) -> list[Markup]:
    """Those of the main metric and of what changed; the others are folded."""
    reach = _ratio_reach(judged)
    axis = f"{percent(math.exp(-reach) - 1, sign=True)} to {percent(math.exp(reach) - 1, sign=True)}"
    columns: list[Column] = [
        *_sides(comparison), (f"ratio, {axis}", "", False), ("p, Holm", "", True),
        ("verdict", "", False),
    ]  # fmt: skip
    text = (
        "Difference: of the medians beside it. Change: candidate against reference in steps taken together,"
        f" with its {LEVEL} interval; where steps scatter the two may differ, even in sign. p of a part of"
        f" the step allows for {counted(comparison.num_judged, 'judged metric')}. Same: within"
        f" {100 * comparison.matters:g} %."
    )
    called = [m for m in judged if m.verdict in CALLED or m.name == comparison.main]
    others = [m for m in judged if m not in called]
    shown = []
    for metrics in filter(None, (called, others)):
        rows = [_judged_row(metric, reach) for metric in metrics]
        shown.append(table("Judged metrics", columns, rows, sortable=True))
    if called and others:
        words = f"{counted(len(others), 'metric')} that did not change, or of which one cannot tell"
        shown[1] = folded(words, shown[1])
    return [*shown, tag("p", text, class_="note")]


def _unjudged_rows(comparison: Comparison, unjudged: Sequence[MetricComparison], *, is_open: bool) -> Markup:
    columns = [*_sides(comparison), ("why", "", False)]
    unjudged = sorted(
        unjudged, key=lambda metric: metric.difference is None
    )  # what can be set side by side first
    rows = [tag("tr", _sides_cells(metric), tag("td", metric.reason, class_="why")) for metric in unjudged]
    return folded(
        f"{counted(len(unjudged), 'metric')} without a verdict",
        filterable("metrics", "Metrics without a verdict", columns, rows),
        is_open=is_open,
    )


def _sides(comparison: Comparison) -> list[Column]:
    return [
        ("metric", "", False), (comparison.reference, "", True), (comparison.candidate, "", True),
        ("difference", "", True), ("change", "", True),
    ]  # fmt: skip


def _ends(part: Part) -> tuple[float, float] | tuple[()]:
    """Between what the candidate's time lies, seen from the reference's."""
    if part.interval is None:
        return ()
    return part.reference_ms + part.interval.low, part.reference_ms + part.interval.high


def _part_row(part: Part, longest: float, has_intervals: bool, is_sum: bool) -> Markup:
    reference, candidate, *ends = (
        99 * min(max(ms, 0.0), longest) / longest if longest > 0 else 0.0
        for ms in (part.reference_ms, part.candidate_ms, *_ends(part))
    )
    mark = "m-sum" if is_sum else cell_mark(part.name)
    words = CELLS[part.name].title if part.name in CELLS else part.name
    name = "step (the sum)" if is_sum else words
    marks = [bar(0, candidate, mark, 4, 12), bar(0, reference, "frame", 1, 18)]
    if ends:
        places = {"x1": at_percent(ends[0]), "x2": at_percent(ends[1]), "y1": "10", "y2": "10"}
        marks += [tag("line", **places, class_="halo"), tag("line", **places, class_="whisker")]
    return row(
        (swatch(cell_mark(part.name)) if part.name in CELLS else None, name),
        *_times(part),
        numeric(interval_text(part.interval)) if has_intervals else None,
        tag("td", chart(marks, 20, quantity(part.difference_ms, "ms", sign=True)), class_="wide"),
        class_="sum" if is_sum else None,
    )


def _times(part: Part) -> tuple[Markup, Markup, Markup]:
    return cell(part.reference_ms), cell(part.candidate_ms), cell(part.difference_ms, sign=True)


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
    ratio, p = metric.ratio, metric.p_adjusted
    drawn = None
    if ratio is not None and ratio > 0:
        kind = metric.verdict if metric.verdict in ("better", "worse") else "none"
        drawn = chart(_ratio_marks(ratio, metric.interval, reach, kind), 18, f"ratio {ratio:.3f}")
    reason = tag("div", metric.reason, class_="why", title=metric.reason) if metric.reason else None
    return tag(
        "tr",
        _sides_cells(metric),
        tag("td", drawn, class_="dots"),
        cell(p, text="n/a" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"),
        tag("td", verdict_mark(metric.verdict), reason),
    )


def _ratio_marks(ratio: float, interval: ConfidenceInterval | None, reach: float, kind: str) -> list[Markup]:
    """Ratio marks on a logarithmic axis with 1 in the middle; an arrow where the ratio is beyond its ends."""

    def place(value: float) -> str:
        share = math.log(value) / reach if value > 0 else -1.0
        return at_percent(50 + 46 * max(-1.0, min(1.0, share)))

    marks = [tag("line", x1="50%", x2="50%", y1="0", y2="18", class_="axis")]
    if interval is not None:
        low, high = place(interval.low), place(interval.high)
        marks.append(tag("line", x1=low, x2=high, y1="9", y2="9", class_=f"interval v-{kind}"))
    if abs(math.log(ratio)) <= reach * (1 + 1e-9):
        return [*marks, tag("circle", cx=place(ratio), cy="9", r="3.5", class_=f"v-{kind}")]
    sign, x, anchor = ("\u25b6", "100%", "end") if ratio > 1 else ("\u25c0", "0%", "start")
    return [*marks, tag("text", sign, x=x, y="13", text_anchor=anchor, class_=f"beyond v-{kind}")]


def _sides_cells(metric: MetricComparison) -> list[Markup]:
    unit = metric.unit if metric.unit not in ("bytes", "tokens/s", "samples/s") else ""
    name = f"{title(metric.name)}, {unit}" if unit else title(metric.name)
    return [
        tag("th", name, scope="row"),
        _side_cell(metric, metric.reference),
        _side_cell(metric, metric.candidate),
        _side_cell(metric, metric.difference, sign=True),
        cell(metric.ratio, text=change_text(metric)),
    ]


def _side_cell(metric: MetricComparison, value: float | None, *, sign: bool = False) -> Markup:
    is_bytes = metric.unit == "bytes"
    return cell(value, text=quantity(value, "bytes", sign=sign) if is_bytes else None, sign=sign)


def verdict_mark(verdict: str) -> Markup:
    sign = VERDICT_SIGNS.get(verdict, "")
    kind = verdict.replace(" ", "-") if verdict in VERDICT_SIGNS else "none"
    return tag("span", tag("span", sign, aria_hidden="true"), " " if sign else None, verdict,
               class_=f"verdict {kind}")  # fmt: skip


def change_text(metric: MetricComparison) -> str:
    """Relative where there is a ratio: '+3.2 % [+2.9, +3.5]'; of what is not alike at all a multiple."""
    if metric.ratio is not None and metric.ratio > 10:
        return f"{TIMES} {number(metric.ratio)}"
    if metric.ratio is not None:
        interval = _shares(metric.interval)
        return f"{percent(metric.ratio - 1, sign=True, digits=1)}{interval}"
    if metric.difference is not None:
        change = quantity(metric.difference, metric.unit, sign=True)
        return f"{change} {interval_text(metric.difference_interval)}".rstrip()
    return "n/a"


def _shares(interval: ConfidenceInterval | None) -> str:
    if interval is None:
        return ""
    low, high = (
        percent(x - 1, sign=True, digits=1).removesuffix(" %") for x in (interval.low, interval.high)
    )
    return f" [{low}, {high}]"
