"""The page's section of causes: at most five with their fixes, and what-ifs of traced steps."""

from aorta.account.cause import Cause
from aorta.account.judge.cells import account_of
from aorta.account.model import Report, WhatIfs
from aorta.page.parts import (
    Markup,
    at_percent,
    bar,
    chart,
    empty,
    number,
    numeric,
    percent,
    quantity,
    row,
    section,
    table,
    tag,
    typeset,
)
from aorta.timeline.statistics import LEVEL


def causes(report: Report) -> Markup | None:
    """Section of the causes, or None if the report was made without looking for them."""
    if not report.causes:
        return None
    children: list[Markup] = []
    for label, run_causes in report.causes.items():
        if len(report.causes) > 1:
            children.append(tag("h3", label))
        if run_causes.listed:
            dataset = report.datasets[label]
            step_ms = account_of(dataset.first).mean_step_ms
            rows = [
                _cause(label, place, cause, step_ms) for place, cause in enumerate(run_causes.listed, start=1)
            ]
            children.append(tag("ol", rows, class_="causes"))
        elif len(report.causes) > 1:
            children.append(tag("p", typeset(run_causes.empty_text)))
        if run_causes.listed or len(report.causes) > 1:  # else the page begins with it
            children += [tag("p", typeset(note), class_="note") for note in run_causes.notes]
        if run_causes.whatifs is not None:
            children += _whatifs(run_causes.whatifs)
    if not children:
        return None
    return section(
        "causes",
        "Causes and what to change",
        *children,
        lead=f"Milliseconds of a step by cause, with a {LEVEL} interval over steps; none counts twice.",
    )


def _cause(label: str, place: int, cause: Cause, step_ms: float) -> Markup:
    start, end = cause.at_ms or (None, None)
    link = tag(
        "a",
        cause.place,
        href="#timeline",
        data_step_choice=f"cause {place}",
        data_run=label,
        data_step=cause.global_step,
        data_rank=cause.rank,
        data_from=start,
        data_to=end,
    )
    return tag(
        "li",
        tag("h3", typeset(cause.headline)),
        _picture(cause, step_ms),
        [tag("p", typeset(text), class_="evidence") for text in cause.evidence],
        tag("p", tag("b", "Look at "), link) if cause.place else None,
        tag("p", tag("b", "Change "), cause.change),
        tag("p", tag("b", "Check "), cause.check),
    )


def _picture(cause: Cause, step_ms: float) -> Markup | None:
    """A step, and at its end the cause's part of it with its interval; of a loss that is in no step of the
    account, the run's time for each step."""
    ms, interval = cause.ms, cause.interval_ms
    what = "a step"
    if not cause.is_in_step and cause.share > 0:
        what, step_ms = "the run for each step", ms / cause.share
    if not 0 < ms <= step_ms:
        return None
    without = 100 * (1 - ms / step_ms)
    marks = [bar(0, without, "m-rest", 4, 10), bar(without, 100, "m-cause", 4, 10)]
    spoken = f"of {what}, {quantity(step_ms, 'ms')}: {quantity(ms, 'ms')}"
    if interval is not None:
        low, high = (at_percent(min(100.0, max(0.0, 100 * (1 - end / step_ms)))) for end in interval)
        ends = {"x1": high, "x2": low, "y1": "9", "y2": "9"}
        marks += [tag("line", **ends, class_="halo"), tag("line", **ends, class_="whisker")]
        spoken += f", between {number(interval[0])} and {quantity(interval[1], 'ms')}"
    return chart([tag("title", spoken), *marks], 18, spoken)


def _whatifs(whatifs: WhatIfs) -> list[Markup]:
    """Table of predicted steps, one row per change."""
    if not whatifs.lines:
        return [tag("h3", "What-ifs"), empty(whatifs.empty_text)]
    rows = [
        row(
            tag("code", line.change),
            numeric(quantity(line.predicted_ms, "ms")),
            numeric(" to ".join(quantity(ms, "ms") for ms in line.interval_ms)),
            numeric(percent(line.predicted_ms / line.step_ms - 1, sign=True, digits=1)),
            line.next_text,
        )
        for line in whatifs.lines
    ]
    step_ms = quantity(whatifs.lines[0].step_ms, "ms")
    columns = [
        ("Change", "", False), ("Step", "", True), ("Interval", "", True), ("Against now", "", True),
        ("Then the longest part", "", False),
    ]  # fmt: skip
    return [
        tag("h3", f"What-ifs: the traced step of {step_ms}, replayed with a change"),
        table("What-ifs", columns, rows),
        tag("p", "More: ", tag("code", whatifs.command), class_="note"),
    ]
