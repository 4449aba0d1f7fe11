"""What releases changed: tokens per second of the same job under a release and the one before it.

    python benchmarks/projection/release_gains.py --data DIR

Prints the text of aorta/projection/releases.yaml: by framework and release how many complete rows of
published tables there are, and of jobs that both it and the last release before it ran (all columns alike
but the rate) the least, the median and the largest gain. Needs no GPU.
"""

import csv
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import arguments
from projection.published import amount, is_yes, release_of_row
from projection.validate import published_tables

JOB = [
    "gpu",
    "n_gpus",
    "task",
    "model",
    "precision",
    "seq",
    "mbs",
    "gbs",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "shard",
    "recompute",
]


def gains(folder: Path) -> tuple[Counter[tuple[str, str]], dict[tuple[str, str], list[tuple[str, float]]]]:
    """Rows by framework and release, and by the same the release before and the gain over it of each job."""
    rows: Counter[tuple[str, str]] = Counter()
    jobs: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for path in published_tables(folder):
        with path.open(encoding="utf-8", newline="") as file:
            lines = [{key: value or "" for key, value in line.items()} for line in csv.DictReader(file)]
        for line in lines:
            release, rate = release_of_row(line), amount(line, "tok_s_gpu")
            if is_yes(line["complete"] or "yes"):
                rows[release.stack.name, release.version or "undated"] += 1
            if rate is not None and release.version:
                job = (release.stack.name, *(line[name].lower() for name in JOB))
                jobs[job].setdefault(release.version, rate)
    found: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for (name, *_), rates in jobs.items():
        ordered = sorted(rates)
        for before, version in zip(ordered, ordered[1:], strict=False):
            found[name, version].append((before, rates[version] / rates[before]))
    return rows, found


def table(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """releases.yaml, as data."""
    rows, found = gains(folder)
    releases: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (name, version), count in sorted(rows.items()):
        facts: dict[str, Any] = {"rows": count}
        sizes = [gain for _, gain in found.get((name, version), ())]
        if sizes:
            least, middle, most = (round(float(one), 2) for one in (min(sizes), median(sizes), max(sizes)))
            facts |= {"jobs": len(sizes), "gain": [least, middle, most]}
        releases[name][version] = facts
    return dict(releases)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    for name, releases in table(options.data).items():
        print(f"  {name}:")
        for version, facts in releases.items():
            print(f'    "{version}": {{{", ".join(f"{key}: {value}" for key, value in facts.items())}}}')
    sizes = [abs(math.log(gain)) for pairs in gains(options.data)[1].values() for _, gain in pairs]
    print(f"# {len(sizes)} jobs under two releases: 87 % changed by less than {np.quantile(sizes, 0.87):.3f}")


if __name__ == "__main__":
    main()
