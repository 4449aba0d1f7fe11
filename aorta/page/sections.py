"""Tables and texts of the page: collectives, what ran, notes, definitions."""

from typing import Any

from aorta.account.judge.sites import sites_of
from aorta.account.judge.timed_steps import host_bound_text, remarks
from aorta.account.load.rank.kernels import KernelTimeRow
from aorta.account.model import CollectiveRow, Dataset, Report, Run
from aorta.hazards.findings import read_checked
from aorta.hazards.text import checked_text
from aorta.page.parts import (
    Column,
    Markup,
    bullets,
    byte_text,
    cell,
    counted,
    empty,
    filterable,
    folded,
    percent,
    row,
    section,
    setting_cell,
    table,
    tag,
)
from aorta.page.table import device_names, precision
from aorta.page.timeline import Steps, exposed_collectives

NUM_LONGEST = 12
SETTING_COLUMNS = (("group", "", False), ("setting", "", False), ("value", "", False))


# ---- collectives ---------------------------------------------------------------------------------


def collectives(report: Report) -> Markup:
    rows = [
        _collective_row(dataset.label, row)
        for dataset in report.datasets.values()
        for row in dataset.first.collective_rows
    ]
    columns: list[Column] = [
        ("run", "", False), ("collective", "", False), ("bytes", "", True), ("type", "", False),
        ("ranks", "", True), ("stream", "", False), ("per step", "", True), ("duration", "ms", True),
        ("min rank", "ms", True), ("max rank", "ms", True), ("wait", "ms", True), ("transfer", "ms", True),
        ("busbw", "GB/s", True),
    ]  # fmt: skip
    lead = (
        "Medians over the judged steps of each rank, then over ranks. Durations include waiting for late"
        " ranks; busbw uses the transfer time where it is known."
    )
    if not rows:
        return section("collectives", "Collectives", empty("No collective was recorded."))
    return section(
        "collectives",
        "Collectives",
        filterable("collective", "Collectives", columns, rows),
        [_sites(dataset, len(report.datasets) > 1) for dataset in report.datasets.values()],
        lead=lead,
    )


def _sites(dataset: Dataset, named: bool) -> Markup | None:
    """Who issues them, where the recorder looked."""
    found = sites_of(dataset.first)
    if not found:
        return None
    title = f"{dataset.label}: by the line that issues them" if named else "By the line that issues them"
    columns: list[Column] = [
        ("line", "", False), ("collective", "", False), ("moves", "", False), ("per step", "", True),
        ("bytes per step", "", True), ("ranks", "", False),
    ]  # fmt: skip
    rows = [
        row(
            site.place, site.op, site.moves, cell(site.per_step),
            cell(site.bytes_per_step, text=byte_text(site.bytes_per_step)), ", ".join(map(str, site.ranks)),
        )
        for site in found
    ]  # fmt: skip
    return tag("div", tag("h3", title), table(title, columns, rows, sortable=True))


def _collective_row(label: str, row: CollectiveRow) -> Markup:
    return tag(
        "tr",
        tag("td", label), tag("th", row.op, scope="row"), cell(row.bytes, text=byte_text(row.bytes)),
        tag("td", row.dtype),
        cell(row.num_ranks, text="n/a" if row.num_ranks is None else str(row.num_ranks)),
        tag("td", row.stream),
        cell(row.count_per_step), cell(row.duration_ms), cell(row.duration_min_ms), cell(row.duration_max_ms),
        cell(row.wait_ms), cell(row.transfer_ms), cell(row.busbw_gb_s),
    )  # fmt: skip


def kernels(tables: dict[str, tuple[list[KernelTimeRow], float]]) -> Markup | None:
    """Kernels by class or name, per label with the step that they are a part of; None where none is."""
    blocks = []
    for label, (rows, step_ms) in tables.items():
        columns: list[Column] = [
            ("kernels", "", False), ("time", "ms", True), ("of step", "", True), ("launches", "", True),
            ("mean", "\u00b5s", True),
        ]  # fmt: skip
        has_operators = any(row.is_operator for row in rows)
        if has_operators:
            columns[0], columns[3] = ("operators", "", False), ("calls", "", True)
            columns += [("achieved", "", True), ("of attainable", "", True)]
        lines = [
            tag(
                "tr",
                tag("th", row.title, scope="row", title=row.name), cell(row.time_ms),
                cell(row.time_ms / step_ms if step_ms else None,
                     text=percent(row.time_ms / step_ms if step_ms else None)),
                cell(row.count), cell(1e3 * row.time_ms / row.count if row.count else None),
                [tag("td", row.achieved), cell(row.of_attainable, text=percent(row.of_attainable))]
                if has_operators else [],
            )
            for row in rows
        ]  # fmt: skip
        if lines:
            blocks += [tag("h3", label), table(f"Kernels of {label}", columns, lines, sortable=True)]
    if not blocks:
        return None
    lead = (
        "Sums over the kernels of a step. Kernels may overlap, so the sums need not add up to the step."
        " Attainable is the least time by an operator's shapes and the sustained rates of the part."
    )
    return section("kernels", "Kernels", blocks, lead=lead)


