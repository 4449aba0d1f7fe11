"""How often the comparison sees a difference that is not there, and one that is.

Simulated pairs of runs with the seeds fixed: steps of 40 ms, noise that all ranks share and noise of each
rank. Cells are in three groups: what the method was made with, what it was made with because blocks of steps
break there (two states, drifts, settling), and cells that were written down before the first of them was run.

python benchmarks/false_alarms.py [--pairs N] [--only TEXT] [--output FILE.json] [--markdown FILE.md]
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.statistics import (
    ALPHA,
    POWER,
    Contrast,
    Estimate,
    contrast,
    estimate,
    holm,
    warmup_steps,
)

Floats = NDArray[np.float64]

STEP_MS = 40.0
SHARES = [0.5, *[0.5 / 11] * 11]
"""As in a report: half of the rate of false alarms is for the step time."""
PLANTED_SHARE = 0.03
"""Of the step time: the difference whose power is given for every cell."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Times over the step time, unless said otherwise."""

    name: str
    num_steps: int = 50
    candidate_steps: int | None = None
    """None: as many."""
    num_ranks: int = 4
    persistence: float = 0.0
    """Correlation of neighbouring steps in the noise that ranks share."""
    noise: float = 0.02
    """Standard deviation of the shared noise."""
    white: float = 0.0
    """Of shared noise beside it that is independent from step to step."""
    own_noise: float = 0.005
    """Of each rank's own noise, independent from step to step."""
    slow_share: float = 0.0
    """Share of steps that take 1.5 times as long."""
    shape: Literal["normal", "skewed", "t2", "pareto"] = "normal"
    """Of the shared noise."""
    gap: float = 0.0
    """Between two states of the clock."""
    dwell: float = 10.0
    """Mean number of steps in the slow state."""
    slow_state: float = 0.5
    """Share of steps in it."""
    walk: float = 0.0
    """Standard deviation of the steps of a random walk."""
    slope: float = 0.0
    """Standard deviation, between runs, of a linear change over the run."""
    settling: float = 0.0
    """Of the first step, decaying to nothing (or, below 0, rising from it)."""
    settling_steps: float = 30.0
    wave: float = 0.0
    """Amplitude of one slow wave of random phase and 0.7 to 3 periods."""
    warmup: bool = False
    """Leave leading steps out by the report's rule."""
    slowdown: float = 0.0
    """Planted in the candidate."""
    runs_per_side: int = 1
    run_noise: float = 0.0
    """Standard deviation between runs."""

    def run(self, rng: np.random.Generator, slowdown: float = 0.0, num_steps: int | None = None) -> Floats:
        """Step times [rank, step]."""
        num = num_steps or self.num_steps
        own = self.own_noise * rng.standard_normal((self.num_ranks, num))
        level = 1 + slowdown + self.run_noise * rng.standard_normal()
        return STEP_MS * level * (1 + self._shared(rng, num) + own)

    def _shared(self, rng: np.random.Generator, num: int) -> Floats:
        scores = autoregressive(rng, num, self.persistence)
        match self.shape:
            case "skewed":
                scores = np.expm1(0.6 * scores)
            case "t2":
                scores = rng.standard_t(2, num)
            case "pareto":
                scores = rng.pareto(1.5, num)
        shared = self.noise * scores + 0.5 * (rng.random(num) < self.slow_share)
        shared += self.white * rng.standard_normal(num)
        shared += self.walk * np.cumsum(rng.standard_normal(num))
        shared += self.slope * rng.standard_normal() * np.linspace(0, 1, num)
        shared += self.settling * np.exp(-np.arange(num) / self.settling_steps)
        if self.gap:
            shared += self.gap * telegraph(rng, num, self.dwell, self.slow_state)
        if self.wave:
            periods, phase = rng.uniform(0.7, 3), rng.uniform(0, 2 * math.pi)
            shared += self.wave * np.sin(2 * math.pi * periods * np.linspace(0, 1, num) + phase)
        return shared


def _states(name: str, dwell: float, num_steps: int, **more: Any) -> Simulation:
    more = {"gap": 0.03, "noise": 0.004} | more
    return Simulation(name=name, dwell=dwell, num_steps=num_steps, **more)


