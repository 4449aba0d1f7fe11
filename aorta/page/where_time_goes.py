"""The page's section "Where the time goes": the account as a bar per rank, as rows that add up, and step by
step. account.js draws the steps of a rank."""

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np

from aorta.account.judge.cells import CELLS, EXPOSED_CELLS, Account, account_of
from aorta.account.judge.ranks import NUM_LATE, judged_ranks
from aorta.account.judge.timed_steps import partly_timed
from aorta.account.model import Dataset, Report
from aorta.page.parts import (
    Column,
    Markup,
    bar,
    canvas,
    cell,
    cell_mark,
    chart,
    controls,
    counted,
    number,
    numeric,
    quantity,
    row,
    section,
    swatch,
    table,
    tag,
)
from aorta.page.table import account_rows

MAX_BARS = 64
"""Ranks with a bar of their own in one label."""
APART = 4
"""Runs whose steps differ by more than this factor get a scale each."""
MAX_COLUMNS = 300
"""Columns of the steps of a rank; beyond it neighbouring steps share one, which shows their mean."""
MAX_NUMBERS = 400_000
"""In the page for the steps of all ranks, two bytes each."""
LEVELS = 65_535
LEAST_NAMED = 0.08
"""Part of the longest bar, from which on a cell of the host has its name in it."""


# ---- bars and rows -------------------------------------------------------------------------------


def where_time_goes(report: Report) -> Markup:
    accounts = {label: account_of(d.first) for label, d in report.datasets.items()}
    lengths = [float(a.step_ms.mean(axis=1).max()) for a in accounts.values() if a.mean_step_ms > 0]
    longest = max(lengths, default=0.0)
    one_scale = longest <= APART * min(lengths, default=0.0)
    has_sums = report.comparison is None or report.comparison.decomposition is None
    children: list[Markup] = []
    for label, dataset in report.datasets.items():
        account = accounts[label]
        if len(accounts) > 1:
            children.append(tag("h3", label))
        if not account.is_measured:
            reason = account.reasons.get("compute", f"not given by source {dataset.source}")
            children.append(tag("p", f"Not measured: the parts of a step ({reason}).", class_="empty"))
        if account.mean_step_ms > 0:
            scale = longest if one_scale else float(account.step_ms.mean(axis=1).max())
            children += _bars(report, dataset, account, scale)
            if has_sums:
                children.append(_sums(dataset))
    timed = " that were timed" if any(map(partly_timed, report.datasets.values())) else ""
    scales = "" if one_scale or len(accounts) < 2 else " Each run has its own scale."
    return section(
        "time",
        "Where the time goes",
        children,
        _steps_of_a_rank() if any(a.step_ms.size for a in accounts.values()) else None,
        lead=f"Means over the judged steps{timed}; each millisecond of a rank is in one part, and the parts"
        f" add up to the step.{scales}",
    )


def _bars(report: Report, dataset: Dataset, account: Account, longest: float) -> Iterable[Markup]:
    rows_shown = shown_ranks(dataset, account, named_ranks(report, dataset.label))
    means = {name: account.by_rank_ms(name) for name in account.cells}
    rows = []
    for i in rows_shown:
        parts = {name: float(values[i]) for name, values in means.items() if values[i] > 0}
        rows.append(_bar_row(dataset.label, account.ranks[i], parts, longest))
    columns: list[Column] = [("rank", "", False), ("", "", False), ("step", "ms", True)]
    yield table(f"A mean step of each rank of {dataset.label}", columns, rows, class_="bars")
    if len(rows_shown) < len(account.ranks):
        text = (
            f"{len(rows_shown)} of {len(account.ranks):,} ranks are drawn: first the {NUM_LATE} that are"
            " waited for most and those that a cause names, then others spread evenly from the least to the"
            " most exposed."
        )
        yield tag("p", text, class_="note")


def _bar_row(label: str, rank: int, parts: dict[str, float], longest: float) -> Markup:
    drawn, spoken, start = [], [], 0.0
    for name, ms in parts.items():
        end = start + 100 * ms / longest
        spoken.append(f"{CELLS[name].title}: {quantity(ms, 'ms')}")
        drawn.append(bar(start, end, cell_mark(name), 0, 20, spoken[-1]))
        if cell_mark(name) in ("m-idle", "m-unknown") and ms > LEAST_NAMED * longest:
            drawn.append(
                tag("svg", tag("text", f"{CELLS[name].title} {number(ms)}", x=5, y=14),
                    x=f"{start:.3f}%", width=f"{end - start:.3f}%", height=20, class_="in-bar")
            )  # fmt: skip
        start = end
    button = tag("button", f"rank {rank}", type="button", title="Its steps, one by one")
    return row(
        button,
        tag("td", chart(drawn, 20, ", ".join(spoken)), class_="wide"),
        cell(sum(parts.values()), label="step, ms"),
        data_run=label,
        data_rank=rank,
    )


