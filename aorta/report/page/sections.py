"""The sections below the answer that need no script: tables, bars, notes, definitions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aorta.report.model import (
    CollectiveRow,
    Comparison,
    Dataset,
    Interval,
    JudgedRun,
    MetricComparison,
    Part,
    Report,
)
from aorta.report.page.answer import (
    change_text,
    device_text,
    interval_text,
    precision,
    verdict_mark,
)
from aorta.report.page.definitions import DEFINITIONS
from aorta.report.page.markup import Markup, tag
from aorta.report.page.spans import Steps, exposed_collectives
from aorta.report.page.words import (
    STATE_TITLES,
    byte_text,
    counted,
    number,
    percent,
    quantity,
    title,
)

MAX_BARS = 64
"""Ranks with a bar of their own in one label."""
NUM_LONGEST = 12
APART = 4
"""Runs whose steps differ by more than this factor get a scale each."""
SETTING_COLUMNS = (("group", "", False), ("setting", "", False), ("value", "", False))
PART_NAMES = {
    "exposed_wait": "exposed, waiting for a rank",
    "exposed_transfer": "exposed, transfer",
    "exposed": "exposed communication",
    "exposed_copy": "copies alone",
}
Column = tuple[str, str, bool]
"""Title, unit, and whether it is a number."""


def section(name: str, heading: str, *children: Any, lead: str = "") -> Markup:
    return tag(
        "section",
        tag("h2", heading, id=f"{name}-title"),
        tag("p", lead, class_="lead") if lead else None,
        *children,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def empty(reason: str) -> Markup:
    return tag("p", reason, class_="empty")


# ---- what changed --------------------------------------------------------------------------------


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
            tag("p", f"Less time is left of the line, more is right of it. {_cap(decomposition.estimator)}.",
                class_="note"),
            _list(decomposition.notes),
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
        _list(comparison.notes),
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
        marks.append(_rect(low, high, colour, 3, 12))
        if len(at) == 4:
            marks.append(tag("line", x1=_pc(at[2]), x2=_pc(at[3]), y1="9", y2="9", class_="halo"))
            marks.append(tag("line", x1=_pc(at[2]), x2=_pc(at[3]), y1="9", y2="9", class_="whisker"))
        marks.append(tag("line", x1=_pc(at[0]), x2=_pc(at[0]), y1="0", y2="18", class_="axis"))
    name = "step (the sum)" if is_sum else PART_NAMES.get(part.name, part.name.replace("_", " "))
    cells = [
        tag("th", name, scope="row"),
        cell(part.reference_ms), cell(part.candidate_ms), cell(part.difference_ms, sign=True),
        tag("td", interval_text(part.interval, sign=True), class_="num"),
        tag("td", _svg(marks, 18, f"{quantity(part.difference_ms, 'ms', sign=True)}"), class_="wide"),
    ]  # fmt: skip
    return tag("tr", cells, class_="sum" if is_sum else None)


def _ratio_reach(metrics: Sequence[MetricComparison]) -> float:
    """Half width of the ratio axis, as a logarithm: all intervals up to twice and half, at least 2 %."""
    ends = [
        abs(math.log(x))
        for m in metrics
        for x in ((m.interval.low, m.interval.high) if m.interval else (m.ratio,))
        if x is not None and 0 < x < math.inf
    ]
    return min(max(0.02, *ends), math.log(2)) if ends else 0.02


def _judged_row(metric: MetricComparison, reach: float) -> Markup:
    ratio = metric.ratio
    drawn = None
    if ratio is not None and ratio > 0:
        kind = metric.verdict if metric.verdict in ("better", "worse") else "none"
        drawn = _svg(_ratio_marks(ratio, metric.interval, reach, kind), 18, f"ratio {ratio:.3f}")
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
        return _pc(50 + 46 * max(-1.0, min(1.0, share)))

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


# ---- where the time goes -------------------------------------------------------------------------


def where_time_goes(report: Report) -> Markup:
    parts = [_rank_parts(dataset.first) for dataset in report.datasets.values()]
    lengths = [float(np.nansum(list(of_rank.bar.values()), axis=0).max()) for of_rank in parts if of_rank.bar]
    longest = max(lengths, default=0.0)
    one_scale = longest <= APART * min(lengths, default=0.0)
    has_wait = any("wait" in p.bar for p in parts)
    exposed = ["transfer", "wait"] if has_wait else ["exposed"]
    columns: list[Column] = [
        ("", "", False), ("", "", False), ("step", "ms", True), ("compute only", "ms", True),
        ("hidden", "ms", True), ("exposed", "ms", True),
        *([("of it waiting", "ms", True)] if has_wait else []), ("idle", "ms", True),
    ]  # fmt: skip
    rows: list[Markup] = []
    left_out: list[Markup] = []
    for dataset, of_rank in zip(report.datasets.values(), parts, strict=True):
        name = dataset.label
        if not one_scale and of_rank.bar:
            longest = float(np.nansum(list(of_rank.bar.values()), axis=0).max())
            name += f", a full bar is {quantity(longest, 'ms')}"
        rows.append(tag("tr", tag("th", name, scope="rowgroup", colspan=len(columns)), class_="group"))
        if not of_rank.bar or longest <= 0:
            reason = dataset.first.run.not_measured.get("compute_ms", f"not given by source {dataset.source}")
            rows.append(tag("tr", tag("td", f"not measured: {reason}", colspan=len(columns))))
            continue
        shown = _shown_ranks(of_rank)
        ranks = dataset.first.run.ranks
        rows += [_rank_row(f"rank {ranks[i]}", of_rank, i, longest, has_wait) for i in shown]
        if len(ranks) > 1:
            rows += [_spread_row(name, of_rank, has_wait) for name in ("min", "median", "max")]
        if len(shown) < len(ranks):
            text = (
                f"{dataset.label}: {len(shown)} of {len(ranks)} ranks are drawn, spread evenly from the least"
                " to the most exposed; min, median and max are over all."
            )
            left_out.append(tag("p", text, class_="note"))
    return section(
        "time",
        "Where the time goes",
        legend(["compute", "hidden", *exposed, "idle"]),
        table("Where the time goes, rank by rank", columns, rows),
        left_out,
        lead="Mean over the judged steps, rank by rank; "
        + ("one scale for all bars." if one_scale else "every run has a scale of its own.")
        + " The parts add up to a step.",
    )


@dataclass(frozen=True, slots=True)
class _RankParts:
    """Means over the judged steps in ms, per rank."""

    bar: dict[str, Any]
    """What a bar is made of, in order; empty where the source does not say."""
    numbers: dict[str, Any]
    """The columns: step, compute, hidden, exposed, wait, idle."""


def _rank_parts(judged: JudgedRun) -> _RankParts:
    metrics = judged.run.metrics

    def mean(name: str) -> Any:
        values = judged.values(name)
        return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])

    needed = ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms", "step_ms")
    if any(name not in metrics or not np.isfinite(judged.values(name)).any() for name in needed):
        return _RankParts({}, {})
    compute, hidden, exposed, idle, step = map(mean, needed)
    numbers = {"step": step, "compute": compute - hidden, "hidden": hidden, "exposed": exposed, "idle": idle}
    bar = {"compute": compute - hidden, "hidden": hidden, "exposed": exposed, "idle": idle}
    if "exposed_wait_ms" in metrics and np.isfinite(judged.values("exposed_wait_ms")).any():
        numbers["wait"] = wait = mean("exposed_wait_ms")
        bar = {
            "compute": bar["compute"],
            "hidden": hidden,
            "transfer": exposed - wait,
            "wait": wait,
            "idle": idle,
        }
    return _RankParts(bar, numbers)


def _shown_ranks(of_rank: _RankParts) -> list[int]:
    """All of few; of many those spread evenly from the least to the most exposed."""
    exposed = of_rank.numbers["exposed"]
    if len(exposed) <= MAX_BARS:
        return list(range(len(exposed)))
    order = np.argsort(exposed, kind="stable")
    return sorted(order[np.linspace(0, len(order) - 1, MAX_BARS).round().astype(int)].tolist())


def _rank_row(name: str, of_rank: _RankParts, i: int, longest: float, has_wait: bool) -> Markup:
    drawn, at = [], 0.0
    spoken = []
    for part, values in of_rank.bar.items():
        value = float(values[i])
        spoken.append(f"{STATE_TITLES[part]}: {quantity(value, 'ms')}")
        if math.isfinite(value) and value > 0:
            end = at + 100 * value / longest
            drawn.append(_rect(at, end, f"m-{part}", 0, 18, spoken[-1]))
            at = end
    cells = [cell(value) for value in _numbers(of_rank, has_wait, lambda column: float(column[i]))]
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", _svg(drawn, 18, ", ".join(spoken)), class_="wide"),
        cells,
    )


def _spread_row(name: str, of_rank: _RankParts, has_wait: bool) -> Markup:
    share = {"min": 0, "median": 50, "max": 100}[name]

    def over(column: Any) -> float:
        return float(np.nanpercentile(column, share)) if np.isfinite(column).any() else math.nan

    values = _numbers(of_rank, has_wait, over)
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", "over ranks" if name == "min" else ""),
        [cell(value) for value in values],
        class_="spread sum" if name == "min" else "spread",
    )


def _numbers(of_rank: _RankParts, has_wait: bool, of: Callable[[Any], float]) -> list[float]:
    names = ["step", "compute", "hidden", "exposed", *(["wait"] if has_wait else []), "idle"]
    return [of(of_rank.numbers[name]) if name in of_rank.numbers else math.nan for name in names]


def legend(names: Sequence[str]) -> Markup:
    items = [
        tag("li", tag("svg", _rect(0, 100, f"m-{name}", 0, 12), class_="swatch", aria_hidden="true"),
            STATE_TITLES[name])
        for name in names
    ]  # fmt: skip
    return tag("ul", items, class_="legend")


# ---- collectives ---------------------------------------------------------------------------------


def collectives(report: Report) -> Markup:
    rows = [
        _collective_row(dataset.label, row)
        for dataset in report.datasets.values()
        for row in dataset.first.run.collectives
        if row.count_per_step > 0 or row.duration_ms is not None
    ]
    columns: list[Column] = [
        ("run", "", False), ("collective", "", False), ("bytes", "", True), ("type", "", False),
        ("ranks", "", True), ("stream", "", False), ("per step", "", True), ("duration", "ms", True),
        ("min rank", "ms", True), ("max rank", "ms", True), ("wait", "ms", True), ("transfer", "ms", True),
        ("busbw", "GB/s", True),
    ]  # fmt: skip
    lead = (
        "Judged steps; each rank's median, then the median over ranks. Duration contains waiting for late"
        " ranks; busbw uses the transfer where that is known."
    )
    if not rows:
        return section("collectives", "Collectives", empty("No collective was recorded."))
    return section(
        "collectives", "Collectives", filterable("collective", "Collectives", columns, rows), lead=lead
    )


def _collective_row(label: str, row: CollectiveRow) -> Markup:
    return tag(
        "tr",
        tag("td", label), tag("th", row.op, scope="row"), cell(row.bytes, text=byte_text(row.bytes)),
        tag("td", row.dtype), cell(row.num_ranks, text=_count(row.num_ranks)), tag("td", row.stream),
        cell(row.count_per_step), cell(row.duration_ms), cell(row.duration_min_ms), cell(row.duration_max_ms),
        cell(row.wait_ms), cell(row.transfer_ms), cell(row.busbw_gb_s),
    )  # fmt: skip


def longest_exposed(steps: Steps) -> Markup | None:
    """The timeline's median step in words: the text alternative, and often the answer."""
    step = steps.chosen.get("median")
    if step is None or step not in steps.records:
        return None
    found = exposed_collectives(steps, step, NUM_LONGEST)
    if not found:
        return None
    columns: list[Column] = [
        ("rank", "", True), ("collective", "", False), ("group", "", False), ("bytes", "", True),
        ("start", "ms", True), ("duration", "ms", True), ("exposed", "ms", True), ("wait", "ms", True),
        ("busbw", "GB/s", True),
    ]  # fmt: skip
    rows = [
        tag(
            "tr",
            cell(rank, text=str(rank)), tag("th", f"{row.op} #{row.seq}", scope="row"), tag("td", row.group),
            cell(row.bytes or None, text=byte_text(row.bytes or None)), cell(row.start_ms),
            cell((row.end_ms or 0.0) - (row.start_ms or 0.0)), cell(exposed_ms), cell(wait_ms),
            cell(row.busbw_gb_s),
        )
        for rank, row, exposed_ms, wait_ms in found
    ]  # fmt: skip
    return tag(
        "details",
        tag("summary", f"{steps.label}, step {step}: the collectives that were exposed longest"),
        table(f"Longest exposed collectives of {steps.label}", columns, rows),
    )


