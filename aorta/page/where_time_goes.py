"""The page's section "Where the time goes": a bar and numbers per rank, and the spread over ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.leading import WORDS, metric_of, partly_timed, with_word
from aorta.account.judge.ranks import rank_rows
from aorta.account.model import JudgedRun, Lead, Report
from aorta.page.parts import (
    STATE_TITLES,
    Column,
    Markup,
    bar,
    cell,
    chart,
    legend,
    quantity,
    section,
    table,
    tag,
    title,
)

NEEDED = ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms", "step_ms")
NUM_LATE = 4
"""Ranks that cost the others most, which are always among those with a bar."""
MAX_BARS = 64
"""Ranks with a bar of their own in one label."""
APART = 4
"""Runs whose steps differ by more than this factor get a scale each."""


def where_time_goes(report: Report) -> Markup:
    parts = [_rank_parts(dataset.first, dataset.lead) for dataset in report.datasets.values()]
    is_raw = all(dataset.lead == "raw" for dataset in report.datasets.values())
    lengths = [
        float(np.nansum(list(rank_parts.bar.values()), axis=0).max())
        for rank_parts in parts
        if rank_parts.bar
    ]
    longest = max(lengths, default=0.0)
    one_scale = longest <= APART * min(lengths, default=0.0)
    has_wait = any("wait" in p.bar for p in parts)
    has_wait_numbers = any("wait" in p.numbers for p in parts)
    exposed = ["transfer", "wait"] if has_wait else ["exposed"]
    only = " that were timed" if any(map(partly_timed, report.datasets.values())) else ""
    columns: list[Column] = [
        ("", "", False), ("", "", False), ("step", "ms", True), ("compute only", "ms", True),
        ("hidden", "ms", True), ("exposed", "ms", True),
        *([("of it waiting" if is_raw else "waiting, raw", "ms", True)] if has_wait_numbers else []),
        ("idle", "ms", True),
    ]  # fmt: skip
    rows: list[Markup] = []
    left_out: list[Markup] = []
    for dataset, rank_parts in zip(report.datasets.values(), parts, strict=True):
        name = with_word(dataset.label, WORDS[dataset.lead])
        if not one_scale and rank_parts.bar:
            longest = float(np.nansum(list(rank_parts.bar.values()), axis=0).max())
            name += f", a full bar is {quantity(longest, 'ms')}"
        rows.append(tag("tr", tag("th", name, scope="rowgroup", colspan=len(columns)), class_="group"))
        if not rank_parts.bar or longest <= 0:
            rows.append(tag("tr", tag("td", _why_no_bar(dataset.first, dataset.lead), colspan=len(columns))))
            continue
        rows_shown = _shown_ranks(dataset.first, rank_parts)
        ranks = dataset.first.run.ranks
        rows += [_rank_row(f"rank {ranks[i]}", rank_parts, i, longest, has_wait_numbers) for i in rows_shown]
        if len(ranks) > 1:
            rows += [_spread_row(name, rank_parts, has_wait_numbers) for name in ("min", "median", "max")]
        if len(rows_shown) < len(ranks):
            text = (
                f"{dataset.label}: {len(rows_shown)} of {len(ranks)} ranks are drawn, the {NUM_LATE} that are"
                " waited for most and others spread evenly from the least to the most exposed; min, median"
                " and max are over all, and the map below has all."
            )
            left_out.append(tag("p", text, class_="note"))
    return section(
        "time",
        "Where the time goes",
        legend(["compute", "hidden", *exposed, "idle"]),
        table("Where the time goes, rank by rank", columns, rows),
        left_out,
        lead=f"Mean over the judged steps{only}, rank by rank (means add up, medians do not); "
        + ("one scale for all bars." if one_scale else "each run has its own scale.")
        + (
            " The parts add up to a step."
            if is_raw
            else " The parts add up to a step; calibrated ones are estimates and may be off it a little."
        ),
    )


@dataclass(frozen=True, slots=True)
class _RankParts:
    """Means over the judged steps in ms, per rank."""

    bar: dict[str, Any]
    """Segments of a bar in order; empty where the source does not tell them."""
    numbers: dict[str, Any]
    """The columns: step, compute, hidden, exposed, wait, idle."""


def _rank_parts(judged: JudgedRun, lead: Lead) -> _RankParts:
    metrics = judged.run.metrics
    if _lacking(judged, lead):
        return _RankParts({}, {})
    parts_ms = [judged.values(metric_of(lead, name)) for name in NEEDED]
    complete: NDArray[np.bool_] = np.logical_and.reduce([np.isfinite(values) for values in parts_ms])

    def mean(values: Any) -> Any:
        """Mean over the rank's steps that have all parts, so that the parts add up; over all its steps if
        none has."""
        return _nanmeans(np.where(complete | ~complete.any(axis=1, keepdims=True), values, np.nan))

    compute, hidden, exposed, idle, step = map(mean, parts_ms)
    numbers = {"step": step, "compute": compute - hidden, "hidden": hidden, "exposed": exposed, "idle": idle}
    bar = {"compute": compute - hidden, "hidden": hidden, "exposed": exposed, "idle": idle}
    if "exposed_wait_ms" in metrics and np.isfinite(judged.values("exposed_wait_ms")).any():
        numbers["wait"] = wait = _nanmeans(judged.values("exposed_wait_ms"))
    if "wait" in numbers and lead == "raw":
        bar = {
            "compute": bar["compute"],
            "hidden": hidden,
            "transfer": exposed - wait,
            "wait": wait,
            "idle": idle,
        }
    return _RankParts(bar, numbers)


def _nanmeans(values: Any) -> Any:
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _lacking(judged: JudgedRun, lead: Lead) -> list[str]:
    names = [(name, metric_of(lead, name)) for name in NEEDED]
    return [
        name
        for name, metric_used in names
        if metric_used not in judged.run.metrics or not np.isfinite(judged.values(metric_used)).any()
    ]


def _why_no_bar(judged: JudgedRun, lead: Lead) -> str:
    missing = _lacking(judged, lead)
    if not missing:
        return "its steps took no time"
    reason = judged.run.not_measured.get(missing[0], f"not given by source {judged.run.source}")
    return f"not measured: {', '.join(title(name) for name in missing)} ({reason})"


def _shown_ranks(judged: JudgedRun, rank_parts: _RankParts) -> list[int]:
    """Rows of the ranks that get a bar: all if they are few, else the latest ones and others spread evenly
    from the least to the most exposed."""
    exposed = rank_parts.numbers["exposed"]
    if len(exposed) <= MAX_BARS:
        return list(range(len(exposed)))
    late = [judged.run.ranks.index(row.rank) for row in rank_rows(judged, "raw")[:NUM_LATE]]
    order = [i for i in np.argsort(exposed, kind="stable").tolist() if i not in late]
    places = np.linspace(0, len(order) - 1, MAX_BARS - len(late)).round().astype(int).tolist()
    return sorted([*late, *(order[i] for i in places)])


def _rank_row(name: str, rank_parts: _RankParts, i: int, longest: float, has_wait: bool) -> Markup:
    drawn, start = [], 0.0
    spoken = []
    for part, values in rank_parts.bar.items():
        value = float(values[i])
        spoken.append(f"{STATE_TITLES[part]}: {quantity(value, 'ms')}")
        if math.isfinite(value) and value > 0:
            end = start + 100 * value / longest
            drawn.append(bar(start, end, f"m-{part}", 0, 18, spoken[-1]))
            start = end
    values = _numbers(rank_parts, has_wait, lambda column: float(column[i]))
    cells = [cell(value, label=label) for value, label in zip(values, _labels(has_wait), strict=True)]
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", chart(drawn, 18, ", ".join(spoken)), class_="wide"),
        cells,
    )


def _spread_row(name: str, rank_parts: _RankParts, has_wait: bool) -> Markup:
    percentile = {"min": 0, "median": 50, "max": 100}[name]

    def over(column: Any) -> float:
        return float(np.nanpercentile(column, percentile)) if np.isfinite(column).any() else math.nan

    values = _numbers(rank_parts, has_wait, over)
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", "over ranks" if name == "min" else ""),
        [cell(value, label=label) for value, label in zip(values, _labels(has_wait), strict=True)],
        class_="spread sum" if name == "min" else "spread",
    )


def _labels(has_wait: bool) -> list[str]:
    return ["step", "compute only", "hidden", "exposed", *(["waiting"] if has_wait else []), "idle"]


def _numbers(rank_parts: _RankParts, has_wait: bool, reduce: Callable[[Any], float]) -> list[float]:
    names = ["step", "compute", "hidden", "exposed", *(["wait"] if has_wait else []), "idle"]
    return [reduce(rank_parts.numbers[name]) if name in rank_parts.numbers else math.nan for name in names]
