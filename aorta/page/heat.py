"""The page's section "Ranks and steps": a map of ranks by steps (heat.js draws it), and a table of ranks."""

import base64
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aorta.account.judge.cells import exposed_of
from aorta.account.judge.judged import last_holds_the_end, stretches
from aorta.account.judge.ranks import JudgedRank, judged_ranks
from aorta.account.model import Dataset, Report, Run
from aorta.account.rows import ratio
from aorta.page.parts import (
    Column,
    Markup,
    byte_text,
    canvas,
    cell,
    controls,
    empty,
    number,
    percent,
    section,
    table,
    tag,
    title,
    unit,
)
from aorta.timeline.arrays import Floats, Ints

MAX_CELLS = 200_000
"""Cells of one heat map; beyond it neighbouring steps share a column, which shows their mean."""
MAX_COLUMNS, MIN_COLUMNS = 400, 40
MAX_ROWS = 24
"""Ranks in the table, the worst first."""
LEVELS = 254
ROBUST = 99.5
"""Percentile of the judged steps that has the strongest colour; more than that has it too."""


# ---- the map -------------------------------------------------------------------------------------


def ranks_by_steps(report: Report) -> Markup | None:
    """Section of ranks by steps; None where every run has one rank and no telemetry."""
    tables = [_table(dataset) for dataset in report.datasets.values()]
    has_several = any(len(dataset.first.ranks) > 1 for dataset in report.datasets.values())
    if not any(tables) and not has_several:
        return None
    drawn = [
        controls(("Run", "heat-run"), ("Colour", "heat-metric")),
        tag(
            "div",
            canvas("heat-canvas", "map needs", "Ranks by steps", "heat-said", "img"),
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
    return [_of_run(dataset) for dataset in report.datasets.values() if len(dataset.first.ranks) > 1]


def _of_run(dataset: Dataset) -> dict[str, Any]:
    run = dataset.first
    edges = _edges(run.num_steps, len(run.ranks))
    return {
        "label": dataset.label,
        "ranks": run.ranks,
        "first": run.global_step[edges[:-1]].tolist(),
        "last": run.global_step[edges[1:] - 1].tolist(),
        "num_warmup": int(np.searchsorted(edges[1:], run.num_warmup, side="right")),
        "metrics": [_packed(metric, edges, run) for metric in heat_metrics(dataset)],
    }


def _edges(num_steps: int, num_ranks: int) -> Ints:
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
    run = dataset.first
    metrics = []
    # What the others are exposed in waiting, as in the table: waits of overlapping collectives would add up.
    if run.arrivals is not None and np.nan_to_num(caused := _caused(dataset)).any():
        if last_holds_the_end(dataset.first):
            caused[:, -1] = np.nan
        metrics.append(HeatMetric("caused_ms", "others wait for this rank", "ms", False, caused))
    for name, is_low_worse in (
        ("compute_ms", False),
        ("step_ms", False),
        ("exposed_ms", False),
        ("sm_clock_mhz", True),
        ("temperature_c", False),
    ):
        values = run.metrics.get(name)
        if values is not None and np.isfinite(values).any():
            metrics.append(HeatMetric(name, title(name), unit(name), is_low_worse, values))
    return metrics


def _caused(dataset: Dataset) -> Floats:
    """[rank, step]: what each of the others is exposed in waiting for the rank; NaN where nobody knows."""
    name = "exposed_ms"
    parts = []
    for judged in stretches(dataset.first):
        exposed = exposed_of(judged)
        if exposed is None:
            parts.append(np.full((len(judged.ranks), judged.num_steps), np.nan))
        else:
            parts.append(np.where(np.isfinite(judged.metrics[name]), exposed.caused_ms, np.nan))
    return np.concatenate(parts, axis=1)


def _packed(metric: HeatMetric, edges: Ints, judged: Run) -> dict[str, Any]:
    means = _means(metric.values, edges)
    judged_values = metric.values[:, judged.judged_steps]
    is_known = np.isfinite(judged_values)
    finite = judged_values[is_known] if is_known.any() else means[np.isfinite(means)]
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


def _means(values: Floats, edges: Ints) -> Floats:
    """[rank, column]; of what is known."""
    if len(edges) == values.shape[1] + 1:
        return values
    is_measured = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_measured, values, 0.0), edges[:-1], axis=1)
    counts = np.add.reduceat(is_measured.astype(np.float64), edges[:-1], axis=1)
    return ratio(sums, counts)


def _mean(values: Floats) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank without any value gives NaN, wanted here
        return float(np.nanmean(values))


# ---- the table -----------------------------------------------------------------------------------


def _table(dataset: Dataset) -> Markup | None:
    rows = judged_ranks(dataset.first)
    columns = [column for column in _COLUMNS if any(column.is_known(row) for row in rows)]
    if not columns or (len(rows) < 2 and not any(row.sm_clock_mhz or row.peak_memory_bytes for row in rows)):
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
class _RankColumn:
    title: str
    unit: str
    is_known: Callable[[JudgedRank], bool]
    cell: Callable[[JudgedRank], Markup]
    is_number: bool = True


def _number_column(heading: str, of_unit: str, name: str) -> _RankColumn:
    def is_known(row: JudgedRank) -> bool:
        return bool(getattr(row, name))

    def text(row: JudgedRank) -> Markup:
        value = getattr(row, name)
        return cell(value, text=byte_text(value) if of_unit == "bytes" else number(value))

    return _RankColumn(heading, "" if of_unit == "bytes" else of_unit, is_known, text)


def _last_text(row: JudgedRank) -> Markup:
    text = f"{row.num_last:,} of {row.num_judged:,}"
    return cell(row.share_last if row.num_judged else None, text=text if row.num_judged else "n/a")


def _throttling_text(row: JudgedRank) -> Markup:
    return tag(
        "td", ", ".join(f"{name} {percent(share)}" for name, share in row.throttling.items()) or "none"
    )


_COLUMNS = (
    _number_column("others wait for it", "ms/step", "caused_ms"),
    _RankColumn("came last", "", lambda row: row.num_last > 0, _last_text),
    _number_column("SM clock", "MHz", "sm_clock_mhz"),
    _number_column("lowest", "MHz", "lowest_clock_mhz"),
    _number_column("power", "W", "power_w"),
    _number_column("hottest", "°C", "temperature_c"),
    _RankColumn("held down by", "", lambda row: bool(row.throttling), _throttling_text, is_number=False),
    _number_column("peak memory", "bytes", "peak_memory_bytes"),
    _number_column("reserved", "bytes", "reserved_memory_bytes"),
    _number_column("device memory", "bytes", "device_memory_bytes"),
)
