"""How often any of twenty metrics is called in runs without a difference.

Each metric of a run is a mixture of noise that all its metrics share and noise of its own, both of a cell of
simulated_runs.py, on two ranks. Half of the rate of false alarms is for the first metric, as for the step
time in a report.

python benchmarks/family_of_metrics.py [--pairs N] [--output FILE.json]
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from false_alarms import wilson
from numpy.typing import NDArray
from simulated_runs import GROUPS, STEP_MS, Simulation

from aorta.timeline.statistics import ALPHA, Contrast, Estimate, contrast, estimate, holm

NUM_METRICS = 20
SHARES = [0.5, *[0.5 / (NUM_METRICS - 1)] * (NUM_METRICS - 1)]
CELLS = (
    "independent steps",
    "correlated 0.6",
    "linear drift, 2 % between runs, 50 steps",
    "3 runs a side that differ by 1 %",
)
SHARED = (0.8, 0.0)
"""Of the variance."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    simulations = {one.name: replace(one, num_ranks=2) for group in GROUPS.values() for one in group}
    rows = []
    for shared in SHARED:
        for name in CELLS:
            row = family(simulations[name], shared, args.pairs)
            rows.append(row)
            print(
                f"| {name} | {100 * shared:.0f} % | {100 * row['any_called'] / args.pairs:.1f} % |"
                f" {100 * row['interval'][0]:.1f} to {100 * row['interval'][1]:.1f} |"
                f" {100 * row['any_alone'] / args.pairs:.0f} % |",
                flush=True,
            )
    if args.output:
        args.output.write_text(json.dumps({"metrics": NUM_METRICS, "cells": rows}, indent=1) + "\n")


def family(simulation: Simulation, shared: float, pairs: int, seed: int = 0) -> dict[str, Any]:
    """Pairs in which any metric is called, with Holm's method and each alone."""
    rng = np.random.default_rng(seed)
    any_called = any_alone = 0
    for _ in range(pairs):
        sides = [metrics_of_a_side(simulation, shared, rng, is_candidate) for is_candidate in (False, True)]
        contrasts: list[Contrast] = [contrast(*both) for both in zip(*sides, strict=True)]
        p_values = [1.0 if one.withheld else one.p_with_drift for one in contrasts]
        any_called += min(holm(p_values, SHARES)) <= ALPHA
        any_alone += min(p_values) <= ALPHA
    return {
        "cell": simulation.name,
        "shared": shared,
        "pairs": pairs,
        "any_called": any_called,
        "interval": wilson(any_called, pairs),
        "any_alone": any_alone,
    }


def metrics_of_a_side(
    simulation: Simulation, shared: float, rng: np.random.Generator, is_candidate: bool
) -> list[list[Estimate]]:
    """[metric][run]"""
    metrics: list[list[Estimate]] = [[] for _ in range(NUM_METRICS)]
    for _ in range(simulation.num_runs(is_candidate)):
        common = deviations(simulation, rng, is_candidate)
        for estimates in metrics:
            own = deviations(simulation, rng, is_candidate)
            mixed = estimate(STEP_MS + math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
            assert mixed is not None
            estimates.append(mixed)
    return metrics


def deviations(simulation: Simulation, rng: np.random.Generator, is_candidate: bool) -> NDArray[np.float64]:
    return simulation.run(rng, is_candidate) - STEP_MS


if __name__ == "__main__":
    main()
