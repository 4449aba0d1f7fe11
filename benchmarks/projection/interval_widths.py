"""Widths of intervals, judged on rows whose model, or whose release, the fit did not have.

    python benchmarks/projection/interval_widths.py --data DIR [--output FILE.csv]

Every row is projected by factors fitted without its model, and without its release. A mixture or hybrid whose
model is left out gets the interval that is printed for one of which nothing was measured. A line says by
family and architecture how far off rows were either way, what share lies inside as shipped, and which factor
on the widths of the reasons holds seven of eight (`scales` in aorta/projection/constants.yaml; of mixtures
and hybrids from rows left out by release; few rows are drawn towards their family's), and which width of a
new model does (`new_mixture`); then the same of parts and releases with 20 rows. Needs no GPU.
"""

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import arguments
from projection.leave_out import left_out_residuals
from projection.measured_steps import Row, files_below, pricer_of
from projection.published import read_published
from projection.validate import judge, published_tables

from aorta.projection.interval import SCALES, WIDTHS, family, scale_of, width_of
from aorta.projection.step import Projection, project

ASKED = 0.87
DRAWN_BY = 20
"""Rows of a family that count as much as a group's own."""


class Judged(NamedTuple):
    row: Row
    left_out: str
    """model or release."""
    log_error: float
    """Of measured over projected step time."""
    known_width: float
    """Of what measured steps tell."""
    new_width: float
    """Of a model of which no step was measured; 0 for others."""
    scale: float

    @property
    def width(self) -> float:
        return math.hypot(self.known_width, self.new_width)

    @property
    def needed(self) -> float:
        """The width whose interval ends at what was measured."""
        return abs(self.log_error) / (WIDTHS.skew_high if self.log_error > 0 else WIDTHS.skew_low)

    @property
    def inside(self) -> bool:
        return self.needed <= self.width


def release(row: Row) -> str:
    """Framework with year and month of its release."""
    name, _, version = str(row.group["stack"]).partition("@")
    return f"{name}@{version[:5]}" if version else name


def kind(row: Row, scale: float) -> str:
    """Family of a row's interval."""
    if scale in (SCALES.undescribed, SCALES.plain) and scale != SCALES.dense:
        return "software of no measured release" if scale == SCALES.undescribed else "dense, PyTorch"
    return family(row.model)


def judged(folder: Path) -> list[Judged]:
    """Every complete row twice: left out by model and by release."""
    paths = [*published_tables(folder), *files_below(folder, "layouts_*_ran.csv")]
    tables = [judge(*read_published(path)) for path in paths]
    slopes = [sensitivity for table in tables for sensitivity in table.slopes]
    projections = {key: one for table in tables for key, one in table.projections.items()}
    found = []
    by: tuple[tuple[str, Callable[[Row], object]], ...] = (
        ("model", lambda row: row.group["model"]),
        ("release", release),
    )
    for name, group_of in by:
        for sensitivity, error, _ in left_out_residuals(slopes, group_of):
            row = sensitivity.row
            projection = projections[id(row)]
            if name == "model":
                without = without_own_settings(row, projection)
                error += math.log(without.step_s / projection.step_s)
                projection = without
            scale = scale_of(row.model, projection.plan, row.hardware)
            new = 0.0
            if name == "model" and family(row.model) != "dense":
                new = WIDTHS.new_hybrid if family(row.model) == "hybrid" else WIDTHS.new_mixture
            found.append(Judged(row, name, -error, width_of(list(projection.widenings)), new, scale))
    return found


def without_own_settings(row: Row, projection: Projection) -> Projection:
    """The row's projection without kinds of kernels that its own model alone told (numbers have priors)."""
    plan = projection.plan
    own = [one.setting for one in plan.rests_on if one.model == row.model.name]
    kinds = {name: None for name in own if isinstance(getattr(plan, name), str)}
    if not kinds:
        return projection
    return project(row.model, msgspec.structs.replace(plan, rests_on=(), **kinds), pricer_of(row))


def summary(title: str, rows: list[Judged]) -> dict[str, Any]:
    """Errors of a group left out either way, the widths that would hold seven of eight, and the share inside
    as shipped."""
    line: dict[str, Any] = {
        "group": title,
        "rows": len(rows) // 2,
        "models": len({row.row.model.name for row in rows}),
    }
    for name in ("model", "release"):
        own = [row for row in rows if row.left_out == name]
        sizes = np.abs(np.expm1([row.log_error for row in own]))
        line[f"by_{name}_median_pct"] = 100 * float(np.median(sizes))
        line[f"by_{name}_p90_pct"] = 100 * float(np.quantile(sizes, 0.9))
        line[f"inside_by_{name}"] = sum(row.inside for row in own) / len(own)
    told = [row.needed / row.known_width * row.scale for row in rows if not row.new_width]
    line["scale_for_87_pct"] = float(np.quantile(told, ASKED))
    line["scale"] = float(np.median([row.scale for row in rows]))
    left = [row.needed**2 - row.known_width**2 for row in rows if row.new_width]
    line["new_for_87_pct"] = math.sqrt(max(0.0, float(np.quantile(left, ASKED)))) if left else None
    return line


def grouped(rows: list[Judged]) -> list[dict[str, Any]]:
    """Families; families on architectures, drawn towards their family; parts and releases with 20 rows."""
    lines: list[dict[str, Any]] = []
    families: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        families[kind(row.row, row.scale)].append(row)
    for name, members in sorted(families.items()):
        whole = summary(name, members)
        lines.append(whole)
        parts: dict[str, list[Judged]] = defaultdict(list)
        for row in members:
            parts[row.row.hardware.architecture].append(row)
        for architecture, own in sorted(parts.items()) if len(parts) > 1 else ():
            line = summary(f"{name} {architecture}", own)
            weight = line["rows"] / (line["rows"] + DRAWN_BY)
            line["drawn_scale"] = weight * line["scale_for_87_pct"] + (1 - weight) * whole["scale_for_87_pct"]
            lines.append(line)
    for group_of in (lambda row: row.hardware.name, release):
        groups: dict[str, list[Judged]] = defaultdict(list)
        for row in rows:
            groups[group_of(row.row)].append(row)
        lines += [summary(name, own) for name, own in sorted(groups.items()) if len(own) >= 40]
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    lines = grouped(judged(options.data))
    for line in lines:
        new = "" if line["new_for_87_pct"] is None else f", new {line['new_for_87_pct']:.2f}"
        ways = "; ".join(
            f"by {name} {line[f'by_{name}_median_pct']:4.1f} /{line[f'by_{name}_p90_pct']:5.1f} %,"
            f" inside {line[f'inside_by_{name}']:.0%}"
            for name in ("model", "release")
        )
        print(
            f"{line['group']:34s}{line['rows']:4d} rows{line['models']:3d} models  {ways};"
            f" 87 % at x{line['scale_for_87_pct']:.2f}, shipped x{line['scale']:.2f}{new}"
        )
    if options.output is not None:
        columns = list(dict.fromkeys(name for line in lines for name in line))
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _rounded(value) for name, value in line.items()} for line in lines)


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
