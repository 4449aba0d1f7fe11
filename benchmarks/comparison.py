"""Does the comparison see a difference that is not there, and one that is? Simulated; no GPU.

    python benchmarks/comparison.py --pairs 400 --output false_alarms.csv       hours; --only TEXT: some cells
    python benchmarks/comparison.py family --pairs 400                          any of twenty metrics

Pairs of runs with the seeds fixed: steps of 40 ms, noise that all ranks share and noise of each rank
(simulated_runs.py has the cells). In `family` each metric of a run is a mixture of noise that all its metrics
share and noise of its own, on two ranks; half of the rate of false alarms is for the first metric, as for the
step time in a report.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from harness import arguments, choose, write
from numpy.typing import NDArray
from simulated_runs import GROUPS, STEP_MS, Simulation

from aorta.timeline.statistics import ALPHA, Contrast, Estimate, contrast, estimate, holm, warmup_steps

SHARES = [0.5, *[0.5 / 11] * 11]
"""Shares of the rate of false alarms, as in a report: half is for the step time."""
PLANTED_SHARE = 0.03
"""Difference whose power is given for every cell, as a part of the step time."""
NUM_METRICS = 20
FAMILY_SHARES = [0.5, *[0.5 / (NUM_METRICS - 1)] * (NUM_METRICS - 1)]
CELLS = (
    "independent steps",
    "correlated 0.6",
    "linear drift, 2 % between runs, 50 steps",
    "3 runs a side that differ by 1 %",
)
SHARED = (0.8, 0.0)
"""Parts of the variance that all metrics share."""


def pairs() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for group, simulations in GROUPS.items():
        print(
            f"{group:46} {'seen':>7} {'95 % of it':>13} {'of 12':>6} {'untold':>6}"
            f" {'smallest':>11} {'power':>6} {'3 %':>6} {'untold':>7}"
        )
        for simulation in simulations:
            if options.only not in simulation.name:
                continue
            outcome = simulate(simulation, options.pairs)
            low, high = outcome.interval
            figures = {name: value for name, value in asdict(outcome).items() if name != "simulation"}
            rows.append({"group": group, "cell": simulation.name, **figures, "low": low, "high": high})
            print(line_of(outcome), flush=True)
            write(options.output, rows)


def families() -> None:
    parser = arguments("How often any of twenty metrics is called in runs without a difference.")
    parser.add_argument("--pairs", type=int, default=400)
    options = parser.parse_args()
    simulations = {one.name: replace(one, num_ranks=2) for group in GROUPS.values() for one in group}
    rows = []
    for shared in SHARED:
        for name in CELLS:
            rows.append(family(simulations[name], shared, options.pairs))
            row = rows[-1]
            print(
                f"{name:42} {100 * shared:3.0f} % shared  any called {row['any_called']:4d}"
                f"  alone {row['any_alone']:4d}  of {options.pairs}",
                flush=True,
            )
            write(options.output, rows)


@dataclass(frozen=True)
class Outcome:
    simulation: Simulation
    pairs: int
    seen: int
    """Pairs whose difference was called: alarms, where nothing was planted."""
    seen_of_twelve: int
    """The same where eleven more metrics were looked at, and Holm's method allowed for them."""
    covered: int
    """Pairs whose 95 % interval of the ratio holds the true ratio."""
    withheld: int
    """Pairs of which no claim was made."""
    caveats: int
    """Pairs whose interval was widened for a reason that is said."""
    detectable_percent: float
    """Median of the smallest difference that would be seen, over the step time."""
    seen_detectable: int
    """Pairs that would be called if the candidate were slower by that."""
    seen_three_percent: int
    not_told: int
    """Pairs of which a drift would explain the difference, and chance would not."""
    three_percent_not_told: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the share seen, Wilson's."""
        return wilson(self.seen, self.pairs)