# ---- what ran ------------------------------------------------------------------------------------


def what_ran(report: Report) -> Markup:
    comparison = report.comparison
    children: list[Any] = []
    if comparison is not None:
        children.append(tag("h3", "Configured differently"))
        if comparison.differences:
            columns: list[Column] = [
                ("group", "", False), ("setting", "", False), (comparison.reference, "", False),
                (comparison.candidate, "", False),
            ]  # fmt: skip
            rows = [
                tag("tr", tag("td", row.group), tag("th", row.name, scope="row"), _setting(row.reference),
                    _setting(row.candidate))
                for row in comparison.differences
            ]  # fmt: skip
            children.append(table("Settings that differ", columns, rows, class_="narrow"))
        else:
            children.append(empty("Nothing that was recorded differs."))
    datasets = list(report.datasets.values())
    facts = [_facts(dataset) for dataset in datasets]
    columns = [("", "", False), *((dataset.label, "", False) for dataset in datasets)]
    rows = [
        tag("tr", tag("th", name, scope="row"), [tag("td", fact[name]) for fact in facts])
        for name in facts[0]
    ]
    children += [tag("h3", "Runs"), table("What ran", columns, rows, class_="narrow facts")]
    children += [_settings_of(dataset) for dataset in datasets]
    return section("ran", "What ran", children)


