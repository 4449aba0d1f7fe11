"""Errors of published rows with another row of the model as anchor, by what differs between the two.

    python benchmarks/projection/anchors.py --data DIR [--output FILE.csv]

Both rows are of one model and one framework, and each is the anchor of the other: the projection of one,
times what was measured over projected of the other. The widths of anchored intervals (`anchored_*` in
aorta/projection/constants.yaml) hold seven of eight of these pairs. Needs no GPU.
"""

import csv
import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import arguments
from projection.interval_widths import release
from projection.measured_steps import Row, files_below
from projection.published import read_published
from projection.validate import judge, published_tables

from aorta.projection.interval import LAYOUT, SCALES, WIDTHS, anchored_widenings, family, scale_of, width_of
from aorta.projection.prices import Anchor
from aorta.projection.step import Projection

Pair = tuple[Row, Projection]


def pairs(folder: Path) -> list[tuple[str, str, float, bool]]:
    """Of every two rows of a model and framework: family, what differs, log error, if it lies inside."""
    paths = [*published_tables(folder), *files_below(folder, "layouts_*_ran.csv")]
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for path in paths:
        table = judge(*read_published(path))
        for row in table.rows:
            if row.complete:
                groups[row.model.name, release(row).partition("@")[0]].append(
                    (row, table.projections[id(row)])
                )
    return [_judged(*two) for rows in groups.values() for two in itertools.permutations(rows, 2)]


def _judged(anchor: Pair, target: Pair) -> tuple[str, str, float, bool]:
    (there, there_projected), (here, here_projected) = anchor, target
    off = _log_ratio(here, here_projected) - _log_ratio(there, there_projected)
    plan, other = here_projected.plan, there_projected.plan
    differs = [
        name
        for name, is_other in (
            ("layout", any(getattr(plan, key) != getattr(other, key) for key in LAYOUT)),
            ("part", here.hardware.name != there.hardware.name),
            ("precision", plan.dtype != other.dtype),
            ("release", release(here) != release(there)),
            ("GPUs", plan.world_size != other.world_size),
        )
        if is_other
    ]
    found = Anchor(there.name, there.model, other, there.hardware.name, {}, 1.0)
    width = width_of(anchored_widenings(here.model, plan, here.hardware, found))
    inside = -WIDTHS.skew_low * width <= off <= WIDTHS.skew_high * width
    undescribed = scale_of(here.model, plan, here.hardware) == SCALES.undescribed
    kind = "undescribed" if undescribed else family(here.model)
    return kind, " + ".join(differs) or "nothing", off, inside


def _log_ratio(row: Row, projection: Projection) -> float:
    """Log of measured over projected step time."""
    return math.log(projection.tokens_per_s_per_gpu / row.tokens_per_s_per_gpu)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    found = pairs(options.data)
    groups: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for kind, differs, off, inside in found:
        for name in (differs, "all", *(["same release"] if "release" not in differs else [])):
            groups[kind, name].append((off, inside))
    rows: list[dict[str, Any]] = []
    for (kind, differs), members in sorted(groups.items()):
        sizes = np.abs(np.expm1([off for off, _ in members]))
        rows.append(
            {
                "family": kind,
                "differs": differs,
                "pairs": len(members),
                "median_error_pct": round(100 * float(np.median(sizes)), 2),
                "p90_error_pct": round(100 * float(np.quantile(sizes, 0.9)), 2),
                "inside": round(sum(inside for _, inside in members) / len(members), 3),
            }
        )
        errors = "{median_error_pct:7.1f} /{p90_error_pct:6.1f} %   inside {inside:.0%}".format(**rows[-1])
        print(f"{kind:12s}{differs:44s}{len(members):6d}{errors}")
    if options.output is not None:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
