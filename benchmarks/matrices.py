"""Does a matrix call a cell that does nothing, and does it find one that does? Simulated; no GPU.

    python benchmarks/matrices.py --matrices 2000 --output matrices.csv       2 minutes
    python benchmarks/matrices.py --series artifacts/ab/NUMBER/ab.json        runs in turn, drawn from it

Of each kind of matrix: how often any cell without a difference is called (aimed at 5 % of matrices), and how
often one that is 10 % slower is. With --series, how often series of pairs, whose differences are drawn from
those that were recorded, call A/A, and 3 % planted.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from harness import arguments, write
from numpy.typing import NDArray

from aorta.sweep.effects import Noise
from aorta.sweep.series import Series
from aorta.timeline.sequential import FIRST_LOOK, look
from aorta.timeline.statistics import ALPHA

Floats = NDArray[np.float64]
QUIET, NOISY, ROUND = 0.02, 0.08, 0.05
"""Standard deviations: of a run, of a run of a noisy cell, and of a round."""
PLANTED = 0.10
MATTERS = 0.03
NUM_SERIES = 500


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--matrices", type=int, default=2000)
    parser.add_argument("--series", type=Path)
    options = parser.parse_args()
    if options.series is not None:
        resampled(options.series)
        return
    rows: list[dict[str, Any]] = []
    for num_cells, num_rounds in ((2, 3), (6, 3), (6, 5), (6, 10), (12, 3)):
        kinds = {
            "all alike": [QUIET] * num_cells,
            "one cell noisier": [QUIET] * (num_cells - 1) + [NOISY],
            "baseline noisier": [NOISY] + [QUIET] * (num_cells - 1),
            "half of them noisier": [QUIET] * (num_cells // 2) + [NOISY] * (num_cells - num_cells // 2),
        }
        for name, spreads in kinds.items():
            for lost in (0.0, 0.2):
                called, found = rates(np.array(spreads), num_rounds, lost, options.matrices)
                rows.append(
                    {
                        "cells": num_cells, "trials": num_rounds, "kind": name, "runs_that_fail": lost,
                        "called_percent": round(100 * called, 1), "found_10_percent": round(100 * found, 1),
                    }
                )  # fmt: skip
                print(*rows[-1].values(), sep="\t", flush=True)
    write(options.output, rows)


def rates(spreads: Floats, num_rounds: int, lost: float, num: int) -> tuple[float, float]:
    """Shares of matrices in which any cell is called, and in which one that is slower is found."""
    rng = np.random.default_rng(0)
    called = found = 0
    for _ in range(num):
        logs = rng.standard_normal((len(spreads), num_rounds)) * spreads[:, None]
        logs += ROUND * rng.standard_normal(num_rounds)
        logs[rng.random(logs.shape) < lost] = np.nan
        noise = Noise.of(logs)  # a cell that is slower as a whole changes nothing of it
        called += any(is_called(noise, row - logs[0], len(logs) - 1) for row in logs[1:])
        found += is_called(noise, logs[1] + np.log1p(PLANTED) - logs[0], len(logs) - 1)
    return called / num, found / num


def is_called(noise: Noise, apart: Floats, num_others: int) -> bool:
    interval = noise.interval(apart[np.isfinite(apart)], ALPHA / num_others)
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


def resampled(path: Path) -> None:
    """Series drawn, with replacement, from the differences within pairs that a series recorded; of as many
    pairs as it had at most, and of as many as it says would tell.

    Differences as they were, and smoothed: of a few that are drawn again and again, three are often nearly
    alike and seem to have no spread, which no machine does."""
    series = msgspec.json.decode(path.read_bytes(), type=Series)
    recorded = np.array(series.log_ratios())
    recorded -= recorded.mean()
    spread = float(recorded.std(ddof=1))
    needed = look(recorded.tolist(), series.most_rounds, MATTERS, ALPHA).pairs_needed
    print(f"{len(recorded)} pairs, standard deviation {100 * spread:.2f} %, {needed} pairs would tell")
    # Silverman's width; the sum is scaled to the spread of what was recorded.
    width = 0.9 * len(recorded) ** -0.2
    for num_pairs in dict.fromkeys((series.most_rounds, needed or series.most_rounds)):
        for kind in ("as they were", "smoothed"):
            rng = np.random.default_rng(0)
            ends = {0.0: Counter[str](), MATTERS: Counter[str]()}
            for _ in range(NUM_SERIES):
                drawn = rng.choice(recorded, num_pairs)
                if kind == "smoothed":
                    drawn = drawn + width * spread * rng.standard_normal(num_pairs)
                    drawn /= np.sqrt(1 + width**2)
                for shift, counts in ends.items():
                    counts[_end((np.log1p(shift) + drawn).tolist())] += 1
            print(f"{NUM_SERIES} series of {num_pairs} pairs, {kind}:")
            for shift, counts in ends.items():
                print(f"  {100 * shift:.0f} % planted: {dict(counts)}", flush=True)


def _end(pairs: list[float]) -> str:
    looks = (look(pairs[:num], len(pairs), MATTERS, ALPHA) for num in range(FIRST_LOOK, len(pairs) + 1))
    return next((one.outcome for one in looks if one.is_decided), "cannot tell")


if __name__ == "__main__":
    main()
