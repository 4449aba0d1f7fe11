"""How often the comparison sees a difference that is not there, and one that is.

Simulated pairs of runs with the seeds fixed: steps of 40 ms, noise that all ranks share and noise of each
rank (simulated_runs.py has the cells).

python benchmarks/false_alarms.py [--pairs N] [--only TEXT] [--output FILE.json] [--markdown FILE.md]
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from simulated_runs import GROUPS, STEP_MS, Simulation

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

SHARES = [0.5, *[0.5 / 11] * 11]
"""As in a report: half of the rate of false alarms is for the step time."""
PLANTED_SHARE = 0.03
"""Of the step time: the difference whose power is given for every cell."""


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
        "| cell | called | 95 % of it | cannot tell | detectable | seen of that | 3 % seen | cannot tell |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group, simulations in GROUPS.items():
        print(
            f"{group:46} {'seen':>7} {'95 % of it':>13} {'of 12':>6} {'untold':>6}"
            f" {'smallest':>11} {'power':>6} {'3 %':>6} {'untold':>7}"
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
    untold = 100 * outcome.not_told / outcome.pairs
    three_untold = 100 * outcome.three_percent_not_told / outcome.pairs
    return (
        f"{outcome.simulation.name:46} {seen:5.1f} % {100 * low:5.1f} to {100 * high:4.1f} {of_twelve:6.1f}"
        f" {untold:6.1f}"
        f" {outcome.detectable_percent:9.2f} % {power:5.0f} % {three:5.0f} % {three_untold:6.0f}"
    )


def row_of(outcome: Outcome) -> str:
    low, high = outcome.interval
    seen, untold, power, three, three_untold = (
        100 * rate / outcome.pairs
        for rate in (outcome.seen, outcome.not_told, outcome.seen_detectable, outcome.seen_three_percent,
                     outcome.three_percent_not_told)
    )  # fmt: skip
    return (
        f"| {outcome.simulation.name} | {seen:.1f} % | {100 * low:.1f} to {100 * high:.1f} | {untold:.1f} % |"
        f" {outcome.detectable_percent:.2f} % | {power:.0f} % | {three:.0f} % | {three_untold:.0f} % |"
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


if __name__ == "__main__":
    main()