def _sums(dataset: Dataset) -> Markup:
    """The rows of the terminal's table, with the colours of the bars."""
    names = {cell.title: name for name, cell in CELLS.items()}
    *parts, step = account_rows(dataset)
    rows = [_sum_row(row, names.get(row[0])) for row in parts]
    ranks = "ranks, least to most" if len(dataset.first.ranks) > 1 else ""
    word = account_of(dataset.first).statistic
    columns: list[Column] = [
        ("", "", False), (word, "", True), ("of step", "", True), (ranks, "", False),
    ]  # fmt: skip
    return table(
        f"Parts of a step of {dataset.label}",
        columns,
        [*rows, _sum_row(step, None, class_="sum")],
        class_="narrow sums",
    )


def _sum_row(row: tuple[str, ...], name: str | None, class_: str | None = None) -> Markup:
    title, mean, share, ranks = row
    meaning = CELLS[name].meaning if name else None
    return tag(
        "tr",
        tag("th", swatch(cell_mark(name)) if name else None, title, scope="row", title=meaning),
        numeric(mean),
        numeric(share),
        tag("td", ranks.replace("   ", "\u2003")),
        class_=class_,
    )


def named_ranks(report: Report, label: str) -> list[int]:
    """Ranks that a cause names, that of the largest first."""
    causes = report.causes.get(label)
    return [cause.rank for cause in causes.listed if cause.rank is not None] if causes else []


def shown_ranks(dataset: Dataset, account: Account, named: Iterable[int]) -> list[int]:
    """Rows of the ranks that get a bar: all if they are few, else first the latest and those named, then
    others spread evenly from the least to the most exposed."""
    num = len(account.ranks)
    if num <= MAX_BARS:
        return list(range(num))
    late = [row.rank for row in judged_ranks(dataset.first)[:NUM_LATE]]
    first = [account.ranks.index(rank) for rank in dict.fromkeys([*late, *named])]
    order = [
        i for i in np.argsort(account.by_rank_ms(*EXPOSED_CELLS), kind="stable").tolist() if i not in first
    ]
    places = np.linspace(0, len(order) - 1, MAX_BARS - len(first)).round().astype(int).tolist()
    return [*first, *sorted(order[i] for i in places)]


# ---- the steps of a rank -------------------------------------------------------------------------


def _steps_of_a_rank() -> Markup:
    drawn = canvas("steps-canvas", "steps need", "Steps of a rank", "steps-said")
    return tag(
        "div",
        tag("h3", "Step by step"),
        controls(("Run", "steps-run"), ("Rank", "steps-rank"), class_="controls"),
        tag("div", drawn, class_="canvas"),
        tag("p", id="steps-said", class_="said", aria_live="polite"),
        id="steps",
        class_="needs-script",
    )


def account_data(report: Report) -> list[dict[str, Any]]:
    """Data that account.js draws, per run: cells of the shown ranks, column by column, as parts of the
    largest."""
    runs = []
    for label, dataset in report.datasets.items():
        account = account_of(dataset.first)
        if account.mean_step_ms > 0:
            named = named_ranks(report, label)
            rows = shown_ranks(dataset, account, named)
            first = named[0] if named else account.ranks[int(account.step_ms.mean(axis=1).argmax())]
            runs.append({"label": label, "first_rank": first} | _packed(account, rows, len(report.datasets)))
    return runs


def _packed(account: Account, rows: list[int], num_runs: int) -> dict[str, Any]:
    names = [row.name for row in account.rows()]
    num_steps = account.step_ms.shape[1]
    fit = MAX_NUMBERS // (num_runs * len(rows) * max(1, len(names)))
    num = min(num_steps, MAX_COLUMNS, max(1, fit))
    edges = np.unique(np.linspace(0, num_steps, num + 1).round().astype(np.int64))
    widths = np.diff(edges)
    means = np.array(
        [np.add.reduceat(account.cells[name][rows], edges[:-1], axis=1) / widths for name in names]
    )
    most = float(means.max()) if means.size else 0.0
    levels = np.round(means * (LEVELS / most if most > 0 else 0.0)).astype("<u2")
    return {
        "ranks": [account.ranks[i] for i in rows],
        "from": account.global_step[edges[:-1]].tolist(),
        "to": account.global_step[edges[1:] - 1].tolist(),
        "cells": [[CELLS[name].title, cell_mark(name).removeprefix("m-")] for name in names],
        "ms_per_level": most / LEVELS,
        "levels": base64.b64encode(levels.tobytes()).decode(),
        "note": ""
        if num == num_steps
        else f"{counted(num_steps, 'step')} in {num} columns: each shows the mean of its steps.",
    }
