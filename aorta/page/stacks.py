"""The page's section "In the program": sampled stacks as flame graphs, of ranks against the others and of
slow steps against usual ones (stacks.js draws them), and the lines that differ as tables."""

from typing import Any

import numpy as np

from aorta.account.judge.phases import phases_of
from aorta.account.judge.profiles import (
    DOING_WORDS,
    Line,
    Part,
    most,
    rank_parts,
    slow_and_usual,
    told_differences,
    tree,
)
from aorta.account.model import Dataset, Report
from aorta.page.parts import (
    Column,
    Markup,
    cell,
    controls,
    counted,
    numeric,
    percent,
    row,
    section,
    sentence,
    table,
    tag,
)
from aorta.page.table import rank_range

MAX_NODES = 1200
"""Of a run's tree in the page; nodes with least time count as their callers."""
MAX_LINES = 8
PHASES_LEAD = (
    "Phases of the thread that trains in the judged steps, by the host's clock and with all that it waits"
    " for; they add up to the step."
)
HELP = (
    "A click on a box shows what is below it, one on the topmost box goes back. Below a line is what it"
    " calls; frames of torch and other libraries are folded to the function that the program calls and the"
    " innermost one."
)


def stacks(report: Report) -> Markup | None:
    """None where no run has samples in its judged steps."""
    phases = [_phase_table(dataset, report) for dataset in report.datasets.values()]
    tables = [_tables(dataset, report) for dataset in report.datasets.values()]
    if not any(tables) and not any(phases):
        return None
    if not any(tables):
        return section("stacks", "In the program", phases, lead=PHASES_LEAD)
    chart = tag(
        "div",
        id="stacks-chart",
        class_="needs-script",
        role="img",
        aria_label="Flame graph of sampled stacks",
    )
    return section(
        "stacks",
        "In the program",
        phases,
        tag("h3", "Sampled stacks", class_="needs-script"),
        controls(("Run", "stacks-run"), ("Show", "stacks-view")),
        chart,
        tag("p", id="stacks-said", class_="note", aria_live="polite"),
        tag("p", HELP, class_="note needs-script"),
        tables,
        lead=f"{PHASES_LEAD} Below, where it is by stacks sampled a few times a second: each box is as wide"
        " as its part of a mean step.",
    )


def stack_data(report: Report) -> list[dict[str, Any]]:
    """Data that stacks.js draws, per run with samples: a tree, and the us of a step in each of its nodes, on
    each rank and in slow and usual steps."""
    found = (_of_run(dataset, report) for dataset in report.datasets.values())
    return [data for data in found if data is not None]


def _of_run(dataset: Dataset, report: Report) -> dict[str, Any] | None:
    judged = dataset.first
    late, parts = _late_and_parts(dataset, report)
    if not parts:
        return None
    slow, usual, often = slow_and_usual(judged, [*parts]) or ([], [], "")
    whole = tree([*parts.values(), *slow, *usual], MAX_NODES)
    us = np.round(1e3 * whole.ms)
    num = len(parts)
    sides = [] if not slow else [us[num : num + len(slow)].mean(axis=0), us[num + len(slow) :].mean(axis=0)]
    frames = [*dict.fromkeys(frame for frame in whole.frames if frame is not None)]
    place = {frame: i for i, frame in enumerate(frames)}
    files = [*dict.fromkeys(frame.file for frame in frames)]
    return {
        "label": dataset.label,
        "ranks": [*parts],
        "late": late if late in parts else None,
        "often": often,
        "num_samples": [len(part.rows) for part in parts.values()],
        "files": files,
        "frames": [[frame.text, files.index(frame.file), int(frame.is_program)] for frame in frames],
        "nodes": [-1 if frame is None else place[frame] for frame in whole.frames],
        "parents": whole.parents,
        "asleep": [
            int(2 * ms > total) for ms, total in zip(whole.asleep_ms, whole.ms.sum(axis=0), strict=True)
        ],
        "us": [row.astype(np.int64).tolist() for row in us[:num]],
        "sides": [np.round(row).astype(np.int64).tolist() for row in sides],
    }


def _phase_table(dataset: Dataset, report: Report) -> Markup | None:
    rows = phases_of(dataset.first)
    if not rows:
        return None
    several, has_bytes = len(dataset.first.ranks) > 1, any(row.bytes is not None for row in rows)
    columns: list[Column] = [
        ("Phase", "", False), ("In a step", "ms", True), ("Of it", "", True),
        *([("Ranks", "ms", True)] if several else []), *([("Memory", "MiB", True)] if has_bytes else []),
        ("Most of it in", "", False),
    ]  # fmt: skip
    drawn = [
        row(
            phase.title,
            cell(phase.ms),
            cell(phase.share, text=percent(phase.share)),
            numeric(rank_range(phase)) if several else None,
            cell(None if phase.bytes is None else phase.bytes / 2**20) if has_bytes else None,
            phase.at,
        )
        for phase in rows
    ]
    name = f"{dataset.label}: " if len(report.datasets) > 1 else ""
    title = f"{name}phases of a step, mean of {counted(rows[0].num_steps, 'judged step')}"
    return _headed(title, table(title, columns, drawn))


def _late_and_parts(dataset: Dataset, report: Report) -> tuple[int | None, dict[int, Part]]:
    """The rank that the others wait for, and samples by rank, its own among them."""
    if dataset.first.stacks is None:
        return None, {}
    causes = report.causes.get(dataset.label)
    late = None if causes is None else causes.late_rank
    return late, rank_parts(dataset.first, [] if late is None else [late])


def _tables(dataset: Dataset, report: Report) -> list[Markup]:
    late, parts = _late_and_parts(dataset, report)
    if not parts:
        return []
    name = f"{dataset.label}: " if len(report.datasets) > 1 else ""
    drawn = [
        _line_table(f"{name}{one.title}, ms of a step", one.lines[:MAX_LINES], is_difference=True)
        for one in told_differences(dataset.first, late)
    ]
    title = f"{name}lines of the program with most time, mean over ranks"
    return [*drawn, _line_table(title, most([*parts.values()], MAX_LINES), is_difference=False)]


def _line_table(title: str, lines: list[Line], is_difference: bool) -> Markup:
    """What has no sample is not known."""
    times = ("More", "Here", "There") if is_difference else ("In a step",)
    columns: list[Column] = [
        ("Line", "", False), *((time, "ms", True) for time in times),
        ("Samples", "", True), ("The thread", "", False),
    ]  # fmt: skip
    rows = [
        row(
            line.text,
            cell(line.difference_ms, sign=True) if is_difference else None,
            cell(line.ms or None),
            cell(line.against_ms or None) if is_difference else None,
            cell(line.num_samples, text=f"{line.num_samples:,}"),
            DOING_WORDS[line.doing] + (f" in {line.calls}" if line.calls else ""),
        )
        for line in lines
    ]
    return _headed(title, table(title, columns, rows))


def _headed(title: str, drawn: Markup) -> Markup:
    return tag("div", tag("h3", sentence(title).removesuffix(".")), drawn)
