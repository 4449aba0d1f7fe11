"""Ranks and steps that are shown span by span: those asked for, or of a large run those that tell most."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.ranks import rank_rows
from aorta.account.model import Run
from aorta.errors import ReportError

MAX_RANKS = 16
NUM_LATE = 4
"""Ranks that cost the others most are among them."""
MOST_RECORDS = 50_000
"""Steps of all ranks that a Perfetto trace holds unless more are asked for: a gigabyte of JSON at most."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What was asked for; None of what was not."""

    ranks: Collection[int] | None = None
    steps: tuple[int, int] | None = None
    """The first and the last global step."""

    def check(self, run: Run) -> None:
        """ReportError where the run has none of these steps, or lacks a rank."""
        missing = sorted(set(self.ranks or ()) - set(run.ranks))
        if missing:
            raise ReportError(f"--ranks: {run.label} has ranks {_ends(run.ranks)}, and no rank {missing[0]}")
        if not self.columns(run).any():
            first, last = self.steps or (0, 0)
            steps = [int(run.global_step[0]), int(run.global_step[-1])]
            raise ReportError(f"--steps: {run.label} has steps {_ends(steps)}, none from {first} to {last}")

    def columns(self, run: Run) -> NDArray[np.bool_]:
        """[step]: it was asked for, or nothing was."""
        if self.steps is None:
            return np.ones(run.num_steps, dtype=bool)
        return (run.global_step >= self.steps[0]) & (run.global_step <= self.steps[1])


def telling_ranks(run: Run, shown: Shown) -> list[int]:
    """Those asked for. Else all of few; of many the latest ones, and others spread evenly from the
    least to the most exposed."""
    if shown.ranks is not None:
        return sorted(shown.ranks)
    if len(run.ranks) <= MAX_RANKS:
        return list(run.ranks)
    late = [row.rank for row in rank_rows(run)[:NUM_LATE]]
    exposed_ms = np.nan_to_num(run.values("exposed_ms")).mean(axis=1)
    order = [i for i in np.argsort(exposed_ms, kind="stable").tolist() if run.ranks[i] not in late]
    places: NDArray[np.int64] = np.linspace(0, len(order) - 1, MAX_RANKS - len(late)).round().astype(np.int64)
    return sorted([*late, *(run.ranks[order[i]] for i in places.tolist())])


def traced(run: Run, shown: Shown) -> tuple[list[int], set[int] | None, str]:
    """Ranks and global steps of a Perfetto trace, and what it leaves out in words; None and '' of nothing.

    What was asked for is there whole. Of the rest, where there are more than MOST_RECORDS steps of all ranks,
    the telling ranks, and of those the steps in which the slowest rank took longest.
    """
    columns = np.flatnonzero(shown.columns(run))
    ranks = list(run.ranks) if shown.ranks is None else sorted(shown.ranks)
    if shown.ranks is None and len(ranks) * len(columns) > MOST_RECORDS:
        ranks = telling_ranks(run, shown)
    num_steps = max(MOST_RECORDS // len(ranks), 1)
    is_cut = shown.steps is None and num_steps < len(columns)
    if is_cut:
        step_ms = np.nan_to_num(run.metrics["step_ms"]).max(axis=0)
        columns = np.argsort(-step_ms, kind="stable")[:num_steps]
    steps = None if shown.steps is None and not is_cut else set(run.global_step[columns].tolist())
    parts = []
    if len(ranks) < len(run.ranks):
        parts.append(f"{len(ranks)} of {len(run.ranks)} ranks")
    if steps is not None and len(steps) < run.num_steps:
        parts.append(f"{len(steps)} of {run.num_steps} steps{', the slowest ones' if is_cut else ''}")
    return ranks, steps, " and ".join(parts)


def _ends(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