def line_of(outcome: Outcome) -> str:
    low, high = outcome.interval
    rates = [outcome.seen, outcome.seen_of_twelve, outcome.seen_detectable, outcome.seen_three_percent]
    seen, of_twelve, power, three = (100 * rate / outcome.pairs for rate in rates)
    untold = 100 * outcome.not_told / outcome.pairs
    three_untold = 100 * outcome.three_percent_not_told / outcome.pairs
    return (
        f"{outcome.simulation.name:46} {seen:5.1f} % {100 * low:5.1f} to {100 * high:4.1f} {of_twelve:6.1f}"
        f" {untold:6.1f}"
        f" {outcome.detectable_percent:9.2f} % {power:5.0f} % {three:5.0f} % {three_untold:6.0f}"
    )


def simulate(simulation: Simulation, pairs: int, seed: int = 0) -> Outcome:
    rng = np.random.default_rng(seed)
    of_twelve = covered = withheld = 0
    found: list[Contrast] = []
    sides: list[list[list[Estimate]]] = []
    for _ in range(pairs):
        pair = [_side(simulation, rng, 0), _side(simulation, rng, 1)]
        one = contrast(*pair)
        found.append(one)
        sides.append(pair)
        others = rng.random(11).tolist()
        of_twelve += not one.withheld and holm([one.p_with_drift, *others], SHARES)[0] <= ALPHA
        low, high = one.intervals_with_drift()[1] or (-math.inf, math.inf)
        covered += low <= 1 + simulation.slowdown <= high
        withheld += bool(one.withheld)
    detectable = float(np.median([one.detectable() for one in found]))
    three_percent = [contrast(r, _slower(c, PLANTED_SHARE * STEP_MS)) for r, c in sides]
    return Outcome(
        simulation=simulation,
        pairs=pairs,
        seen=sum(map(is_called, found)),
        seen_of_twelve=of_twelve,
        covered=covered,
        withheld=withheld,
        caveats=sum(bool(one.caveats) for one in found),
        detectable_percent=100 * detectable / STEP_MS,
        seen_detectable=sum(is_called(contrast(r, _slower(c, detectable))) for r, c in sides),
        seen_three_percent=sum(map(is_called, three_percent)),
        not_told=sum(map(is_not_told, found)),
        three_percent_not_told=sum(map(is_not_told, three_percent)),
    )


def is_called(found: Contrast) -> bool:
    return not found.withheld and found.p_with_drift <= ALPHA


def is_not_told(found: Contrast) -> bool:
    """Chance does not explain it, and a drift that runs as short do not show does."""
    return not found.withheld and found.p_value <= ALPHA < found.p_with_drift


def _side(simulation: Simulation, rng: np.random.Generator, number: int) -> list[Estimate]:
    """Number 0 is the reference, 1 the candidate."""
    runs = []
    for _ in range(simulation.num_runs(bool(number))):
        values = simulation.run(rng, bool(number))
        first = warmup_steps(values) if simulation.warmup else 0
        one = estimate(values[:, first:], positions=np.arange(first, values.shape[1]))
        assert one is not None
        runs.append(one)
    return runs


def _slower(runs: list[Estimate], by_ms: float) -> list[Estimate]:
    """The same runs with every step longer by that."""
    return [
        replace(one, value=one.value + by_ms, series=None if one.series is None else one.series + by_ms)
        for one in runs
    ]


def wilson(count: int, of: int) -> tuple[float, float]:
    """Source: Wilson, Journal of the American Statistical Association 22 (1927)."""
    z, rate = 1.959964, count / of
    middle = (rate + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def family(simulation: Simulation, shared: float, pairs: int, seed: int = 0) -> dict[str, Any]:
    """Pairs in which any metric is called, with Holm's method and each alone."""
    rng = np.random.default_rng(seed)
    any_called = any_alone = 0
    for _ in range(pairs):
        sides = [metrics_of_a_side(simulation, shared, rng, is_candidate) for is_candidate in (False, True)]
        contrasts: list[Contrast] = [contrast(*both) for both in zip(*sides, strict=True)]
        p_values = [1.0 if one.withheld else one.p_with_drift for one in contrasts]
        any_called += min(holm(p_values, FAMILY_SHARES)) <= ALPHA
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
    choose(__doc__, {"pairs": pairs, "family": families})
