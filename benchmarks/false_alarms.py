"""How often the comparison sees a difference that is not there, and one that is.

Simulated pairs of runs with the seeds fixed: steps of 40 ms, noise that all ranks share and that
neighbouring steps share (an autoregressive process), noise of each rank, rare slow steps.

python benchmarks/false_alarms.py [--pairs N] [--output FILE.json]
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.statistics import ALPHA, POWER, contrast, estimate, holm

Floats = NDArray[np.float64]

STEP_MS = 40.0
SHARES = [0.5, *[0.5 / 11] * 11]
"""As in a report: half of the rate of false alarms is for the step time."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    name: str
    num_steps: int = 50
    num_ranks: int = 8
    persistence: float = 0.0
    """Correlation of neighbouring steps in the noise that ranks share."""
    noise: float = 0.02
    """Standard deviation of the shared noise over the step time."""
    own_noise: float = 0.005
    """Of each rank's own noise, independent from step to step."""
    slow_share: float = 0.0
    """Share of steps that take 1.5 times as long."""
    skewed: bool = False
    slowdown: float = 0.0
    """Planted in the candidate."""
    runs_per_side: int = 1
    run_noise: float = 0.0
    """Standard deviation between runs over the step time."""

    def run(self, rng: np.random.Generator, slowdown: float = 0.0) -> Floats:
        """Step times [rank, step]."""
        shared = self.noise * autoregressive(rng, self.num_steps, self.persistence)
        if self.skewed:
            shared = np.expm1(shared / self.noise * 0.6) * self.noise
        shared = shared + 0.5 * (rng.random(self.num_steps) < self.slow_share)
        own = self.own_noise * rng.standard_normal((self.num_ranks, self.num_steps))
        return STEP_MS * (1 + slowdown + self.run_noise * rng.standard_normal()) * (1 + shared + own)


NO_DIFFERENCE = [
    Simulation(name="independent steps"),
    Simulation(name="correlated 0.3", persistence=0.3),
    Simulation(name="correlated 0.6", persistence=0.6),
    Simulation(name="correlated 0.8", persistence=0.8),
    Simulation(name="correlated 0.9", persistence=0.9),
    Simulation(name="correlated 0.6, 20 steps", persistence=0.6, num_steps=20),
    Simulation(name="correlated 0.8, 20 steps", persistence=0.8, num_steps=20),
    Simulation(name="correlated 0.6, 200 steps", persistence=0.6, num_steps=200),
    Simulation(name="correlated 0.8, 200 steps", persistence=0.8, num_steps=200),
    Simulation(name="correlated 0.6, skewed", persistence=0.6, skewed=True),
    Simulation(name="correlated 0.6, 1 in 20 slow", persistence=0.6, slow_share=0.05),
    Simulation(name="correlated 0.6, ranks noisier than steps", persistence=0.6, own_noise=0.04),
    Simulation(name="1 rank, correlated 0.6", persistence=0.6, num_ranks=1),
    Simulation(name="3 runs a side that differ by 1 %", persistence=0.6, runs_per_side=3, run_noise=0.01),
    Simulation(name="2 runs a side that differ by 1 %", persistence=0.6, runs_per_side=2, run_noise=0.01),
]
PLANTED = [
    Simulation(name="3 % slower", slowdown=0.03),
    Simulation(name="3 % slower, correlated 0.3", slowdown=0.03, persistence=0.3),
    Simulation(name="3 % slower, correlated 0.6", slowdown=0.03, persistence=0.6),
    Simulation(name="0.3 % slower, below what can be seen", slowdown=0.003),
    Simulation(name="3 % slower, 3 runs a side", slowdown=0.03, runs_per_side=3, run_noise=0.002),
]
OUT_OF_REACH = [
    Simulation(name="correlated 0.95", persistence=0.95),
    Simulation(name="one run a side that differ by 1 %", persistence=0.6, run_noise=0.01),
]
"""Where the rate does not hold: a drift as long as the run, and runs that differ when each side has one."""


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
    detectable_percent: float
    """Median of the smallest difference that would be seen, over the step time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pairs", type=int, default=2000)
    args = parser.parse_args()
    start = time.perf_counter()
    groups = {"no_difference": NO_DIFFERENCE, "planted": PLANTED, "out_of_reach": OUT_OF_REACH}
    result: dict[str, Any] = {"pairs": args.pairs, "alpha": ALPHA, "power": POWER}
    for group, simulations in groups.items():
        print(f"{group:42} {'seen':>14} {'of 12':>9} {'covered':>8} {'detectable':>11}")
        rows = []
        for simulation in simulations:
            outcome = simulate(simulation, args.pairs)
            rows.append(asdict(outcome))
            rate, error = outcome.seen / args.pairs, standard_error(outcome.seen, args.pairs)
            print(
                f"{simulation.name:42} {100 * rate:6.2f} ± {100 * error:.2f} %"
                f" {100 * outcome.seen_of_twelve / args.pairs:7.2f} %"
                f" {100 * outcome.covered / args.pairs:6.1f} % {outcome.detectable_percent:9.2f} %",
                flush=True,
            )
        result[group] = rows
    result["seconds"] = time.perf_counter() - start
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {args.output}")


def simulate(simulation: Simulation, pairs: int, seed: int = 0) -> Outcome:
    rng = np.random.default_rng(seed)
    seen = of_twelve = covered = 0
    detectable = []
    for _ in range(pairs):
        sides = [
            [estimate(simulation.run(rng, slowdown)) for _ in range(simulation.runs_per_side)]
            for slowdown in (0.0, simulation.slowdown)
        ]
        reference, candidate = ([one for one in side if one is not None] for side in sides)
        found = contrast(reference, candidate)
        seen += found.p_value <= ALPHA
        others = rng.random(11).tolist()
        of_twelve += holm([found.p_value, *others], SHARES)[0] <= ALPHA
        low, high = found.ratio_interval or (-math.inf, math.inf)
        covered += low <= 1 + simulation.slowdown <= high
        detectable.append(100 * found.detectable() / STEP_MS)
    return Outcome(simulation, pairs, seen, of_twelve, covered, float(np.median(detectable)))


def standard_error(count: int, of: int) -> float:
    rate = count / of
    return math.sqrt(max(rate * (1 - rate), 1 / of) / of)


def autoregressive(rng: np.random.Generator, num: int, persistence: float) -> Floats:
    """A stationary series of unit variance."""
    fresh = rng.standard_normal(num)
    series = np.empty(num)
    series[0] = fresh[0]
    scale = math.sqrt(1 - persistence**2)
    for i in range(1, num):
        series[i] = persistence * series[i - 1] + scale * fresh[i]
    return series


if __name__ == "__main__":
    main()
