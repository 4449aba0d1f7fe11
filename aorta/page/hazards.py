"""The page's section of hazards and wrong numbers, for runs that `aorta check` watched."""

from typing import Any

from aorta.account.model import Report
from aorta.hazards.findings import Checked, Finding, Place, merged, read_checked
from aorta.hazards.text import WORDS, coverage_lines, summary
from aorta.page.parts import Markup, bullets, folded, section, table, tag

COLUMNS = [
    ("finding", "", False),
    ("later operation", "", False),
    ("earlier operation", "", False),
    ("missing", "", False),
    ("times", "", True),
    ("first step", "", True),
]


def hazards(report: Report) -> Markup | None:
    """Findings of each run that was checked; None where none was."""
    children: list[Any] = []
    for dataset in report.datasets.values():
        for judged in dataset.runs:
            checked = read_checked(judged.run.path) if judged.run.path.is_dir() else []
            if any(rank.steps for rank in checked):
                children += [tag("h3", judged.run.label), *_of_run(checked)]
    return section("hazards", "Hazards and wrong numbers", *children) if children else None


def _of_run(checked: list[Checked]) -> list[Any]:
    findings = merged(checked)
    found = sorted((d for c in checked for d in c.differences), key=lambda d: (d.step, d.place, d.rank))
    lines = [f"step {d.step}, rank {d.rank}: {d.name}: {d.detail}" for d in found]
    rows = [_row(finding) for finding in findings]
    return [
        tag("p", summary(checked, findings, found), class_="lead"),
        table("Accesses to the same bytes that nothing orders", COLUMNS, rows) if rows else None,
        bullets(lines),
        folded("What was seen", bullets(coverage_lines(checked))),
    ]


def _row(finding: Finding) -> Markup:
    words = f"{finding.status}: {WORDS[finding.kind]}, {finding.num_bytes:,} bytes"
    notes = [text for text in (finding.parameter, finding.hint, finding.reason) if text]
    return tag(
        "tr",
        tag("th", [words, *(tag("div", note) for note in notes)], scope="row"),
        tag("td", _side(finding.later)),
        tag("td", _side(finding.earlier)),
        tag("td", finding.missing),
        tag("td", str(finding.count), class_="num"),
        tag("td", str(finding.first_step), class_="num"),
    )


def _side(place: Place) -> str:
    return f"{place.site}, on {place.stream}"
