"""Charts over steps and ranks: distributions of every metric, and a heat map of ranks by steps."""

import base64
import gzip
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.leading import LED, is_raw_part, metric_of, with_word
from aorta.account.judge.ranks import RankRow, rank_rows
from aorta.account.metrics import MEASURES, metric_key, without_source
from aorta.account.model import Dataset, JudgedRun, Report
from aorta.page.parts import (
    Column,
    Markup,
    byte_text,
    cell,
    empty,
    number,
    percent,
    section,
    table,
    tag,
    title,
    unit,
)

Floats = NDArray[np.float64]
MAX_STEPS = 500
"""Steps shown of a run; a longer run shows every second, third, ... step."""
FIRST = ("step_ms", "exposed_ms", "comm_ms", "compute_ms", "hidden_ms", "idle_ms", "overlap_ratio")
MAX_CELLS = 200_000
"""Cells of one heat map; beyond it neighbouring steps share a column, which shows their mean."""
MAX_COLUMNS, MIN_COLUMNS = 400, 40
MAX_ROWS = 24
"""Ranks in the table, the worst first."""
LEVELS = 254
ROBUST = 99.5
"""Percentile of the judged steps that has the strongest colour; more than that has it too."""


# ---- distributions of metrics over steps ---------------------------------------------------------


