"""Which numbers of two sides mean the same, and with what error they are known."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aorta.account.judge.judged import bandwidths
from aorta.account.judge.leading import (
    AGAINST_KERNELS,
    OF_COMPUTE,
    few_calibrated,
    has_any,
    is_of_kernels,
    leading,
    own_lead,
)
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


def estimates(dataset: Dataset, name: str) -> list[Estimate] | None:
    """One for each run; None where one of them has too few steps of it. A projection is exact."""
    per_run = []
    for judged in dataset.runs:
        run_estimate = None
        value = judged.statistics[name].median if name in judged.statistics else None
        if dataset.source == "projected" and value is not None:
            run_estimate = Estimate(value, 0.0, EXACT_FREEDOM, judged.num_steps, judged.num_steps)
        elif name in judged.run.metrics:
            run_estimate = estimate(values_where_timed(judged, name))
        if run_estimate is None:
            return None
        per_run.append(run_estimate)
    return per_run


class MetricPair(NamedTuple):
    """Which metrics of the two sides mean the same."""

    reference: str
    candidate: str
    reason: str = ""
    """Why none do; or what was taken."""
    comparable: bool = True


def matching_pair(name: str, reference: Dataset, candidate: Dataset) -> MetricPair:
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1 and (meaning(name).unit in ("ms", "bytes") or metric_key(name).name == "count"):
        return MetricPair(
            name, name, f"{windows[0]} marks no steps: its numbers are of all that was read", False
        )
    if unlike := _unlike_bandwidths(name, reference, candidate):
        return MetricPair(name, name, unlike, False)
    metrics_used = leading(reference, name), leading(candidate, name)
    if metrics_used != (name, name):
        against_kernels = reference.lead != candidate.lead
        return MetricPair(*metrics_used, AGAINST_KERNELS if against_kernels else "")
    if kind_of_source(reference) == kind_of_source(candidate) or name not in OF_COMPUTE:
        return MetricPair(name, name)
    sources = f"{reference.source} and {candidate.source}"
    reason = _why_unlike((reference, candidate))
    return MetricPair(name, name, f"{sources} mean different things by compute, and {reason}", False)


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


def _why_unlike(sides: Sequence[Dataset]) -> str:
    """Reason why calibrated numbers do not help to compare two kinds of sources."""
    for side, opposite in (sides, sides[::-1]):
        if own_lead(side) == "calibrated":
            return f"{opposite.label} does not tell the kernels of its compute stream apart"
        if has_any(side):
            return f"of {side.label} {few_calibrated(side)}"
    return "neither is calibrated"


def are_calibrated(reference: Dataset, candidate: Dataset) -> bool:
    return reference.lead == candidate.lead == "calibrated"


def is_window(side: Dataset) -> bool:
    """A trace without step markers: all that was read is one step."""
    return is_whole_trace(side.first.run)


def is_whole_trace(run: Run) -> bool:
    """As is_window, of one run."""
    if run.source not in KERNEL_SOURCES or run.num_steps > 1:
        return False
    spans_ms = [run.totals[rank]["span_ms"] for rank in run.ranks]
    return bool(np.allclose(run.metrics["step_ms"][:, 0], np.array(spans_ms, dtype=float), rtol=1e-6))


def kind_of_source(side: Dataset) -> str:
    return "kernels" if is_of_kernels(side) else side.source
