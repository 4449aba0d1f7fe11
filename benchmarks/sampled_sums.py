"""Do the sums of recorded steps stand for those of all, within the intervals that are printed? On a CPU.

    python benchmarks/sampled_sums.py FULL ...          runs recorded with --overhead off
    python benchmarks/sampled_sums.py FULL --beside RUN     another run of the same program, with the default

Within one run, so that nothing drifts between: of all its steps those are taken that a smaller overhead would
have recorded, one block of so many (each of the possible ones), with the first steps and without. Rows, by
`every`: the part of the cells' means over all judged steps that lie within the interval of the sample, as
`aorta why` makes it; the middle of the intervals' half widths and of the errors, of the step. --beside: cells
of both runs, of their common judged steps.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, write
from numpy.typing import NDArray

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.record.overhead import BLOCK, NUM_FIRST, block_of, is_recorded
from aorta.timeline.statistics import MIN_STEPS, estimate, side

Floats = NDArray[np.float64]
EVERY = (2, 4, 8, 16, 32, 64, 128)
FEWEST_BLOCKS = 1
LEAST_SHARE = 0.002
"""Of the step, from which on a cell is looked at."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FULL")
    parser.add_argument("--beside", type=Path, metavar="RUN")
    options = parser.parse_args()
    rows = []
    for path in options.runs:
        steps, cells = series_of(path)
        print(f"{path}: {len(steps)} steps of {cells['step'].mean():.3f} ms, {len(cells) - 1} cells")
        for every in EVERY:
            for with_first in (True, False):
                rows += coverage(path, steps, cells, every, with_first)
        if options.beside is not None:
            beside(cells, *series_of(options.beside))
    write(options.output, rows)


def series_of(path: Path) -> tuple[NDArray[np.int64], dict[str, Floats]]:
    """Places of the account's steps in the run, and means over ranks of its cells there."""
    run = judge(load_run(path, path.name))
    account = account_of(run)
    cells = {"step": account.step_ms.mean(axis=0)}
    cells |= {name: values.mean(axis=0) for name, values in account.cells.items()}
    least_ms = LEAST_SHARE * float(cells["step"].mean())
    places = account.global_step - int(run.global_step[0])
    return places, {name: values for name, values in cells.items() if float(values.mean()) >= least_ms}


def coverage(
    path: Path, places: NDArray[np.int64], cells: dict[str, Floats], every: int, with_first: bool
) -> list[dict[str, Any]]:
    held: list[bool] = []
    halves, errors = [], []
    missed: dict[str, int] = {}
    for shift in range(every):
        chosen = np.array([
            with_first if place < NUM_FIRST else is_recorded(int(place) + BLOCK * shift, every)
            for place in places
        ])  # fmt: skip
        if len({block_of(int(place)) for place in places[chosen] if place >= NUM_FIRST}) < FEWEST_BLOCKS:
            continue
        if chosen.sum() < MIN_STEPS:
            continue
        for name, values in cells.items():
            found = estimate(values[None, chosen], "mean")
            if found is None:
                continue
            mean, (low, high) = side([found])
            truth = float(values.mean())
            held.append(low <= truth <= high)
            missed[name] = missed.get(name, 0) + (not held[-1])
            step = float(cells["step"].mean())
            halves.append((high - low) / 2 / step)
            errors.append(abs(mean - truth) / step)
    if not held:
        return []
    row = {
        "run": path.name,
        "every": every,
        "first": with_first,
        "held": float(np.mean(held)),
        "num": len(held),
        "half": float(np.median(halves)),
        "error": float(np.median(errors)),
        "missed": ", ".join(f"{name} {num}" for name, num in missed.items() if num),
    }
    print(
        f"  every {every:3d} {'with' if with_first else 'without'} the first: {row['held']:.0%} of"
        f" {row['num']} held, half width {row['half']:.2%} and error {row['error']:.2%} of the step;"
        f" missed: {row['missed'] or 'none'}"
    )
    return [row]


def beside(full: dict[str, Floats], places: NDArray[np.int64], sampled: dict[str, Floats]) -> None:
    for name in full.keys() | sampled.keys():
        means = []
        for cells in (full, sampled):
            found = estimate(cells[name][None, :], "mean") if name in cells else None
            means.append((math.nan, (math.nan, math.nan)) if found is None else side([found]))
        texts = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, (low, high) in means]
        print(f"  {name:18s} full {texts[0]:30s} sampled ({len(places)} steps) {texts[1]}")


if __name__ == "__main__":
    main()