def _setting(value: str | None) -> Markup:
    return tag("td", tag("i", "not set") if value is None else tag("code", value))


def _facts(dataset: Dataset) -> dict[str, str]:
    judged = dataset.first
    return {
        "path": ", ".join(str(other.run.path) for other in dataset.runs),
        "ranks": device_text(judged),
        "precision": precision(judged) or "not known",
        "source": dataset.source,
        "steps": f"{judged.run.num_steps} read, {judged.num_steps} judged",
        "warm-up": f"{counted(judged.num_warmup, 'step') if judged.num_warmup else 'none'} left out:"
        f" {judged.warmup_rule}",
    }


def _settings_of(dataset: Dataset) -> Markup:
    run = dataset.first.run.run
    if run is None:
        return empty(
            f"{dataset.label}: configuration, versions and environment are not known: there is no run.json."
        )
    groups: dict[str, Any] = {
        "command": " ".join(run.command),
        "placement": run.placement,
        "layout": run.layout,
        "model": run.model,
        "versions": run.versions,
        "environment": run.environment,
        "config": run.config,
        "coverage": run.coverage,
    }
    rows = [
        tag("tr", tag("td", group), tag("th", name, scope="row"), _setting(value))
        for group, content in groups.items()
        for name, value in _leaves(content)
    ]
    return tag(
        "details",
        tag("summary", f"all recorded settings of {dataset.label}"),
        table(f"Settings of {dataset.label}", SETTING_COLUMNS, rows, class_="narrow"),
    )


