"""Why the step is as long as it is: at most five causes, each with what to change."""

from aorta.report.model import CauseLine, Causes, Report, WhatIfs
from aorta.report.numbers import quantity
from aorta.report.page.answer import typeset
from aorta.report.page.markup import Markup, tag
from aorta.report.page.parts import empty, section, table


def causes(report: Report) -> Markup | None:
    """None where nobody looked for causes."""
    if not report.causes:
        return None
    is_labelled = len(report.causes) > 1
    children: list[Markup] = []
    for label, run_causes in report.causes.items():
        if is_labelled:
            children.append(tag("h3", label))
        children.append(_list(label, run_causes))
        if run_causes.whatifs is not None:
            children += _whatifs(run_causes.whatifs)
    return section(
        "causes",
        "Causes and what to change",
        *children,
        lead="Milliseconds of a step by cause, with their 95 % interval over steps; no millisecond is in two."
        " The time without a cause is what the rest of the step needs at least.",
    )


def _whatifs(whatifs: WhatIfs) -> list[Markup]:
    """What the traced step would become, as a table."""
    if not whatifs.lines:
        return [tag("h3", "What-ifs"), empty(whatifs.empty_text)]
    rows = [
        tag(
            "tr",
            tag("th", tag("code", line.change), scope="row"),
            tag("td", quantity(line.predicted_ms, "ms"), class_="num"),
            tag(
                "td",
                f"{quantity(line.interval_ms[0], 'ms')} to {quantity(line.interval_ms[1], 'ms')}",
                class_="num",
            ),
            tag("td", f"{100 * (line.predicted_ms / line.step_ms - 1):+.1f} %", class_="num"),
            tag("td", line.next_text),
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


def _list(label: str, causes: Causes) -> Markup:
    if not causes.lines:
        return tag("p", causes.empty_text)
    return tag(
        "ol",
        [_cause(label, place, line) for place, line in enumerate(causes.lines, start=1)],
        class_="causes",
    )


def _cause(label: str, place: int, line: CauseLine) -> Markup:
    start, end = line.at_ms or (None, None)
    link = tag(
        "a",
        line.place,
        href="#timeline",
        data_step_choice=f"cause {place}",
        data_run=label,
        data_rank=line.rank,
        data_from=start,
        data_to=end,
    )
    return tag(
        "li",
        tag("h3", typeset(line.headline)),
        [tag("p", typeset(text), class_="evidence") for text in line.evidence],
        tag("p", tag("b", "Look at "), link) if line.place else None,
        tag("p", tag("b", "Change "), line.change),
        tag("p", tag("b", "Check "), line.check),
    )