NO_DIFFERENCE = [
    Simulation(name="independent steps"),
    Simulation(name="correlated 0.3", persistence=0.3),
    Simulation(name="correlated 0.6", persistence=0.6),
    Simulation(name="correlated 0.8", persistence=0.8),
    Simulation(name="correlated 0.9", persistence=0.9),
    Simulation(name="correlated 0.6, 20 steps", persistence=0.6, num_steps=20),
    Simulation(name="correlated 0.8, 20 steps", persistence=0.8, num_steps=20),
    Simulation(name="correlated 0.8, 30 steps", persistence=0.8, num_steps=30),
    Simulation(name="correlated 0.8, 100 steps", persistence=0.8, num_steps=100),
    Simulation(name="correlated 0.6, 200 steps", persistence=0.6, num_steps=200),
    Simulation(name="correlated 0.8, 200 steps", persistence=0.8, num_steps=200),
    Simulation(name="correlated 0.6, skewed", persistence=0.6, shape="skewed"),
    Simulation(name="correlated 0.6, 1 in 20 slow", persistence=0.6, slow_share=0.05),
    Simulation(name="correlated 0.6, ranks noisier than steps", persistence=0.6, own_noise=0.04),
    Simulation(name="1 rank, correlated 0.6", persistence=0.6, num_ranks=1),
    Simulation(name="3 runs a side that differ by 1 %", persistence=0.6, runs_per_side=3, run_noise=0.01),
    Simulation(name="2 runs a side that differ by 1 %", persistence=0.6, runs_per_side=2, run_noise=0.01),
]
BLOCKS_BREAK = [
    Simulation(name="slow 0.9 and white noise, 100 steps", persistence=0.9, noise=0.015, white=0.015,
               num_steps=100),
    Simulation(name="slow 0.9 and white noise, 300 steps", persistence=0.9, noise=0.015, white=0.015,
               num_steps=300),
    Simulation(name="slow 0.9 and white noise, 50 steps", persistence=0.9, noise=0.015, white=0.015),
    _states("two states, 5 steps each, 50 steps", 5, 50),
    _states("two states, 15 steps each, 100 steps", 15, 100),
    _states("two states, 40 steps each, 300 steps", 40, 300),
    _states("two states, 1 in 5 slow, 200 steps", 15, 200, slow_state=0.2),
    Simulation(name="random walk, 50 steps", walk=0.003, noise=0.0),
    Simulation(name="random walk, 200 steps", walk=0.003, noise=0.0, num_steps=200),
    Simulation(name="random walk and white noise, 50 steps", walk=0.003, noise=0.01),
    Simulation(name="random walk and white noise, 200 steps", walk=0.001, noise=0.01, num_steps=200),
    Simulation(name="correlated 0.95", persistence=0.95),
    Simulation(name="linear drift, 2 % between runs, 50 steps", slope=0.02, noise=0.01),
    Simulation(name="linear drift, 2 % between runs, 200 steps", slope=0.02, noise=0.01, num_steps=200),
    Simulation(name="40 and 300 steps, 3 % settling over 30", settling=0.03, noise=0.01, num_steps=40,
               candidate_steps=300, warmup=True),
    Simulation(name="40 and 300 steps, nothing settling", num_steps=40, candidate_steps=300, warmup=True),
]  # fmt: skip
KEPT_BACK = [
    _states("regimes of 2 %, 8 steps each, 80 steps", 8, 80, gap=0.02, noise=0.005),
    _states("regimes of 6 %, 25 steps each, 150 steps", 25, 150, gap=0.06, noise=0.01),
    _states("rare regime, 1 in 10, 250 steps", 12, 250, slow_state=0.1, gap=0.08, noise=0.01),
    _states("regimes and memory 0.7, 120 steps", 12, 120, gap=0.04, noise=0.006, persistence=0.7),
    Simulation(name="slow wave of 1 %, 100 steps", wave=0.01, noise=0.01, num_steps=100),
    Simulation(name="slow wave of 2 %, 60 steps", wave=0.02, noise=0.005, num_steps=60),
    Simulation(name="walk within memory 0.5, 150 steps", walk=0.002, noise=0.01, persistence=0.5,
               num_steps=150),
    Simulation(name="tails of t with 2 degrees", shape="t2", noise=0.01),
    Simulation(name="Pareto tails, 80 steps", shape="pareto", noise=0.02, num_steps=80),
    Simulation(name="thermal ramp of 4 % over 40 in both, 120 steps", settling=-0.04, settling_steps=40,
               noise=0.008, num_steps=120, warmup=True),
    Simulation(name="thermal ramp, 60 and 240 steps", settling=-0.04, settling_steps=40, noise=0.008,
               num_steps=60, candidate_steps=240, warmup=True),
    Simulation(name="settling, 30 and 100 steps", settling=0.05, settling_steps=20, noise=0.01, num_steps=30,
               candidate_steps=100, warmup=True),
    Simulation(name="memory 0.7, 60 and 400 steps", persistence=0.7, num_steps=60, candidate_steps=400),
    Simulation(name="shared noise of 4 ranks, 0.5", persistence=0.5, num_ranks=4, own_noise=0.01),
    Simulation(name="shared noise of 64 ranks, 0.5", persistence=0.5, num_ranks=64, own_noise=0.01),
    Simulation(name="shared noise of 512 ranks, 0.5", persistence=0.5, num_ranks=512, own_noise=0.01),
    Simulation(name="4 runs a side that differ by 0.5 %, memory 0.4", persistence=0.4, runs_per_side=4,
               run_noise=0.005),
    Simulation(name="3 runs a side in two states, 100 steps", gap=0.03, dwell=15, noise=0.004, num_steps=100,
               runs_per_side=3),
]  # fmt: skip
PLANTED = [
    Simulation(name="3 % slower", slowdown=0.03),
    Simulation(name="3 % slower, correlated 0.3", slowdown=0.03, persistence=0.3),
    Simulation(name="3 % slower, correlated 0.6", slowdown=0.03, persistence=0.6),
    Simulation(name="0.3 % slower, below what can be seen", slowdown=0.003),
    Simulation(name="3 % slower, 3 runs a side", slowdown=0.03, runs_per_side=3, run_noise=0.002),
]
ABOUT_TWO_RUNS = [
    Simulation(name="one run a side that differ by 0.5 %", persistence=0.3, run_noise=0.005),
    Simulation(name="one run a side that differ by 1 %", persistence=0.3, run_noise=0.01),
]
"""The runs do differ: what is called is right of these two runs, which is what the headline says, and would
be wrong of the jobs that they come from."""
GROUPS = {
    "no_difference": NO_DIFFERENCE,
    "blocks_break": BLOCKS_BREAK,
    "kept_back": KEPT_BACK,
    "planted": PLANTED,
    "about_two_runs": ABOUT_TWO_RUNS,
}


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

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the share seen, Wilson's."""
        return wilson(self.seen, self.pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--markdown", type=Path, help="the table of docs/validation.md")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    args = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {"pairs": args.pairs, "alpha": ALPHA, "power": POWER}
    lines = [
        "| cell | called | 95 % of it | detectable | seen of that | 3 % seen |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for group, simulations in GROUPS.items():
        print(
            f"{group:46} {'seen':>7} {'95 % of it':>13} {'of 12':>6} {'smallest':>11} {'power':>6} {'3 %':>6}"
        )
        rows = []
        for simulation in simulations:
            if args.only not in simulation.name:
                continue
            outcome = simulate(simulation, args.pairs)
            rows.append(asdict(outcome) | {"interval": outcome.interval})
            print(line_of(outcome), flush=True)
            lines.append(row_of(outcome))
        result[group] = rows
    result["seconds"] = time.perf_counter() - start
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {args.output}")
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def line_of(outcome: Outcome) -> str:
    low, high = outcome.interval
    rates = [outcome.seen, outcome.seen_of_twelve, outcome.seen_detectable, outcome.seen_three_percent]
    seen, of_twelve, power, three = (100 * rate / outcome.pairs for rate in rates)
    return (
        f"{outcome.simulation.name:46} {seen:5.1f} % {100 * low:5.1f} to {100 * high:4.1f} {of_twelve:6.1f}"
        f" {outcome.detectable_percent:9.2f} % {power:5.0f} % {three:5.0f} %"
    )


def row_of(outcome: Outcome) -> str:
    low, high = outcome.interval
    seen, power, three = (
        100 * rate / outcome.pairs
        for rate in (outcome.seen, outcome.seen_detectable, outcome.seen_three_percent)
    )
    return (
        f"| {outcome.simulation.name} | {seen:.1f} % | {100 * low:.1f} to {100 * high:.1f} |"
        f" {outcome.detectable_percent:.1f} % | {power:.0f} % | {three:.0f} % |"
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
        of_twelve += not one.withheld and holm([one.p_value, *others], SHARES)[0] <= ALPHA
        low, high = one.ratio_interval or (-math.inf, math.inf)
        covered += low <= 1 + simulation.slowdown <= high
        withheld += bool(one.withheld)
    detectable = float(np.median([one.detectable() for one in found]))
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
        seen_three_percent=sum(is_called(contrast(r, _slower(c, PLANTED_SHARE * STEP_MS))) for r, c in sides),
    )


def is_called(found: Contrast) -> bool:
    return not found.withheld and found.p_value <= ALPHA


def _side(simulation: Simulation, rng: np.random.Generator, number: int) -> list[Estimate]:
    """Number 0 is the reference, 1 the candidate."""
    slowdown, num_steps = (simulation.slowdown, simulation.candidate_steps) if number else (0.0, None)
    runs = []
    for _ in range(simulation.runs_per_side):
        values = simulation.run(rng, slowdown, num_steps)
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


def autoregressive(rng: np.random.Generator, num: int, persistence: float) -> Floats:
    """A stationary series of unit variance."""
    fresh = rng.standard_normal(num)
    series = np.empty(num)
    series[0] = fresh[0]
    scale = math.sqrt(1 - persistence**2)
    for i in range(1, num):
        series[i] = persistence * series[i - 1] + scale * fresh[i]
    return series


def telegraph(rng: np.random.Generator, num: int, dwell: float, share: float) -> Floats:
    """0 and 1, stationary: 1 in that share of the steps, for dwell steps at a time on average."""
    leave = 1 / dwell
    enter = leave * share / (1 - share)
    is_slow, series = rng.random() < share, np.empty(num)
    for i in range(num):
        series[i] = is_slow
        is_slow = rng.random() >= leave if is_slow else rng.random() < enter
    return series


if __name__ == "__main__":
    main()
