"""Widths for parts, types and frameworks never measured, judged on sources that did not choose them.

python benchmarks/projection/interval_widths.py --data DIR [--draws 150] [--json FILE]

Each draw splits the sources of published rows in two. On one half each width is the least that holds nine of
ten rows of groups left out; the other half is predicted by factors fitted to the first, and counts what is
inside with those widths and with the ones of aorta/projection/constants.yaml. Needs no GPU; a minute of CPU.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from projection.leave_out import Sensitivity, covers, fit
from projection.published import read_published
from projection.validate import judge, published_tables, row_widenings

from aorta.projection.interval import WIDTHS, Widening

KEYS = ("gpu", "precision", "framework")
SHIPPED = dict(zip(KEYS, (WIDTHS.other_part, WIDTHS.other_dtype, WIDTHS.other_stack), strict=True))
BEFORE = dict(zip(KEYS, (0.08, 0.08, 0.10), strict=True))
NONE = dict.fromkeys(KEYS, 0.0)
GRID = (0.0, 0.02, 0.04, 0.05, 0.06, 0.08, 0.10, 0.12, 0.15, 0.20)
ASKED = 0.90

Judged = tuple[int, float, tuple[str, ...]]
"""Number of a row, its log error, and of KEYS those whose value no row of the fit has."""


class Rows:
    """Complete published rows, with why their intervals are as wide as they are."""

    def __init__(self, folder: Path) -> None:
        self.slopes: list[Sensitivity] = []
        self.reasons: list[list[Widening]] = []
        for table in (judge(*read_published(path)) for path in published_tables(folder)):
            for sensitivity in table.slopes:
                self.slopes.append(sensitivity)
                self.reasons.append(row_widenings(sensitivity.row, table.projections[id(sensitivity.row)]))

    def value(self, number: int, key: str) -> str:
        return str(self.slopes[number].row.group[key])

    def predicted(self, fitted: list[int], others: list[int]) -> list[Judged]:
        """Other rows under factors fitted to some."""
        members = [self.slopes[number] for number in others]
        change = fit([self.slopes[number] for number in fitted], members)
        measured = {key: {self.value(number, key) for number in fitted} for key in KEYS}
        return [
            (
                number,
                member.residual + float(np.dot(member.slopes, change)),
                tuple(key for key in KEYS if self.value(number, key) not in measured[key]),
            )
            for number, member in zip(others, members, strict=True)
        ]

    def share_inside(self, judged: list[Judged], widths: dict[str, float]) -> float:
        inside = [
            covers([*self.reasons[number], *(Widening(key, widths[key]) for key in unmeasured)], error)
            for number, error, unmeasured in judged
        ]
        return float(np.mean(inside)) if inside else math.nan

    def least_width(self, key: str, numbers: list[int]) -> float:
        """The least width with which groups of the key left out of these rows are inside as asked."""
        groups = defaultdict(list)
        for number in numbers:
            groups[self.value(number, key)].append(number)
        judged: list[Judged] = []
        for members in groups.values():
            outside = [number for number in numbers if number not in members]
            judged += self.predicted(outside, members) if outside else []
        return next(
            (width for width in GRID if self.share_inside(judged, NONE | {key: width}) >= ASKED), GRID[-1]
        )


def drawn(rows: Rows, draws: int) -> dict[str, Any]:
    """Draws halves, and judges the widths that each half chooses on the other half."""
    generator = np.random.default_rng(2)
    sources = sorted({rows.value(number, "source") for number in range(len(rows.slopes))})
    chosen: dict[str, list[float]] = {key: [] for key in KEYS}
    inside: dict[str, list[float]] = {"chosen": [], "shipped": [], "before": []}
    together: list[Judged] = []
    for _ in range(draws):
        held_out = set(generator.choice(sources, len(sources) // 2, replace=False))
        first = [n for n in range(len(rows.slopes)) if rows.value(n, "source") not in held_out]
        other = [n for n in range(len(rows.slopes)) if rows.value(n, "source") in held_out]
        if min(len(first), len(other)) < 20:
            continue
        widths = {key: rows.least_width(key, first) for key in KEYS}
        for key in KEYS:
            chosen[key].append(widths[key])
        judged = rows.predicted(first, other)
        together += judged
        for name, choice in (("chosen", widths), ("shipped", SHIPPED), ("before", BEFORE)):
            inside[name].append(rows.share_inside(judged, choice))
    return {
        "rows": len(rows.slopes),
        "sources": len(sources),
        "draws": len(inside["chosen"]),
        "widths": {
            key: {
                "shipped": SHIPPED[key],
                "before": BEFORE[key],
                "chosen_quartiles": [float(width) for width in np.quantile(chosen[key], (0.25, 0.5, 0.75))],
                "inside_where_unmeasured": _unmeasured(rows, together, key),
            }
            for key in KEYS
        },
        "inside": {
            name: {"mean": float(np.mean(shares)), "worst_in_ten": float(np.quantile(shares, 0.1))}
            for name, shares in inside.items()
        },
    }


def _unmeasured(rows: Rows, judged: list[Judged], key: str) -> dict[str, float]:
    """Shares inside of the rows whose value of the key no row of the fit has."""
    members = [row for row in judged if key in row[2]]
    choices = (("shipped", SHIPPED), ("before", BEFORE), ("none", NONE))
    return {"rows": len(members)} | {name: rows.share_inside(members, choice) for name, choice in choices}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcome = drawn(Rows(arguments.data), arguments.draws)
    text = json.dumps(outcome, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
