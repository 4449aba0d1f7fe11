"""Which numbers of two sides mean the same, and with what error they are known."""

import numpy as np

from aorta.account.judge.judged import bandwidths
from aorta.account.judge.timed_steps import values_where_timed
from aorta.account.metrics import meaning, metric_key
from aorta.account.model import Dataset, Run
from aorta.timeline.statistics import (
    Estimate,
    estimate,
)
from aorta.timeline.types import KERNEL_SOURCES

EXACT_FREEDOM = 1e9
MAIN = "step_ms"
OF_COMPUTE = (
    "compute_ms",
    "hidden_ms",
    "exposed_ms",
    "idle_ms",
    "overlap_ratio",
    "hidden_per_compute",
    "compute_per_step",
    "exposed_per_step",
    "idle_per_step",
)
"""Depend on what compute means, which is not the same for events, host and kernels."""


def estimates(dataset: Dataset, name: str) -> list[Estimate] | None:
    """One for each run; None where one of them has too few steps of it. A projection is exact."""
    per_run = []
    for judged in dataset.runs:
        run_estimate = None
        value = judged.statistics[name].median if name in judged.statistics else None
        if dataset.source == "projected" and value is not None:
            run_estimate = Estimate(value, 0.0, EXACT_FREEDOM)
        elif name in judged.metrics:
            run_estimate = estimate(values_where_timed(judged, name))
        if run_estimate is None:
            return None
        per_run.append(run_estimate)
    return per_run


def why_unlike(name: str, reference: Dataset, candidate: Dataset) -> str:
    """Reason why a metric of the two sides does not mean the same; '' where it does."""
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1 and (meaning(name).unit in ("ms", "bytes") or metric_key(name).name == "count"):
        return f"{windows[0]} marks no steps: its numbers are of all that was read"
    if unlike := _unlike_bandwidths(name, reference, candidate):
        return unlike
    if kind_of_source(reference) == kind_of_source(candidate) or name not in OF_COMPUTE:
        return ""
    return f"{reference.source} and {candidate.source} mean different things by compute"


def _unlike_bandwidths(name: str, reference: Dataset, candidate: Dataset) -> str:
    """Reason why bandwidths differ other than speed; '' where they do not, or one is not known."""
    bases = [bandwidths(side.runs, name) for side in (reference, candidate)]
    if [len(basis) for basis in bases] != [1, 1] or bases[0] == bases[1]:
        return ""
    labels = (reference.label, candidate.label)
    matched, unmatched = labels if "transfer" in bases[0] else labels[::-1]
    return (
        f"not the same thing on both sides: that of {matched} is over the transfer, that of {unmatched} over"
        " the whole duration, waiting for late ranks included"
    )


def is_window(side: Dataset) -> bool:
    """A trace without step markers: all that was read is one step."""
    return is_whole_trace(side.first)


def is_whole_trace(run: Run) -> bool:
    """As is_window, of one run."""
    if run.source not in KERNEL_SOURCES or run.num_steps > 1:
        return False
    spans_ms = [run.totals[rank]["span_ms"] for rank in run.ranks]
    return bool(np.allclose(run.metrics["step_ms"][:, 0], np.array(spans_ms, dtype=float), rtol=1e-6))


def kind_of_source(side: Dataset) -> str:
    return "kernels" if side.source in (*KERNEL_SOURCES, "projected") else side.source
