"""Does `aorta why` name a cause where there is none, and does it tell a loss that is not in every step?

    python benchmarks/plants/made.py --runs 40 --output made.csv

Records are made: two ranks that work 30 ms with noise of a known shape and meet in an all_reduce of 2 ms.
Clean runs have nothing else; planted ones lose a fifth of the mean step, with a period or at random.
"""

import importlib
import math
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

from aorta.account.judge.judged import judge  # noqa: E402
from aorta.account.load.open import load_run  # noqa: E402
from aorta.records.schema import HostUse  # noqa: E402
from aorta.why.causes.rank import found_causes  # noqa: E402

RECORDS: Any = importlib.import_module("tests.why.causes.runs")
"""The module that the tests make records with."""


WORK_MS, COMM_MS, NUM_STEPS = 30.0, 2.0, 42
PART = 0.2
"""Part of the mean step that is lost."""

Needs = Callable[[random.Random, int], list[tuple[float, float]]]
"""Gives each rank's ms of work in a step, and the ms that others take of its core."""


def _alone(work: Callable[[random.Random], float]) -> Needs:
    return lambda chance, step: [(work(chance), 0.0) for _ in range(2)]


def _walk(chance: random.Random, step: int, state: dict[str, float]) -> list[tuple[float, float]]:
    state["level"] = 0.0 if step == 0 else 0.9 * state["level"] + chance.gauss(0, 0.1)
    return [(WORK_MS * (1 + max(state["level"], 0)), 0.0), (WORK_MS * chance.gauss(1, 0.02), 0.0)]


def _taken(chance: random.Random, step: int) -> list[tuple[float, float]]:
    return [(WORK_MS * chance.gauss(1, 0.03), chance.uniform(0, 60)) for _ in range(2)]


def _busy_for_a_while(chance: random.Random, step: int) -> list[tuple[float, float]]:
    taken = chance.uniform(20, 40) if 10 <= step < 20 else 0.0
    return [(WORK_MS * chance.gauss(1, 0.03), taken), (WORK_MS * chance.gauss(1, 0.03), 0.0)]


CLEAN: dict[str, Needs] = {
    "normal, 5 %": _alone(lambda chance: WORK_MS * chance.gauss(1, 0.05)),
    "normal, 20 %": _alone(lambda chance: WORK_MS * max(chance.gauss(1, 0.2), 0.2)),
    "lognormal, 0.5": _alone(lambda chance: WORK_MS * chance.lognormvariate(0, 0.5)),
    "lognormal, 1": _alone(lambda chance: WORK_MS * chance.lognormvariate(0, 1)),
    "one step in ten has a tail": _alone(
        lambda chance: (
            WORK_MS * chance.gauss(1, 0.03) + (chance.expovariate(1 / 60) if chance.random() < 0.1 else 0)
        )
    ),
    "a level that wanders on rank 0": lambda chance, step, state={}: _walk(chance, step, state),  # type: ignore[misc]
    "a core that is 15 % slower": lambda chance, step: [
        (WORK_MS * chance.gauss(1.15, 0.03), 0.0), (WORK_MS * chance.gauss(1, 0.03), 0.0)
    ],
    "others take up to 60 ms of either core": _taken,
    "others take the core of rank 0 for a while": _busy_for_a_while,
}  # fmt: skip

NOISE = ("normal, 5 %", "normal, 20 %", "lognormal, 0.5", "others take up to 60 ms of either core")
OFTEN = (2, 3, 5, 10, None)
"""Period; None: one step in five, at random."""


def planted(period: int | None, noise: str, is_of_all: bool, slow_steps: list[int]) -> tuple[Needs, float]:
    """The ranks' needs, and the ms that a slow step takes longer. slow_steps are those of the last run."""
    taken_ms = 30.0 if "others" in noise else 0.0
    usual_ms = WORK_MS + COMM_MS + taken_ms
    each_ms = (period or 5) * usual_ms * PART / (1 - PART)

    def needs(chance: random.Random, step: int) -> list[tuple[float, float]]:
        rows = CLEAN[noise](chance, step)
        if step == 0:
            slow_steps.clear()
        is_slow = chance.random() < 0.2 if period is None else step % period == 1
        if not is_slow:
            return rows
        slow_steps.append(step)
        return [
            (work + (each_ms if is_of_all or rank == 1 else 0.0), taken)
            for rank, (work, taken) in enumerate(rows)
        ]

    return needs, each_ms


def named(needs: Needs, seed: int) -> list[dict[str, Any]]:
    """The causes of one run."""
    lengths: list[list[tuple[float, float]]] = []

    def make(rank: int, step: int, chance: random.Random) -> Any:
        if rank == 0:
            lengths.append(needs(chance, step))
        totals = [work + taken for work, taken in lengths[step]]
        host = RECORDS.Host().work(totals[rank]).comm(COMM_MS + max(totals) - totals[rank])
        return host, {"host_use": HostUse(*lengths[step][rank])}

    with tempfile.TemporaryDirectory() as folder:
        run = RECORDS.run_of(Path(folder) / "run", make, steps=NUM_STEPS, seed=seed)
        judged = judge(load_run(run, "run"), 1)
        rows = [
            {"kind": cause.kind, "subject": cause.subject, "ms": cause.ms, "interval_ms": cause.interval_ms}
            for cause in found_causes(judged).listed
        ]
    return rows


def clean_row(noise: str, num_runs: int) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for seed in range(num_runs):
        rows = named(CLEAN[noise], seed)
        for kind in {row["kind"] for row in rows} or {"none"}:
            kinds[kind] = kinds.get(kind, 0) + 1
    return {"noise": noise, "runs": num_runs, "named": kinds}


def planted_row(period: int | None, noise: str, is_of_all: bool, num_runs: int) -> dict[str, Any]:
    """ratio: ms that were named over those by which the mean step is longer than without the loss."""
    slow_steps: list[int] = []
    needs, each_ms = planted(period, noise, is_of_all, slow_steps)
    kind, num_right, num_within, ratios = "pause" if is_of_all else "late_rank", 0, 0, []
    for seed in range(num_runs):
        rows = named(needs, seed)
        if not rows or rows[0]["kind"] != kind or (not is_of_all and "rank 1" not in rows[0]["subject"]):
            continue
        num_right += 1
        true_ms = each_ms * sum(step > 0 for step in slow_steps) / (NUM_STEPS - 1)
        ratios.append(rows[0]["ms"] / true_ms)
        low, high = rows[0]["interval_ms"] or (math.nan, math.nan)
        num_within += low <= true_ms <= high
    return {
        "noise": noise, "period": period, "of": "all ranks" if is_of_all else "rank 1", "runs": num_runs,
        "first_and_right": num_right, "interval_holds": num_within,
        "median_ratio": sorted(ratios)[len(ratios) // 2] if ratios else None,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=40, help="of each row")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for noise in CLEAN:
        rows.append(clean_row(noise, options.runs))
        print(f"{noise:45s} {rows[-1]['named']}", flush=True)
    for is_of_all in (False, True):
        for noise in NOISE:
            for period in OFTEN:
                rows.append(planted_row(period, noise, is_of_all, options.runs))
                print(" ".join(f"{value!s:>14}" for value in rows[-1].values()), flush=True)
                write(options.output, rows)
    write(options.output, rows)


if __name__ == "__main__":
    main()
