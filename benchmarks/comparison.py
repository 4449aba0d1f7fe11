"""Does the comparison see a difference that is not there, and one that is? Simulated; no GPU.

    python benchmarks/comparison.py --pairs 2000 --output comparison.csv       4 minutes; --only TEXT: some
    cells

Pairs of runs with the seeds fixed (simulated_runs.py has the cells). Of each cell: how often a pair without a
difference is called slower or faster (false alarms) or the same; how often one with 3 % planted is called
slower, and how often it is called the same within 3 %, which is wrong.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import arguments, write
from simulated_runs import GROUPS, Floats, Runs, Simulation, autoregressive

from aorta.account.judge.pairing import differ
from aorta.timeline.ratio import Decision, LogRatio, Spread, decided, log_ratio, taken_columns, work_columns
from aorta.timeline.statistics import ALPHA, MIN_STEPS, warmup_steps

MATTERS = 0.03
PLANTED = (0.03, 0.05)
CHUNK = 500
"""Pairs that are simulated at once."""


@dataclass(frozen=True)
class Rates:
    """Counts of pairs."""

    pairs: int
    false_alarms: int
    same: int
    found: tuple[int, ...]
    """Of PLANTED, called slower."""
    wrongly_same: int
    """Of the first PLANTED, called the same."""
    half_width_percent: float
    """Median half width of the interval."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--group", default="", choices=["", *GROUPS])
    parser.add_argument("--run-spread", type=float, help="what runs differ by, known: 0.005 is 0.5 %%")
    parser.add_argument("--states", action="store_true", help="steps in some state alone, instead of cells")
    options = parser.parse_args()
    if options.states:
        states(options.pairs)
        sizes(options.pairs)
        return
    rows: list[dict[str, Any]] = []
    for group, simulations in GROUPS.items():
        if options.group not in ("", group):
            continue
        print(
            f"{group:60} {'false':>6} {'95 % of it':>12} {'same':>6} {'3 %':>6} {'5 %':>6} {'wrong':>6} half"
        )
        for simulation in simulations:
            if options.only not in simulation.name:
                continue
            spread = None if options.run_spread is None else Spread(options.run_spread, 20)
            found = rates(simulation, options.pairs, spread=spread)
            low, high = wilson(found.false_alarms, found.pairs)
            rows.append(
                {
                    "group": group,
                    "cell": simulation.name,
                    "paired": simulation.is_paired,
                    "pairs": found.pairs,
                    "false_alarms": found.false_alarms,
                    "low_percent": round(100 * low, 2),
                    "high_percent": round(100 * high, 2),
                    "same": found.same,
                    "found_3_percent": found.found[0],
                    "found_5_percent": found.found[1],
                    "wrongly_same": found.wrongly_same,
                    "half_width_percent": round(found.half_width_percent, 2),
                }
            )
            print(line_of(simulation.name, found), flush=True)
            write(options.output, rows)


def states(pairs: int) -> None:
    """100 quiet steps; every 10th saves a checkpoint and every 7th collects garbage (30 % longer), at places
    of each side's own. With all steps, and without those in which one side alone did (judge/pairing.py)."""
    number = np.arange(100)
    for cost in (0.3, 1.5, 6.0):
        for is_left_out in (False, True):
            rng = np.random.default_rng(0)
            called, found = 0, 0
            for _ in range(pairs):
                sides, does = [], []
                for _ in range(2):
                    saves = number % 10 == rng.integers(10)
                    collects = number % 7 == rng.integers(7)
                    noise = 1 + 0.01 * rng.standard_normal(100)
                    sides.append(np.log(noise * (1 + cost * saves + 0.3 * collects)))
                    does.append(saves + 2 * collects)
                chosen = does[0] == does[1] if is_left_out else np.ones(100, dtype=bool)
                reference, candidate = (side[None, None, chosen] for side in sides)
                ratio = log_ratio(reference, candidate)
                half = ratio.error.width(ALPHA)
                called += _is_called(decided(ratio.value, half, MATTERS)[0])
                found += _is_called(decided(ratio.value + math.log1p(PLANTED[0]), half, MATTERS)[0])
            which = "left out" if is_left_out else "all steps"
            print(
                f"checkpoint + {100 * cost:.0f} %, {which}: false alarms {100 * called / pairs:.1f} %,"
                f" 3 % found {100 * found / pairs:.1f} %",
                flush=True,
            )


