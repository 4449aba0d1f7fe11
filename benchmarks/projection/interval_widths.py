"""Widths of intervals, judged on rows whose model, or whose release, the fit did not have.

    python benchmarks/projection/interval_widths.py --data DIR [--output FILE.csv]

Every row is projected by factors fitted without its model, and without its release. A line says by family and
architecture how wide the errors were beside the widths of the reasons alone, and so which factor on these
holds seven of eight (`scales` in aorta/projection/constants.yaml; few rows are drawn towards their family's),
and what share lies inside as shipped; then the same of parts and releases with 20 rows. Needs no GPU.
"""

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import arguments
from projection.leave_out import left_out_residuals
from projection.published import read_published
from projection.validate import judge, published_tables

from aorta.projection.calibrate import pricer_of
from aorta.projection.interval import NOT_KNOWN, SCALES, WIDTHS, Widening, family, scale_of, width_of
from aorta.projection.measured_runs import Row, files_below
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
    width: float
    scale: float

    @property
    def inside(self) -> bool:
        return -WIDTHS.skew_low * self.width <= self.log_error <= WIDTHS.skew_high * self.width


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
            reasons = list(projection.widenings)
            if projection is not projections[id(row)]:  # with what it told, nothing of the model was measured
                width = WIDTHS.new_hybrid if family(row.model) == "hybrid" else WIDTHS.new_mixture
                reasons.append(Widening(NOT_KNOWN, width, False))
            found.append(Judged(row, name, -error, width_of(reasons), scale))
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
    """Errors of a group, the factor that would hold seven of eight, and the share inside as shipped."""
    sizes = np.abs(np.expm1([row.log_error for row in rows]))
    shares = [abs(row.log_error) / row.width * row.scale for row in rows]
    asked = float(np.quantile(shares, ASKED)) / ((WIDTHS.skew_low + WIDTHS.skew_high) / 2)
    return {
        "group": title,
        "rows": len(rows) // 2,
        "models": len({row.row.model.name for row in rows}),
        "median_error_pct": 100 * float(np.median(sizes)),
        "p90_error_pct": 100 * float(np.quantile(sizes, 0.9)),
        "scale_for_87_pct": asked,
        "scale": float(np.median([row.scale for row in rows])),
        "inside_by_model": _share(row.inside for row in rows if row.left_out == "model"),
        "inside_by_release": _share(row.inside for row in rows if row.left_out == "release"),
    }


def _share(inside: Iterable[bool]) -> float:
    found = list(inside)
    return sum(found) / len(found) if found else float("nan")


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
        print(
            f"{line['group']:36s}{line['rows']:5d} rows{line['models']:4d} models"
            f"{line['median_error_pct']:7.1f} /{line['p90_error_pct']:6.1f} %"
            f"   87 % at x{line['scale_for_87_pct']:.2f}, shipped x{line['scale']:.2f}"
            f"   inside {line['inside_by_model']:.0%} by model, {line['inside_by_release']:.0%} by release"
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