def _leaves(content: Any, prefix: str = "") -> list[tuple[str, str | None]]:
    if isinstance(content, dict):
        return [
            leaf
            for key, value in content.items()
            for leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, None if content is None else str(content))]


# ---- notes and definitions -----------------------------------------------------------------------


def notes(report: Report) -> Markup:
    datasets = list(report.datasets.values())
    children: list[Any] = []
    for dataset in datasets:
        texts = list(dict.fromkeys(note for judged in dataset.runs for note in judged.run.notes))
        texts += [
            f"{source}: {other.num_steps} steps kept apart, see other_sources in summary.json"
            for source, other in dataset.first.run.other_sources.items()
        ]
        children += [tag("h3", dataset.label), _list(texts)] if texts else []
    reasons = [dataset.first.run.not_measured for dataset in datasets]
    names = dict.fromkeys(name for found in reasons for name in found)
    if names:
        columns = [("not measured", "", False), *((dataset.label, "", False) for dataset in datasets)]
        rows = [
            tag(
                "tr",
                tag("th", name, scope="row"),
                [tag("td", found.get(name, "measured")) for found in reasons],
            )
            for name in names
        ]
        children += [
            tag("h3", "Not measured, and why"),
            table("Not measured", columns, rows, class_="narrow"),
        ]
    else:
        children.append(empty("Everything that the sources can give was measured."))
    return section("notes", "Notes, and what was not measured", children)


