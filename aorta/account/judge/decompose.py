"""The difference of two step times taken apart: which part of the step it comes from."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.alike import MAIN, are_calibrated, has_statistic, matching_pair
from aorta.account.judge.leading import num_calibrated, num_timed
from aorta.account.judge.timed_steps import timed_steps, values_where_timed
from aorta.account.model import ConfidenceInterval, Dataset, Decomposition, JudgedRun, Part, StepWork
from aorta.account.numbers import number
from aorta.timeline.statistics import (
    contrast,
    estimate,
)

ESTIMATOR = (
    "means over ranks, then over the judged steps that all ranks recorded in full, then over runs;"
    " unlike medians they add up, and rare slow steps move them"
)
PARTS = ("compute_ms", "exposed_ms", "exposed_wait_ms", "exposed_copy_ms", "idle_ms")
OF_RAW = ("exposed_wait_ms", "exposed_copy_ms")
"""Parts of what was measured, which need not fit calibrated numbers."""


def decompose(reference: Dataset, candidate: Dataset, work: StepWork | None) -> Decomposition | None:
    """Parts of the step on both sides; None where step times or all parts are unknown, or do not mean the
    same on both sides. Where the work of a step differs, the candidate's times are those of the reference's
    tokens."""
    sides = (reference, candidate)
    likes = {name: matching_pair(name, reference, candidate) for name in ("step_ms", *PARTS)}
    if not all(like.comparable for like in likes.values()):
        return None
    if not all(has_statistic(side, "step_ms") for side in sides):
        return None
    metrics_used = [{name: like.reference for name, like in likes.items()}]
    metrics_used += [{name: like.candidate for name, like in likes.items()}]
    is_raw = all(side.lead == "raw" for side in sides)
    parts_known = [
        name for name in PARTS if all(has_statistic(sides[i], metrics_used[i][name]) for i in (0, 1))
    ]
    parts_known = [name for name in parts_known if is_raw or name not in OF_RAW]
    rare = [name for name in parts_known if any(_is_rare(sides[i], metrics_used[i][name]) for i in (0, 1))]
    parts_known = [name for name in parts_known if name not in rare]
    if "compute_ms" not in parts_known:
        return None
    series = [
        [_series(judged, {name: metrics_used[i][name] for name in parts_known}) for judged in side.runs]
        for i, side in enumerate(sides)
    ]
    if any(run_series is None for side in series for run_series in side):
        return None
    runs = [[run_series for run_series in side if run_series is not None] for side in series]
    if work is not None:
        runs[1] = [
            {name: values / work.ratio for name, values in run_series.items()} for run_series in runs[1]
        ]
    names = list(runs[0][0])
    parts = [_part(name, runs) for name in names]
    step = next(part for part in parts if part.name == "step")
    notes = [like.reason for like in [likes["compute_ms"]] if like.reason]
    if "exposed" in names:
        reason = (
            "most steps were recorded without details" if rare else "ranks were not matched on both sides"
        )
        reason = reason if is_raw else "waiting is known for raw numbers only"
        notes.append(f"exposed is not split into waiting and transfer: {reason}")
    if not is_raw:
        notes += _of_calibrated(sides, parts)
    return Decomposition(
        step=step,
        parts=[part for part in parts if part.name != "step" and (part.reference_ms or part.candidate_ms)],
        estimator=f"calibrated {ESTIMATOR}" if are_calibrated(reference, candidate) else ESTIMATOR,
        notes=notes,
        of_work=""
        if work is None
        else f"{candidate.label} for the tokens of a step of {reference.label}: times / {work.ratio:.3g}",
    )


def _of_calibrated(sides: Sequence[Dataset], parts: list[Part]) -> Iterator[str]:
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
    if any(part.name == "idle" and min(part.reference_ms, part.candidate_ms) < 0 for part in parts):
        yield "compute and exposed are estimated separately; idle is the rest, here below 0"


def _is_rare(side: Dataset, name: str) -> bool:
    """Returns True where it is known in fewer than half of the judged steps of a run that could have it,
    which it must not choose for the other parts."""
    of_runs = [values_where_timed(run, name) for run in side.runs]
    return any(2 * np.isfinite(run_values).all(axis=0).sum() < run_values.shape[1] for run_values in of_runs)


def _series(judged: JudgedRun, metrics: dict[str, str]) -> dict[str, NDArray[np.float64]] | None:
    """Per part its mean over ranks, step by step; None where no step has them all."""
    names = {"step_ms": "step_ms", **metrics}
    values = {name: judged.values(metric) for name, metric in names.items()}
    complete = ~np.isnan(np.array(list(values.values()))).any(axis=(0, 1))
    if not complete.any():
        return None
    means = {name: value[:, complete].mean(axis=0) for name, value in values.items()}
    parts = {"step": means["step_ms"], "compute": means["compute_ms"]}
    if "exposed_ms" in means and "exposed_wait_ms" in means:
        parts["exposed_wait"] = means["exposed_wait_ms"]
        parts["exposed_transfer"] = means["exposed_ms"] - means["exposed_wait_ms"]
    elif "exposed_ms" in means:
        parts["exposed"] = means["exposed_ms"]
    if "exposed_copy_ms" in means and "idle_ms" in means:
        parts["exposed_copy"] = means["exposed_copy_ms"]
    # idle_ms is this rest, up to rounding; where idle is not known, the rest is not called so.
    remainder = 2 * parts["step"] - np.sum(list(parts.values()), axis=0)
    parts["idle" if "idle_ms" in means else "not_measured"] = remainder
    return parts


def _part(name: str, runs: list[list[dict[str, NDArray[np.float64]]]]) -> Part:
    reference, candidate = (float(np.mean([run[name].mean() for run in side])) for side in runs)
    estimates = [[estimate(run[name][None, :], "mean") for run in side] for side in runs]
    measured = [[run_estimate for run_estimate in side if run_estimate is not None] for side in estimates]
    interval = None
    if all(len(run_estimate) == len(side) for run_estimate, side in zip(measured, runs, strict=True)):
        interval = ConfidenceInterval(*contrast(measured[0], measured[1]).difference_interval)
    return Part(name, reference, candidate, candidate - reference, interval)
