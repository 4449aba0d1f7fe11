"""The page's section of hazards and wrong numbers, for runs that `aorta check` watched."""

from typing import Any

from aorta.account.model import Report
from aorta.hazards.findings import read_checked
from aorta.hazards.text import checked_text
from aorta.page.parts import Markup, section, tag


def hazards(report: Report) -> Markup | None:
    """Findings of each run that was checked, as the terminal shows them; None where none was."""
    children: list[Any] = []
    for dataset in report.datasets.values():
        for judged in dataset.runs:
            checked = read_checked(judged.run.path) if judged.run.path.is_dir() else []
            if any(rank.steps for rank in checked):
                text = checked_text(checked, show_all=True)
                children += [tag("h3", judged.run.label), tag("pre", text, style="overflow-x: auto")]
    return section("hazards", "Hazards and wrong numbers", *children) if children else None