def sizes(pairs: int) -> None:
    """150 steps of three sizes in turn, with a memory of 0.5: how often the sizes are said to differ where
    none changed, where all did, and where the largest alone did (judge/states.py)."""
    for changes in ((0.0, 0.0, 0.0), (0.05, 0.05, 0.05), (0.0, 0.0, 0.05), (0.0, 0.0, 0.1)):
        for noise in (0.01, 0.03):
            rng = np.random.default_rng(0)
            told = 0
            for _ in range(pairs):
                runs = np.log1p(noise * autoregressive(rng, 2, 150, 0.5) + 0.01 * rng.standard_normal((2, 1)))
                runs[1] += np.log1p(np.tile(changes, 50))
                told += differ([log_ratio(*runs[:, None, i::3]) for i in range(3)], MATTERS)
            percents = ", ".join(f"{100 * change:.0f}" for change in changes)
            print(f"+{percents} %, noise {100 * noise:.0f} %: told {100 * told / pairs:.1f} %", flush=True)


def line_of(name: str, found: Rates) -> str:
    low, high = wilson(found.false_alarms, found.pairs)
    shares = [
        100 * count / found.pairs
        for count in (found.false_alarms, found.same, found.found[0], found.found[1], found.wrongly_same)
    ]
    alarms, same, three, five, wrong = shares
    return (
        f"{name:60} {alarms:6.1f} {100 * low:5.1f} to {100 * high:4.1f} {same:6.1f} {three:6.1f} {five:6.1f}"
        f" {wrong:6.1f} {found.half_width_percent:6.2f}"
    )


def rates(simulation: Simulation, pairs: int, seed: int = 1, spread: Spread | None = None) -> Rates:
    rng = np.random.default_rng(seed)
    alarms = same = wrongly_same = 0
    found = [0] * len(PLANTED)
    widths: list[float] = []
    for start in range(0, pairs, CHUNK):
        num = min(CHUNK, pairs - start)
        reference, candidate = simulation.pairs(rng, num)
        for ratio in _ratios(simulation, reference, candidate, spread):
            half = ratio.error.width(ALPHA)
            called = decided(ratio.value, half, MATTERS)
            alarms += sum(map(_is_called, called))
            same += called.count("same")
            widths += np.ravel(half).tolist()
            for i, planted in enumerate(PLANTED):
                slower = decided(ratio.value + math.log1p(planted), half, MATTERS)
                found[i] += sum(map(_is_called, slower))
                wrongly_same += slower.count("same") if i == 0 else 0
    middle = 100 * float(np.median(widths)) if widths else math.inf
    return Rates(pairs, alarms, same, tuple(found), wrongly_same, middle)


def _is_called(one: Decision) -> bool:
    return one in ("higher", "lower")


def _ratios(
    simulation: Simulation, reference: Runs, candidate: Runs, spread: Spread | None
) -> list[LogRatio]:
    """Of all pairs at once; one by one where leading steps are left out by a rule."""
    num = min(reference.step_ms.shape[-1], candidate.step_ms.shape[-1])
    r, c = (np.log(np.median(side.step_ms, axis=2))[..., :num] for side in (reference, candidate))
    of_r, of_c = _known(reference, num), _known(candidate, num)
    if not simulation.warmup:
        return [log_ratio(r, c, of_r, of_c, spread)]
    ratios = []
    for i in range(len(r)):
        runs = (*reference.step_ms[i], *candidate.step_ms[i])
        first = max(warmup_steps(run) for run in runs)
        if num - first >= MIN_STEPS:
            ratios.append(log_ratio(r[i : i + 1, :, first:], c[i : i + 1, :, first:]))
    return ratios


def _known(side: Runs, num: int) -> Floats | None:
    columns = []
    if np.isfinite(side.tokens).all():
        columns.append(work_columns(side.tokens[..., :num]))
    if np.isfinite(side.taken).all():
        columns.append(taken_columns(side.taken[..., :num]))
    return np.concatenate(columns, axis=-1) if columns else None


def wilson(count: int, of: int) -> tuple[float, float]:
    """Source: Wilson, Journal of the American Statistical Association 22 (1927)."""
    z, rate = 1.959964, count / of
    middle = (rate + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    return max(middle - half, 0.0), min(middle + half, 1.0)


if __name__ == "__main__":
    main()
