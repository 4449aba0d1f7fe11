"""The sections below the answer that need no script: tables, bars, notes, definitions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aorta.report.model import CollectiveRow, Comparison, Dataset, JudgedRun, MetricComparison, Part, Report
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
MISSING_COLUMNS = (("not measured", "", False), ("reason", "", False))
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
        rows = [*decomposition.parts, decomposition.step]
        ends = [x for p in rows for x in (0.0, p.difference_ms, *_ends(p)) if math.isfinite(x)]
        axis = min(ends), max(ends)
        parts = [
            table(
                "Where the difference comes from",
                [("", "", False), (comparison.reference, "ms", True), (comparison.candidate, "ms", True),
                 ("difference", "ms", True), ("95 %", "ms", True), ("", "", False)],
                [_part_row(part, axis, part is decomposition.step) for part in rows],
            ),
            tag("p", f"Less time is left of the line, more is right of it. {_cap(decomposition.estimator)}.",
                class_="note"),
            _list(decomposition.notes),
        ]  # fmt: skip
    metrics = list(comparison.metrics.values())
    reach = _ratio_reach(metrics)
    columns: list[Column] = [
        ("metric", "", False), ("unit", "", False), (comparison.reference, "", True),
        (comparison.candidate, "", True), ("difference", "", True), ("change", "", True),
        (f"ratio, {percent(math.exp(-reach) - 1, sign=True)} to {percent(math.exp(reach) - 1, sign=True)}",
         "", False),
        ("detectable", "", True), ("p, Holm", "", True), ("verdict", "", False),
    ]  # fmt: skip
    return section(
        "changes",
        "What changed",
        parts,
        filterable("metrics", "Every metric", columns, [_metric_row(metric, reach) for metric in metrics]),
        tag("p", f"Change: candidate against reference, with its 95 % interval. Detectable: the smallest true"
                 f" difference that such runs show in four comparisons of five. p allows for"
                 f" {counted(comparison.num_judged, 'judged metric')}.", class_="note"),
        _list(comparison.notes),
        lead=f"{comparison.candidate} against {comparison.reference}.",
    )  # fmt: skip


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


def _metric_row(metric: MetricComparison, reach: float) -> Markup:
    ratio = metric.ratio
    drawn = None
    if ratio is not None and ratio > 0:
        low, high = (metric.interval.low, metric.interval.high) if metric.interval else (ratio, ratio)
        at = [
            50 + 48 * max(-1.0, min(1.0, math.log(x) / reach)) if x > 0 else 2.0 for x in (low, ratio, high)
        ]
        kind = metric.verdict if metric.verdict in ("better", "worse") else "none"
        beyond = abs(math.log(ratio)) > reach
        drawn = _svg(
            [
                tag(
                    "text",
                    "\u203a" if ratio > 1 else "\u2039",
                    x="100%" if ratio > 1 else "0%",
                    y="13",
                    text_anchor="end" if ratio > 1 else "start",
                    class_="beyond",
                )
                if beyond
                else None,
                tag("line", x1="50%", x2="50%", y1="0", y2="18", class_="axis"),
                tag("line", x1=_pc(at[0]), x2=_pc(at[2]), y1="9", y2="9", class_=f"interval v-{kind}"),
                tag("circle", cx=_pc(at[1]), cy="9", r="3.5", class_=f"v-{kind}"),
            ],
            18,
            f"ratio {ratio:.3f} {interval_text(metric.interval)}",
        )
    why = tag("div", metric.reason, class_="why") if metric.reason else None
    return tag(
        "tr",
        tag("th", title(metric.name), scope="row"),
        tag("td", metric.unit),
        cell(metric.reference), cell(metric.candidate), cell(metric.difference, sign=True),
        cell(metric.ratio, text=change_text(metric) if metric.ratio is not None else "n/a"),
        tag("td", drawn, class_="dots"),
        cell(metric.detectable),
        cell(metric.p_adjusted, text="n/a" if metric.p_adjusted is None else f"{metric.p_adjusted:.2g}"),
        tag("td", verdict_mark(metric.verdict), why),
    )  # fmt: skip


# ---- where the time goes -------------------------------------------------------------------------


def where_time_goes(report: Report) -> Markup:
    datasets = list(report.datasets.values())
    means = [_rank_parts(dataset.first) for dataset in datasets]
    longest = max((float(np.nansum(parts, axis=1).max()) for parts, _, _ in means if len(parts)), default=0.0)
    has_wait = any("wait" in names for _, names, _ in means)
    names = ["compute", "hidden", *(("transfer", "wait") if has_wait else ("exposed",)), "idle"]
    blocks = [_bars(dataset, *rest, names, longest) for dataset, rest in zip(datasets, means, strict=True)]
    return section(
        "time",
        "Where the time goes",
        legend(names),
        blocks,
        lead="Mean over the judged steps, rank by rank; one scale for all bars. The parts add up to a step.",
    )


def _rank_parts(judged: JudgedRun) -> tuple[Any, list[str], Any]:
    """[rank, part] in ms, the parts' names, and the step per rank; means over the judged steps."""
    metrics = judged.run.metrics

    def mean(name: str) -> Any:
        values = judged.values(name)
        return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])

    if any(name not in metrics for name in ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms", "step_ms")):
        return np.empty((0, 0)), [], np.empty(0)
    hidden = mean("hidden_ms")
    parts = {"compute": mean("compute_ms") - hidden, "hidden": hidden}
    if "exposed_wait_ms" in metrics and np.isfinite(judged.values("exposed_wait_ms")).any():
        parts["wait"] = mean("exposed_wait_ms")
        parts["transfer"] = mean("exposed_ms") - parts["wait"]
    else:
        parts["exposed"] = mean("exposed_ms")
    parts["idle"] = mean("idle_ms")
    return np.stack(list(parts.values()), axis=1), list(parts), mean("step_ms")


def _bars(
    dataset: Dataset, parts: Any, found: list[str], step: Any, names: list[str], longest: float
) -> Markup:
    judged = dataset.first
    heading = tag("h3", dataset.label)
    if len(parts) == 0 or not np.isfinite(parts).any() or longest <= 0:
        reason = judged.run.not_measured.get("compute_ms", f"not given by source {dataset.source}")
        return tag("div", heading, empty(f"not measured: {reason}"))
    order = [i for i in names if i in found] + [i for i in found if i not in names]
    ranks = judged.run.ranks
    shown = list(range(len(ranks)))
    left_out = None
    if len(ranks) > MAX_BARS:
        exposed = [i for i, name in enumerate(found) if name in ("exposed", "wait", "transfer")]
        by_exposed = np.argsort(np.nansum(parts[:, exposed], axis=1), kind="stable")
        at = np.unique(np.linspace(0, len(ranks) - 1, MAX_BARS).round().astype(int))
        shown = sorted(by_exposed[at].tolist())
        left_out = tag(
            "p",
            f"{len(shown)} of {len(ranks)} ranks are drawn, spread evenly from the least to the most exposed;"
            " min, median and max are over all.",
            class_="note",
        )
    rows = []
    for i in shown:
        values = {name: float(parts[i, found.index(name)]) for name in order}
        drawn, at_pc = [], 0.0
        for name, value in values.items():
            if math.isfinite(value) and value > 0:
                end = at_pc + 100 * value / longest
                label = f"{STATE_TITLES[name]}: {quantity(value, 'ms')}"
                drawn.append(_rect(at_pc, end, f"m-{name}", 0, 18, label))
                at_pc = end
        spoken = ", ".join(f"{STATE_TITLES[name]} {quantity(value, 'ms')}" for name, value in values.items())
        rows.append(
            tag("tr", tag("th", f"rank {ranks[i]}", scope="row"),
                tag("td", _svg(drawn, 18, spoken), class_="wide"),
                cell(float(step[i])), [cell(value) for value in values.values()])
        )  # fmt: skip
    spreads = []
    if len(ranks) > 1:
        for name, over in (("min", np.nanmin), ("median", np.nanmedian), ("max", np.nanmax)):
            columns = [step, *(parts[:, found.index(part)] for part in order)]
            values_over = [float(over(c)) if np.isfinite(c).any() else math.nan for c in columns]
            spreads.append(
                tag("tr", tag("th", name, scope="row"), tag("td", "over ranks" if name == "min" else ""),
                    [cell(value) for value in values_over], class_="sum" if name == "min" else "spread")
            )  # fmt: skip
    columns_: list[Column] = [("", "", False), ("", "", False), ("step", "ms", True)]
    columns_ += [(SHORT_STATES[name], "ms", True) for name in order]
    return tag(
        "div", heading, table(f"Where the time goes, {dataset.label}", columns_, [*rows, *spreads]), left_out
    )


SHORT_STATES = {
    "compute": "compute only",
    "hidden": "hidden",
    "exposed": "exposed",
    "transfer": "exp. transfer",
    "wait": "exp. wait",
    "idle": "idle",
}


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
    found = exposed_collectives(steps.records[step], steps.arrival_ns.get(step, {}), NUM_LONGEST)
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
            cell(row.bytes, text=byte_text(row.bytes)), cell(row.start_ms),
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
    for dataset in report.datasets.values():
        children.append(_settings_of(dataset))
    return section("ran", "What ran", children)


def _setting(value: str | None) -> Markup:
    return tag("td", tag("i", "not set") if value is None else tag("code", value))


def _settings_of(dataset: Dataset) -> Markup:
    judged = dataset.first
    run = judged.run.run
    facts = {
        "path": str(judged.run.path),
        "ranks": device_text(judged),
        "precision": precision(judged) or "not known",
        "source": dataset.source,
        "steps": f"{judged.run.num_steps} read, {judged.num_steps} judged",
        "warm-up": f"{counted(judged.num_warmup, 'step')} left out: {judged.warmup_rule}",
    }
    if len(dataset.runs) > 1:
        facts["runs"] = ", ".join(str(other.run.path) for other in dataset.runs)
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in facts.items()]
    more: Any = empty("Configuration, versions and environment are not known: there is no run.json.")
    if run is not None:
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
        all_rows = [
            tag("tr", tag("td", group), tag("th", name, scope="row"), _setting(value))
            for group, content in groups.items()
            for name, value in _leaves(content)
        ]
        more = tag(
            "details",
            tag("summary", f"all recorded settings of {dataset.label}"),
            table(f"Settings of {dataset.label}", SETTING_COLUMNS, all_rows, class_="narrow"),
        )
    return tag(
        "div",
        tag("h3", dataset.label),
        table(f"What ran as {dataset.label}", [], rows, class_="facts"),
        more,
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
    children: list[Any] = []
    for dataset in report.datasets.values():
        run = dataset.first.run
        texts = list(dict.fromkeys(note for judged in dataset.runs for note in judged.run.notes))
        texts += [
            f"{source}: {other.num_steps} steps kept apart, see other_sources in summary.json"
            for source, other in run.other_sources.items()
        ]
        missing = [
            (name, reason or f"not given by source {dataset.source}")
            for name, reason in run.not_measured.items()
        ]
        rows = [tag("tr", tag("th", name, scope="row"), tag("td", reason)) for name, reason in missing]
        children += [
            tag("h3", dataset.label),
            _list(texts) or empty("No notes."),
            table(f"Not measured in {dataset.label}", MISSING_COLUMNS, rows, class_="narrow")
            if rows
            else empty("Everything that the source can give was measured."),
        ]
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