def definitions() -> Markup:
    items = [[tag("dt", name), tag("dd", text)] for name, text in DEFINITIONS]
    sums = tag("p", tag("code", "comm = hidden + exposed"), " and ",
               tag("code", "step = compute + exposed + idle"), " hold in every number here.")  # fmt: skip
    return section("definitions", "Definitions", sums, tag("dl", items))


# ---- parts ---------------------------------------------------------------------------------------


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Markup],
    *,
    sortable: bool = False,
    class_: str = "",
) -> Markup:
    heads = []
    for name, of_unit, is_number in columns:
        text = [name, f", {of_unit}" if of_unit and name else of_unit or None]
        content: Any = tag("button", text, type="button") if sortable and name else text
        heads.append(
            tag("th", content, scope="col", class_="num" if is_number else None,
                aria_sort="none" if sortable and name else None)
        )  # fmt: skip
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", heads)) if heads else None,
            tag("tbody", rows),
            class_=" ".join(filter(None, (class_, "sortable" if sortable else ""))) or None,
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def filterable(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Markup]) -> Markup:
    """A table that sorts on click of its heads and shows the rows that contain what is typed."""
    return tag(
        "div",
        tag(
            "p",
            tag("label", "Filter ", tag("input", type="search", id=f"{name}-filter", autocomplete="off")),
            " ",
            tag("output", f"{len(rows)} of {counted(len(rows), 'row')}", for_=f"{name}-filter"),
            class_="filter needs-script",
        ),
        table(caption, columns, rows, sortable=True),
        class_="filterable",
    )


def cell(value: float | int | None, *, text: str | None = None, sign: bool = False) -> Markup:
    """A number; data-value is what a table sorts by."""
    known = value is not None and math.isfinite(value)
    shown = text if text is not None else number(value, sign=sign)
    return tag(
        "td",
        shown,
        class_="num" if known else "num missing",
        data_value=repr(float(value or 0)) if known else "",
    )


def _count(value: int | None) -> str:
    return "n/a" if value is None else str(value)


def _svg(children: Sequence[Markup | None], height: int, spoken: str) -> Markup:
    return tag("svg", children, height=height, role="img", aria_label=spoken, class_="chart")


def _rect(low: float, high: float, kind: str, y: int, height: int, hover: str = "") -> Markup:
    return tag(
        "rect", tag("title", hover) if hover else None, x=_pc(low), width=_pc(max(0.0, high - low)), y=y,
        height=height, class_=kind,
    )  # fmt: skip


def _pc(value: float) -> str:
    return f"{value:.3f}%"


def _list(texts: Sequence[str]) -> Markup | None:
    return tag("ul", [tag("li", text) for text in texts], class_="notes") if texts else None


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".")