def distribution_data(report: Report) -> dict[str, Any]:
    """Per run and metric the median, least and greatest rank of every step; null where not measured."""
    runs = [
        (dataset.label if len(dataset.runs) == 1 else f"{dataset.label} ({i + 1})", dataset.label, judged)
        for dataset in report.datasets.values()
        for i, judged in enumerate(dataset.runs)
    ]
    names = dict.fromkeys(FIRST)
    for _, _, judged in runs:
        names.update(dict.fromkeys(sorted(judged.run.metrics)))
    measured = [name for name in names if any(_measured(judged, name) for _, _, judged in runs)]
    has_both = any(dataset.lead == "calibrated" for dataset in report.datasets.values())
    if has_both:  # what leads comes first
        measured.sort(
            key=lambda name: _place(without_source(name)) - 0.5 * (metric_key(name).source == "calibrated")
        )
    return {
        "metrics": [
            {
                "name": name,
                "title": with_word(title(name), _word(name, has_both)),
                "unit": unit(name),
                "group": _group(name),
            }
            for name in measured
        ],
        "reference": report.comparison.reference if report.comparison else None,
        "candidate": report.comparison.candidate if report.comparison else None,
        "runs": [
            {
                "label": run_title,
                "side": label,
                "every": _stride(judged),
                "num_ranks": len(judged.run.ranks),
                "num_warmup": -(-judged.num_warmup // _stride(judged)),
                "steps": judged.run.global_step[:: _stride(judged)].tolist(),
                "values": {
                    name: _over_ranks(judged.run.metrics[name][:, :: _stride(judged)])
                    for name in measured
                    if _measured(judged, name)
                },
            }
            for run_title, label, judged in runs
        ],
    }


def _group(name: str) -> str:
    """The heading under which a list of metrics has it."""
    kind, op, _ = metric_key(name)
    if without_source(name) in FIRST:
        return "The step and its parts"
    if kind in MEASURES or kind == "alloc_retries":
        return "Work, memory and telemetry"
    return op if op else "More of the step"


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _word(name: str, has_both: bool) -> str:
    return "raw" if has_both and (name in LED["calibrated"] or is_raw_part(name)) else ""


def _measured(judged: JudgedRun, name: str) -> bool:
    values = judged.run.metrics.get(name)
    return values is not None and bool(np.isfinite(values).any())


def _stride(judged: JudgedRun) -> int:
    """Rows apart of the steps that are shown: not in time with recording.timed_every, which could leave out
    all steps that were timed."""
    least = max(1, -(-judged.run.num_steps // MAX_STEPS))
    is_timed: NDArray[np.bool_] = np.logical_or.reduce(np.isfinite(judged.run.metrics["compute_ms"]), axis=0)
    fair = (
        interval
        for interval in range(least, 2 * least + 1)
        if 2 * is_timed[::interval].mean() >= is_timed.mean()
    )
    return next(fair, least)


def _over_ranks(values: NDArray[np.float64]) -> list[list[float | None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no rank measured gives NaN, wanted here
        rows = [np.nanmedian(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)]
    if len(values) == 1:
        rows = rows[:1]
    return [[float(f"{x:.5g}") if np.isfinite(x) else None for x in row.tolist()] for row in rows]


def still(data: dict[str, Any]) -> Markup | None:
    """The first metric as a picture that needs no script: what is printed before the chart was looked at."""
    if not data["metrics"]:
        return None
    metric = data["metrics"][0]
    runs = [run for run in data["runs"] if metric["name"] in run["values"]]
    judged = [x for run in runs for row in run["values"][metric["name"]] for x in row[run["num_warmup"] :]]
    present = [x for x in judged if x is not None]
    if not present:
        return None
    low, high = min(present), max(present)
    room = 0.08 * ((high - low) or abs(high) or 1.0)
    low, high = low - room, high + room
    first = min(run["steps"][0] for run in runs)
    last = max(max(run["steps"][-1] for run in runs), first + 1)

    def coordinates(step: int, value: float) -> str:
        x = 60 + 640 * (step - first) / (last - first)
        return f"{x:.1f},{280 - 250 * (min(max(value, low), high) - low) / (high - low):.1f}"

    drawn: list[Markup] = [
        tag("path", d="M60,30 V280 H700 M760,280 H990", class_="axis line"),
        tag("text", f"{number(high)} {metric['unit']}", x=2, y=26),
        tag("text", f"{number(low)} {metric['unit']}", x=2, y=296),
        tag("text", f"global step {first} to {last}", x=380, y=298, text_anchor="middle"),
    ]
    for place, run in enumerate(runs):
        side = 1 if len(runs) == 1 or run["side"] == data["candidate"] else 0
        middle, *spread = run["values"][metric["name"]]
        steps = run["steps"]
        if spread:
            pairs = [(s, a, b) for s, a, b in zip(steps, *spread, strict=True) if a is not None]
            outline = [coordinates(s, b) for s, _, b in pairs] + [
                coordinates(s, a) for s, a, _ in reversed(pairs)
            ]
            drawn.append(tag("polygon", points=" ".join(outline), class_=f"band run-{side}"))
        points = [coordinates(s, x) for s, x in zip(steps, middle, strict=True) if x is not None]
        drawn.append(tag("polyline", points=" ".join(points), class_=f"line run-{side}"))
        drawn += _still_box(
            middle[run["num_warmup"] :], place, len(runs), run["label"], coordinates, first, side
        )
    return tag("svg", drawn, viewBox="0 0 1000 300", class_="still", aria_hidden="true")


def _still_box(
    values: list[float | None],
    place: int,
    num_runs: int,
    label: str,
    coordinates: Callable[[int, float], str],
    first: int,
    side: int,
) -> list[Markup]:
    """Quartiles of the judged steps, and their median."""
    present = [x for x in values if x is not None]
    if not present:
        return []
    ends = np.percentile(present, (25, 50, 75)).tolist()
    lower, middle, upper = (float(coordinates(first, x).split(",")[1]) for x in ends)
    width = 200 / num_runs
    x = 770 + place * width
    return [
        tag("rect", x=f"{x:.1f}", y=f"{upper:.1f}", width=f"{0.6 * width:.1f}",
            height=f"{max(1.0, lower - upper):.1f}", class_=f"box run-{side}"),
        tag("path", d=f"M{x:.1f},{middle:.1f} h{0.6 * width:.1f}", class_=f"line run-{side}"),
        tag("text", label[:14], x=f"{x:.1f}", y=296),
    ]  # fmt: skip


@cache
def plotly_source() -> str:
    """The plotting library as the installed package brings it."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """gzip, base64: 1.9 MB in the page instead of 4.8, and nothing to parse until a chart is looked at."""
    return base64.b64encode(gzip.compress(plotly_source().encode(), 9, mtime=0)).decode()


# ---- ranks by steps: the heat map ----------------------------------------------------------------


def ranks_by_steps(report: Report) -> Markup | None:
    """Section of ranks by steps; None where every run has one rank and no telemetry."""
    tables = [_table(dataset) for dataset in report.datasets.values()]
    if not any(tables):
        return None
    has_several = any(len(dataset.first.run.ranks) > 1 for dataset in report.datasets.values())
    drawn = [
        tag(
            "div",
            tag("label", "Run ", tag("select", id="heat-run")),
            tag("label", "Colour ", tag("select", id="heat-metric")),
            class_="controls needs-script",
        ),
        tag(
            "div",
            tag(
                "canvas",
                "The map needs a browser that draws on a canvas.",
                id="heat-canvas",
                tabindex="0",
                role="img",
                aria_label="Ranks by steps",
                aria_describedby="heat-said",
            ),
            class_="canvas heat needs-script",
        ),
        tag("p", id="heat-said", class_="said needs-script", aria_live="polite"),
    ]  # fmt: skip
    return section(
        "ranks",
        "Ranks and steps",
        drawn if has_several else empty("Only one rank: nothing to compare."),
        tables,
        lead="One row per rank, the worst first; one column per step, or per group of steps in a"
        " long run. Warm-up is shaded. The table below has the judged steps.",
    )


def heat_data(report: Report) -> list[dict[str, Any]]:
    """Data that heat.js draws, per run of several ranks: a byte for each rank and column, 0: not known."""
    return [_of_run(dataset) for dataset in report.datasets.values() if len(dataset.first.run.ranks) > 1]


def _of_run(dataset: Dataset) -> dict[str, Any]:
    judged = dataset.first
    run = judged.run
    edges = _edges(run.num_steps, len(run.ranks))
    return {
        "label": dataset.label,
        "ranks": run.ranks,
        "first": run.global_step[edges[:-1]].tolist(),
        "last": run.global_step[edges[1:] - 1].tolist(),
        "num_warmup": int(np.searchsorted(edges[1:], judged.num_warmup, side="right")),
        "metrics": [_packed(metric, edges, judged) for metric in heat_metrics(dataset)],
    }


def _edges(num_steps: int, num_ranks: int) -> NDArray[np.int64]:
    columns = min(num_steps, max(MIN_COLUMNS, min(MAX_COLUMNS, MAX_CELLS // num_ranks)))
    return np.unique(np.linspace(0, num_steps, columns + 1).round().astype(np.int64))


@dataclass(frozen=True, slots=True)
class HeatMetric:
    name: str
    title: str
    unit: str
    is_low_worse: bool
    values: Floats
    """[rank, step]"""


def heat_metrics(dataset: Dataset) -> list[HeatMetric]:
    """Metrics that tell ranks apart, the most telling first: those that differ between ranks or steps."""
    run = dataset.first.run
    metrics = []
    if run.arrivals is not None:
        caused = np.where(run.arrivals.num_judged > 0, run.arrivals.caused_ms, np.nan)
        metrics.append(HeatMetric("caused_ms", "others wait for this rank", "ms", False, caused))
    for name, is_low_worse in (
        ("compute_ms", False),
        ("step_ms", False),
        ("exposed_ms", False),
        ("sm_clock_mhz", True),
        ("temperature_c", False),
    ):
        values = run.metrics.get(metric_of(dataset.lead, name))
        if values is not None and np.isfinite(values).any():
            metrics.append(HeatMetric(name, title(name), unit(name), is_low_worse, values))
    return metrics


def _packed(metric: HeatMetric, edges: NDArray[np.int64], judged: JudgedRun) -> dict[str, Any]:
    means = _means(metric.values, edges)
    judged_values = metric.values[:, judged.num_warmup :]
    finite = (
        judged_values[np.isfinite(judged_values)]
        if np.isfinite(judged_values).any()
        else means[np.isfinite(means)]
    )
    low, high = (float(x) for x in np.percentile(finite, (100 - ROBUST, ROBUST)))
    if metric.name == "caused_ms":
        low = 0.0
    span = max(high - low, 1e-9)
    levels = 1 + np.clip((means - low) / span, 0.0, 1.0) * LEVELS
    packed = np.where(np.isfinite(levels), np.nan_to_num(levels).round(), 0).astype(np.uint8)
    rows = [_mean(row) for row in judged_values]
    sign = 1 if metric.is_low_worse else -1
    return {
        "name": metric.name,
        "title": metric.title,
        "unit": metric.unit,
        "low_is_worse": metric.is_low_worse,
        "low": low,
        "high": low + span,
        "order": np.argsort([np.inf if np.isnan(x) else sign * x for x in rows], kind="stable").tolist(),
        "means": [None if np.isnan(x) else float(f"{x:.5g}") for x in rows],
        "cells": base64.b64encode(packed.tobytes()).decode(),
    }


def _means(values: Floats, edges: NDArray[np.int64]) -> Floats:
    """[rank, column]; of what is known."""
    if len(edges) == values.shape[1] + 1:
        return values
    is_measured = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_measured, values, 0.0), edges[:-1], axis=1)
    counts = np.add.reduceat(is_measured.astype(np.float64), edges[:-1], axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means


def _mean(values: Floats) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank without any value gives NaN, wanted here
        return float(np.nanmean(values))


# ---- ranks by steps: the table -------------------------------------------------------------------


def _table(dataset: Dataset) -> Markup | None:
    rows = rank_rows(dataset.first, dataset.lead)
    columns = [column for column in _COLUMNS if any(column.is_known(row) for row in rows)]
    if len(rows) < 2 and not any(row.sm_clock_mhz or row.peak_memory_bytes for row in rows):
        return None
    heads: list[Column] = [("rank", "", True), *((c.title, c.unit, c.is_number) for c in columns)]
    lines = [
        tag("tr", cell(row.rank, text=str(row.rank)), [column.cell(row) for column in columns])
        for row in rows[:MAX_ROWS]
    ]
    caption = f"Ranks of {dataset.label}, over the judged steps"
    left = len(rows) - len(lines)
    note = (
        f"{left} more ranks, none of which costs the others more, are in the map above and in steps.parquet."
    )
    return Markup(
        tag("h3", dataset.label)
        + table(caption, heads, lines, sortable=True)
        + (tag("p", note, class_="note") if left else "")
    )


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    unit: str
    is_known: Callable[[RankRow], bool]
    cell: Callable[[RankRow], Markup]
    is_number: bool = True


def _numbers(heading: str, of_unit: str, name: str) -> _Column:
    def is_known(row: RankRow) -> bool:
        return getattr(row, name) is not None

    def text(row: RankRow) -> Markup:
        value = getattr(row, name)
        return cell(value, text=byte_text(value) if of_unit == "bytes" else number(value))

    return _Column(heading, "" if of_unit == "bytes" else of_unit, is_known, text)


def _last_text(row: RankRow) -> Markup:
    text = f"{row.num_last:,} of {row.num_judged:,}"
    return cell(row.share_last if row.num_judged else None, text=text if row.num_judged else "n/a")


def _throttling_text(row: RankRow) -> Markup:
    return tag(
        "td", ", ".join(f"{name} {percent(share)}" for name, share in row.throttling.items()) or "none"
    )


_COLUMNS = (
    _numbers("others wait for it", "ms/step", "caused_ms"),
    _Column("came last", "", lambda row: row.num_judged > 0, _last_text),
    _numbers("step", "ms", "step_ms"),
    _numbers("compute", "ms", "compute_ms"),
    _numbers("exposed", "ms", "exposed_ms"),
    _numbers("SM clock", "MHz", "sm_clock_mhz"),
    _numbers("lowest", "MHz", "lowest_clock_mhz"),
    _numbers("power", "W", "power_w"),
    _numbers("hottest", "°C", "temperature_c"),
    _Column("held down by", "", lambda row: bool(row.throttling), _throttling_text, is_number=False),
    _numbers("peak memory", "bytes", "peak_memory_bytes"),
    _numbers("reserved", "bytes", "reserved_memory_bytes"),
    _numbers("device memory", "bytes", "device_memory_bytes"),
)
