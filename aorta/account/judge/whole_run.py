"""What all judged steps took where the overhead left some of them out: estimated from those it recorded.

The length of every step is known. So a part of the steps that were left out is estimated by its share of the
recorded ones, which is exact where a part takes as much of a long step as of a short one. The first steps,
all recorded whatever that costs, count for themselves alone: a run begins unlike it goes on. Recorded steps
come in blocks, and how much blocks differ is the error.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.timed_steps import timed_steps
from aorta.account.model import JudgedRun
from aorta.account.numbers import number

Floats = NDArray[np.float64]
LEAST_BLOCKS = 4
"""Recorded blocks behind the first steps from which on the others are estimated."""


class Estimate(NamedTuple):
    """Mean over all judged steps, and its 95 % interval."""

    mean_ms: float
    low_ms: float
    high_ms: float


def whole_run_text(judged: JudgedRun, parts: dict[str, str]) -> str:
    """A sentence with the estimates; '' where every step was recorded, or too few to tell.

    parts: metrics by what they are called.
    """
    run = judged.run
    overhead = None if run.run is None else run.run.overhead
    is_timed = timed_steps(judged)
    if overhead is None or is_timed.all() or not is_timed.any():
        return ""
    steps = run.global_step[judged.num_warmup :]
    is_first = steps < run.global_step[0] + overhead.num_first
    step_ms = judged.values("step_ms").mean(axis=0)
    extra_ms = max(overhead.step_ms or 0.0, 0.0)
    texts = []
    for title, metric in parts.items():
        if metric not in run.metrics:
            continue
        found = estimated(judged.values(metric).mean(axis=0), step_ms, is_first, extra_ms)
        if found is not None:
            texts.append(
                f"{title} {number(found.mean_ms)} ms [{number(found.low_ms)}, {number(found.high_ms)}]"
            )
    if not texts:
        return ""
    return (
        f"all {len(steps):,} judged steps, {len(steps) - int(is_timed.sum()):,} of them estimated by the"
        f" recorded ones: {', '.join(texts)} a step"
    )


def estimated(
    part_ms: Floats, step_ms: Floats, is_first: NDArray[np.bool_], extra_ms: float
) -> Estimate | None:
    """Estimate the mean of a part over all steps; None where too few blocks tell.

    part_ms: NaN in steps that were left out. step_ms: of all. extra_ms: how much longer recording makes a
    step; a step that was left out has none of it.
    """
    if not np.isfinite(step_ms).all():
        return None
    is_known = np.isfinite(part_ms)
    rows = np.flatnonzero(is_known & ~is_first)
    blocks = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    left_out_ms = float(step_ms[~is_known].sum())
    if len(blocks) < LEAST_BLOCKS or not left_out_ms > 0:
        return None
    parts = np.array([part_ms[block].sum() for block in blocks])
    lengths = np.array([np.maximum(step_ms[block] - extra_ms, 0.0).sum() for block in blocks])
    if not lengths.sum() > 0:
        return None
    share = parts.sum() / lengths.sum()
    residuals = parts - share * lengths
    num = len(blocks)
    error = np.sqrt((residuals**2).sum() * num / (num - 1)) / lengths.sum()
    error *= np.sqrt(1 + lengths.sum() / left_out_ms)  # what was left out scatters itself
    from scipy.special import stdtrit  # loads in a tenth of a second

    half_ms = float(stdtrit(num - 1, 0.975) * error * left_out_ms) / len(step_ms)
    mean_ms = float(part_ms[is_known].sum() + share * left_out_ms) / len(step_ms)
    return Estimate(mean_ms, max(mean_ms - half_ms, 0.0), mean_ms + half_ms)
