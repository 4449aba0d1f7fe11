"""The difference of two step times taken apart: which part of the step it comes from."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aorta.account.judge.alike import why_unlike
from aorta.account.judge.cells import CELLS, EXPOSED_CELLS, IDLE_CELLS, Account, account_of
from aorta.account.judge.phases import TITLES, phase_steps, phases_of, variance_of_own_code
from aorta.account.load.rank.phases import PHASES
from aorta.account.model import ConfidenceInterval, Dataset, Decomposition, Part, PhaseChange, StepWork
from aorta.timeline.arrays import Floats
from aorta.timeline.noise import NORMAL_95, error_of_mean
from aorta.timeline.ratio import typical
from aorta.timeline.statistics import MIN_STEPS

ESTIMATOR = (
    "typical step: the reference's median, the candidate's by the ratio that is judged; parts by their shares"
    " of the steps recorded in full"
)
PARTS = ("compute_ms", "exposed_ms", "exposed_wait_ms", "exposed_copy_ms", "idle_ms")


class Change(NamedTuple):
    """The typical step on both sides, of the same work: the ratio that is judged."""

    reference_ms: float
    log_ratio: float
    variance: float | None
    """Of the logarithm; None where there are too few steps."""
    is_net: bool = False
    """The ratio allows for cores that others took, so that they are no part of it."""

    @property
    def step(self) -> Part:
        r, c = self.reference_ms, self.reference_ms * math.exp(self.log_ratio)
        interval = None
        if self.variance is not None:
            half = NORMAL_95 * math.sqrt(self.variance)
            ends = [r * math.expm1(self.log_ratio + side * half) for side in (-1, 1)]
            interval = ConfidenceInterval(*ends)
        return Part("step", r, c, c - r, interval)

    def part(self, name: str, shares: Sequence["Share"]) -> Part:
        """A part that has these shares of the step on both sides."""
        r, c = shares
        scale = math.exp(self.log_ratio)
        before, after = self.reference_ms * r.value, self.reference_ms * scale * c.value
        interval = None
        if self.variance is not None and r.variance is not None and c.variance is not None:
            variance = scale**2 * (c.value**2 * self.variance + c.variance) + r.variance
            half = NORMAL_95 * self.reference_ms * math.sqrt(variance)
            # No part takes less than nothing afterwards.
            interval = ConfidenceInterval(max(after - before - half, -before), after - before + half)
        return Part(name, before, after, after - before, interval)


class Share(NamedTuple):
    """Of a step, with the variance of its error; None where there are too few steps."""

    value: float
    variance: float | None


def decompose(
    reference: Dataset, candidate: Dataset, work: StepWork | None, change: Change
) -> Decomposition | None:
    """Cells of the typical step on both sides, which add up to the change; None where step times or all parts
    are unknown, or do not mean the same on both sides."""
    sides = (reference, candidate)
    if any(why_unlike(name, reference, candidate) for name in ("step_ms", *PARTS)):
        return None
    accounts = [[account_of(judged) for judged in side.runs] for side in sides]
    if not all(account.is_measured for side in accounts for account in side):
        return None
    used = [row.name for side in accounts for account in side for row in account.rows()]
    is_split = "communication" not in used
    knows_host = all(account.knows_host for side in accounts for account in side)
    cells = [[_cells(account, is_split, knows_host) for account in side] for side in accounts]
    if change.is_net:
        taken = float(np.mean([_share([run], "core_taken").value for run in cells[0]]))
        change = change._replace(reference_ms=change.reference_ms * (1 - taken))
        for run in (run for side in cells for run in side):
            run["step"] = run["step"] - run.pop("core_taken", 0.0)
    present = {name for side in cells for run in side for name in run}
    parts = [change.part(name, [_share(side, name) for side in cells]) for name in CELLS if name in present]
    notes = []
    if not is_split and any(part.name == "communication" for part in parts):
        notes.append("exposed is not split into waiting and transfer: ranks were not matched on both sides")
    return Decomposition(
        step=change.step,
        parts=[part for part in parts if part.reference_ms or part.candidate_ms],
        phases=_phases(sides, change),
        estimator=ESTIMATOR,
        notes=notes,
        of_work="" if work is None else f"{candidate.label} for the tokens of a step of {reference.label}",
        is_net=change.is_net,
    )


def _phases(sides: Sequence[Dataset], change: Change) -> list[PhaseChange]:
    """The step by what the host does, with the line in which the candidate, or else the reference, spends
    most of a phase. [] where a side does not show its phases."""
    series = [[phase_steps(judged) for judged in side.runs] for side in sides]
    if not all(run for side in series for run in side):
        return []
    rows = [{row.phase: row for row in phases_of(side.first)} for side in sides]
    of_samples = [sum(map(variance_of_own_code, side.runs)) / len(side.runs) ** 2 for side in sides]
    found = []
    for phase in PHASES:
        if any(phase in side for side in rows):
            shares = [_share(side, phase) for side in series]
            if phase in ("forward", "rest"):
                shares = [*map(_less_sure, shares, of_samples)]
            part = change.part(phase, shares)
            text = next((row.at for side in rows[::-1] if (row := side.get(phase)) and row.at), "")
            found.append(PhaseChange(TITLES[phase], part, text))
    return found


def _less_sure(share: Share, variance: float) -> Share:
    return share if share.variance is None else share._replace(variance=share.variance + variance)


Steps = dict[str, Floats]
"""[step] by cell: means over ranks."""


def _cells(account: Account, is_split: bool, knows_host: bool) -> Steps:
    """The step and each cell. What one side does not tell apart is not told apart on the other."""
    cells = {"step": account.step_ms.mean(axis=0)}
    for name, values in account.cells.items():
        if name in EXPOSED_CELLS and not is_split:
            name = "communication"
        elif name in IDLE_CELLS and not knows_host and account.on_device:
            name = "idle"
        mean = values.mean(axis=0)
        cells[name] = cells[name] + mean if name in cells else mean
    return cells


def _share(runs: Sequence[Steps], name: str) -> Share:
    """Mean over runs of the share of a typical step, with the error of steps, and of runs where these are
    several."""
    shares = [_share_of_run(run, name) for run in runs]
    values = [share.value for share in shares]
    within = [share.variance for share in shares if share.variance is not None]
    if len(within) < len(runs):
        return Share(float(np.mean(values)), None)
    between = float(np.var(values, ddof=1)) if len(runs) > 1 else 0.0
    return Share(float(np.mean(values)), max(between, float(np.mean(within))) / len(runs))


def _share_of_run(run: Steps, name: str) -> Share:
    step = run["step"]
    values = run.get(name, np.zeros_like(step))
    weights = typical(step)
    whole = float((weights * step).sum())
    value = float((weights * values).sum()) / whole if whole > 0 else 0.0
    if len(step) < MIN_STEPS:
        return Share(value, None)
    influence = weights * (values - value * step) * len(step) / whole
    return Share(value, float(error_of_mean(influence).variance()) if influence.any() else 0.0)
