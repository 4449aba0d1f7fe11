"""Sweeps of layouts whose outcome is known: memory verdicts, order of layouts, one of them as anchor.

    python benchmarks/projection/outcomes.py --data DIR [--json]

DIR holds layouts_*_ran.csv (measured_throughput's columns) and layouts_*_failed.csv (ran out of memory), at
any depth. Layouts are of one group where all but the micro-batch and the axes are alike, as the first part of
their ids says; a pair counts where the two lie 5 % apart. Needs no GPU; seconds of CPU.
"""

import argparse
import csv
import itertools
import json
import math
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from projection.measured_steps import Row, files_below, pricer_of
from projection.published import read_published

from aorta.projection.memory import memory
from aorta.projection.step import project

APART = math.log(1.05)


def verdicts(rows: list[Row]) -> dict[str, int]:
    """Number of layouts by what the model says of their memory."""
    found = Counter(memory(row.model, row.plans[0][1], row.hardware.memory.hbm_bytes).verdict for row in rows)
    return {name: found[name] for name in ("fits", "tight", "does not fit")}


def order(rows: list[Row]) -> dict[str, Any]:
    """Pairs of layouts in the right order, groups whose best is found, and errors with another as anchor."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        step = project(row.model, row.plans[0][1], pricer_of(row))
        groups[row.name.rpartition("-")[0]].append((row.tokens_per_s_per_gpu, step.tokens_per_s_per_gpu))
    right = pairs = best = 0
    anchored: list[float] = []
    for members in groups.values():
        for (one, one_projected), (other, other_projected) in itertools.combinations(members, 2):
            off = math.log(one_projected / one) - math.log(other_projected / other)
            anchored += [abs(math.expm1(off)), abs(math.expm1(-off))]
            if abs(math.log(one / other)) > APART:
                pairs += 1
                right += (one > other) == (one_projected > other_projected)
        chosen = max(members, key=lambda member: member[1])
        best += chosen[0] >= max(measured for measured, _ in members) / 1.05
    errors = [abs(p / m - 1) for members in groups.values() for m, p in members]
    return {
        "rows": len(errors),
        "error_pct": [100 * float(np.quantile(errors, share)) for share in (0.5, 0.9)],
        "pairs": pairs,
        "right_pairs": right,
        "groups": len(groups),
        "best_within_5_pct": best,
        "anchored_error_pct": [100 * float(np.quantile(anchored, share)) for share in (0.5, 0.9)],
    }


def judged(folder: Path) -> dict[str, Any]:
    """All sweeps at or below a folder."""
    ran = [row for path in files_below(folder, "layouts_*_ran.csv") for row in read_published(path)[0]]
    failed = [row for path in files_below(folder, "layouts_*_failed.csv") for row in failures(path)]
    return {"ran": verdicts(ran), "failed": verdicts(failed), "order": order(ran)}


def failures(path: Path) -> list[Row]:
    """Layouts that ran out of memory, as rows whose throughput means nothing."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [dict(line, tok_s_gpu="1") for line in csv.DictReader(file)]
    return read_published(path, lines)[0]


def text(result: dict[str, Any]) -> str:
    found = result["order"]
    lines = [
        f"{name:8s}" + ", ".join(f"{verdict} {count}" for verdict, count in result[name].items())
        for name in ("ran", "failed")
    ]
    lines.append(
        f"{found['right_pairs']} of {found['pairs']} pairs in the right order; best within 5 % in "
        f"{found['best_within_5_pct']} of {found['groups']} groups"
    )
    for name in ("error_pct", "anchored_error_pct"):
        lines.append("{:20s}{:.1f} / {:.1f} %".format(name, *found[name]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("AORTA_DATA"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of measurements by --data or AORTA_DATA")
    result = judged(Path(options.data))
    print(json.dumps(result) if options.json else text(result))


if __name__ == "__main__":
    main()