def longest_exposed(steps: Steps) -> Markup | None:
    """The timeline's median step in words: the text alternative, and often the answer."""
    step = steps.chosen.get("median")
    if step is None or step not in steps.records:
        return None
    exposed = exposed_collectives(steps, step, NUM_LONGEST)
    if not exposed:
        return None
    columns: list[Column] = [
        ("rank", "", True), ("collective", "", False), ("phase", "", False), ("group", "", False),
        ("bytes", "", True), ("start", "ms", True), ("duration", "ms", True), ("exposed", "ms", True),
        ("wait", "ms", True), ("busbw", "GB/s", True),
    ]  # fmt: skip
    rows = [
        tag(
            "tr",
            cell(rank, text=str(rank)),
            tag("th", f"{steps.records[step][rank].name_of(row)} #{row.seq}", scope="row"),
            tag("td", row.phase or ""), tag("td", row.group),
            cell(row.bytes or None, text=byte_text(row.bytes or None)), cell(row.start_ms),
            cell((row.end_ms or 0.0) - (row.start_ms or 0.0)), cell(exposed_ms), cell(wait_ms),
            cell(row.busbw_gb_s if row.bytes else None),
        )
        for rank, row, exposed_ms, wait_ms in exposed
    ]  # fmt: skip
    longest = table(f"Longest exposed collectives of {steps.label}", columns, rows)
    return folded(f"{steps.label}, step {step}: the collectives that were exposed longest", longest)


# ---- what ran ------------------------------------------------------------------------------------


def what_ran(report: Report) -> Markup:
    datasets = list(report.datasets.values())
    facts = [_facts(dataset) for dataset in datasets]
    columns: list[Column] = [("", "", False), *((dataset.label, "", False) for dataset in datasets)]
    rows = [row(name, *(fact[name] for fact in facts)) for name in facts[0]]
    of_runs = table("What ran", columns, rows, class_="narrow facts")
    return section("ran", "What ran", of_runs, [_settings_of(dataset) for dataset in datasets])


def _facts(dataset: Dataset) -> dict[str, str]:
    judged = dataset.first
    return {
        "path": ", ".join(str(run.path) for run in dataset.runs),
        "ranks": ranks_on_devices(judged),
        "precision": precision(judged) or "not known",
        "source": dataset.source,
        "steps": f"{judged.num_steps} read, {judged.num_judged} judged",
        "warm-up": f"{counted(judged.num_warmup, 'step') if judged.num_warmup else 'none'} left out:"
        f" {judged.warmup_rule}",
    }


def ranks_on_devices(judged: Run) -> str:
    """'2 ranks on NVIDIA H200', or '2 ranks' if the device is not known."""
    names, ranks = device_names(judged), counted(len(judged.ranks), "rank")
    return f"{ranks} on {names}" if names else ranks


RECORDED = ("placement", "layout", "model", "versions", "environment", "config", "coverage")
"""Of run.json, with what they hold."""


def _settings_of(dataset: Dataset) -> Markup:
    run = dataset.first.record
    if run is None:
        return empty(
            f"{dataset.label}: configuration, versions and environment are not known: run.json is missing."
        )
    groups: dict[str, Any] = {
        "command": " ".join(run.command),
        **{name: getattr(run, name) for name in RECORDED},
    }
    rows = [
        tag("tr", tag("td", group), tag("th", name, scope="row"), setting_cell(value))
        for group, content in groups.items()
        for name, value in _leaves(content)
    ]
    settings = table(f"Settings of {dataset.label}", SETTING_COLUMNS, rows, class_="narrow")
    return folded(f"all recorded settings of {dataset.label}", settings)


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
    num_notes = 0
    for dataset in datasets:
        texts = [text] if (text := host_bound_text(dataset.runs)) else []
        texts += remarks(dataset)
        texts += dict.fromkeys(note for judged in dataset.runs for note in judged.notes)
        texts += [
            f"{source}: {other_run.num_steps} steps kept apart, see other_sources in summary.json"
            for source, other_run in dataset.first.other_sources.items()
        ]
        num_notes += len(texts)
        children += [tag("h3", dataset.label), bullets(texts)] if texts else []
    reasons = [dataset.first.not_measured for dataset in datasets]
    names = dict.fromkeys(name for run_reasons in reasons for name in run_reasons)
    if names:
        columns = [("not measured", "", False), *((dataset.label, "", False) for dataset in datasets)]
        rows = [row(name, *(run_reasons.get(name, "measured") for run_reasons in reasons)) for name in names]
        children.append(table("Not measured, and why", columns, rows, class_="narrow"))
    heading = f"{counted(num_notes, 'note')}; not measured: {len(names)}"
    return section("notes", "Notes and missing measurements", folded(heading, children))


def hazards(report: Report) -> Markup | None:
    """Findings of each run that was checked, as the terminal shows them; None where none was."""
    children: list[Any] = []
    for dataset in report.datasets.values():
        for judged in dataset.runs:
            checked = read_checked(judged.path) if judged.path.is_dir() else []
            if any(rank.steps for rank in checked):
                text = checked_text(checked, show_all=True)
                children += [tag("h3", judged.label), tag("pre", text, style="overflow-x: auto")]
    return section("hazards", "Hazards and wrong numbers", *children) if children else None


def definitions() -> Markup:
    sums = tag(
        "p",
        tag("code", "comm = hidden + exposed"),
        " and ",
        tag("code", "step = compute + exposed + idle"),
        " hold in every step, in totals and in means; medians need not add up. docs/definitions.md has every"
        " word and number of this page.",
    )
    return section("definitions", "Definitions", sums)
