"""The difference of two step times taken apart: which part of the step it comes from."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.alike import MAIN, are_calibrated, matching_pair
from aorta.account.judge.cells import CELLS, EXPOSED_CELLS, IDLE_CELLS, Account, account_of
from aorta.account.judge.leading import num_calibrated, num_timed
from aorta.account.judge.timed_steps import timed_steps
from aorta.account.model import ConfidenceInterval, Dataset, Decomposition, Part, StepWork
from aorta.account.numbers import number
from aorta.timeline.noise import error_of_mean
from aorta.timeline.statistics import ALPHA, MIN_STEPS, contrast, estimate

ESTIMATOR = (
    "means over ranks, then over the judged steps that all ranks recorded in full, then over runs;"
    " unlike medians they add up, and rare slow steps move them"
)
PARTS = ("compute_ms", "exposed_ms", "exposed_wait_ms", "exposed_copy_ms", "idle_ms")


def decompose(reference: Dataset, candidate: Dataset, work: StepWork | None) -> Decomposition | None:
    """Cells of the step on both sides, as their accounts have them; None where step times or all parts are
    unknown, or do not mean the same on both sides. Where the work of a step differs, the candidate's times
    are those of the reference's tokens."""
    sides = (reference, candidate)
    likes = {name: matching_pair(name, reference, candidate) for name in ("step_ms", *PARTS)}
    if not all(like.comparable for like in likes.values()):
        return None
    accounts = [[account_of(judged, side.lead) for judged in side.runs] for side in sides]
    if not all(account.is_measured for side in accounts for account in side):
        return None
    is_raw = all(side.lead == "raw" for side in sides)
    used = [row.name for side in accounts for account in side for row in account.rows()]
    is_split = is_raw and "communication" not in used
    knows_host = all(account.knows_host for side in accounts for account in side)
    scales = (1.0, 1.0 if work is None else 1 / work.ratio)
    cells = [
        [_cells(account, scale, is_split, knows_host) for account in side]
        for side, scale in zip(accounts, scales, strict=True)
    ]
    parts = _differences(cells)
    notes = [like.reason for like in [likes["compute_ms"]] if like.reason]
    if not is_split and any(part.name == "communication" for part in parts):
        reason = "ranks were not matched on both sides" if is_raw else "waiting is known for raw numbers only"
        notes.append(f"exposed is not split into waiting and transfer: {reason}")
    if not is_raw:
        notes += _of_calibrated(sides)
    return Decomposition(
        step=_part("step", cells),
        parts=parts,
        estimator=f"calibrated {ESTIMATOR}" if are_calibrated(reference, candidate) else ESTIMATOR,
        notes=notes,
        of_work=""
        if work is None
        else f"{candidate.label} for the tokens of a step of {reference.label}: times / {work.ratio:.3g}",
    )


def _cells(
    account: Account, scale: float, is_split: bool, knows_host: bool
) -> dict[str, NDArray[np.float64]]:
    """[step]: means over ranks, of the step and of each cell. What one side does not tell apart is not told
    apart on the other."""
    cells = {"step": scale * account.step_ms.mean(axis=0)}
    for name, values in account.cells.items():
        if name in EXPOSED_CELLS and not is_split:
            name = "communication"
        elif name in IDLE_CELLS and not knows_host and account.on_device:
            name = "idle"
        mean = scale * values.mean(axis=0)
        cells[name] = cells[name] + mean if name in cells else mean
    return cells


def _differences(runs: list[list[dict[str, NDArray[np.float64]]]]) -> list[Part]:
    """The parts of the step that take time on either side."""
    present = {name for side in runs for run in side for name in run}
    parts = [_part(name, runs) for name in CELLS if name in present]
    return [part for part in parts if part.reference_ms or part.candidate_ms]


def _of_calibrated(sides: Sequence[Dataset]) -> Iterator[str]:
    """Notes on parts that are estimates, and not known in every step."""
    for side in sides:
        lacking = sum(num_timed(run) - num_calibrated(run) for run in side.runs)
        if side.lead != "calibrated" or not lacking:
            continue
        is_timed = [timed_steps(run) for run in side.runs]
        pairs = list(zip(side.runs, is_timed, strict=True))
        step_ms = np.concatenate([run.values(MAIN)[:, timed].mean(axis=0) for run, timed in pairs])
        is_calibrated_by_run = [
            np.isfinite(run.values("calibrated.comm_ms")[:, timed]).all(axis=0) for run, timed in pairs
        ]
        only = " that were timed and" if not np.concatenate(is_timed).all() else " that"
        is_known = np.concatenate(is_calibrated_by_run)
        yield (
            f"{side.label}: without the {lacking} of {len(is_known)} judged steps{only} have no calibrated"
            " numbers on every rank; the mean of those is"
            f" {number(float(step_ms[~is_known].mean()))} ms, of the others"
            f" {number(float(step_ms[is_known].mean()))} ms"
        )


def _part(name: str, runs: list[list[dict[str, NDArray[np.float64]]]]) -> Part:
    series = [[run[name] if name in run else np.zeros_like(run["step"]) for run in side] for side in runs]
    reference, candidate = (float(np.mean([values.mean() for values in side])) for side in series)
    difference = candidate - reference
    half = _half_width(series)
    interval = None if half is None else ConfidenceInterval(difference - half, difference + half)
    return Part(name, reference, candidate, difference, interval)


def _half_width(series: list[list[NDArray[np.float64]]]) -> float | None:
    """Of the 95 % interval of a difference of means; None where there are too few steps. Of single runs step
    by step: what both do in a step cancels."""
    if min(len(values) for side in series for values in side) < MIN_STEPS:
        return None
    if len(series[0]) == len(series[1]) == 1:
        num = min(len(series[0][0]), len(series[1][0]))
        apart = series[1][0][:num] - series[0][0][:num]
        return float(error_of_mean(apart - apart.mean()).width(ALPHA))
    estimates = [[estimate(values[None, :], "mean") for values in side] for side in series]
    measured = [[found for found in side if found is not None] for side in estimates]
    low, high = contrast(measured[0], measured[1]).difference_interval
    return (high - low) / 2
