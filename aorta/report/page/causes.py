"""Why the step is as long as it is: at most five causes, each with what to change."""

from aorta.report.model import CauseLine, Causes, Report
from aorta.report.page.answer import typeset
from aorta.report.page.markup import Markup, tag
from aorta.report.page.parts import section


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
    return section(
        "causes",
        "Causes and what to change",
        *children,
        lead="Milliseconds of a step by cause, with their 95 % interval over steps; no millisecond is in two."
        " The time without a cause is what the rest of the step needs at least.",
    )


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
