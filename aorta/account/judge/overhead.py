"""What aorta itself takes of a step, and what recording cost a run in words."""

import math
from typing import NamedTuple

import msgspec

from aorta.account.judge.judged import usual_step
from aorta.account.load.rank.kernels import COUNT, GRAPH_NODES
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Dataset, Run
from aorta.account.numbers import number, quantity
from aorta.account.rows import positive
from aorta.records.schema import OverheadRecord

LAUNCH_US = 1.6
"""What CUPTI, once it was on, takes of a launch until the process ends, on the slowest host measured: for
records that do not hold it of theirs."""
IN_PROGRAM = 2.0
"""The same of a program's launch over that of a launch in a burst, which finds its code in the caches:
measured 1.8 to 2.3. The interval goes from nothing, where the device hides it, to twice as much."""
_SHORTER = ": recorded steps were the shorter ones"
VAGUE = 0.1
"""Upper end of a cost that may be nothing, above which its interval tells of the machine alone."""


class Instrument(NamedTuple):
    """What aorta itself takes of a step."""

    ms: float = 0.0
    """As far as that is certain."""
    gap_ms: float = 0.0
    """What recording may make the step longer by in other cells; 0 where it does not for certain."""
    why_not: str = ""


def instrument_of(judged: Run, looked: Run) -> Instrument:
    """Recording makes a step longer; what runs in every step is known of those that were left out."""
    overhead = looked.noted.overhead
    if overhead is not None and looked.left_out[looked.judged_steps].all():
        ms = overhead.always_on_ms
        if ms is None:  # of a version that tells the share alone
            ms = (overhead.always_on or 0.0) * float(positive(looked.values("step_ms")).mean())
        return Instrument(ms)
    if overhead is None or overhead.step_ms is None or overhead.step_interval_ms is None:
        return Instrument(why_not="not told apart: it is in what the host does")
    low_ms, high_ms = overhead.step_interval_ms
    if overhead.only_first and (usual := usual_step(judged)) is not None:
        is_longer = usual.recorded_ms - usual.ms > usual.error_ms
        return Instrument(gap_ms=usual.error_ms if is_longer else 0.0)
    if low_ms <= 0:
        most = f"{max(high_ms, 0.0):.3g} ms"
        return Instrument(why_not=f"within the scatter of steps, at most {most} a step")
    if overhead.only_first:
        return Instrument(
            why_not="not told apart: the first steps are longer, which recording need not have done"
        )
    return Instrument(overhead.step_ms, high_ms)


def overhead_texts(dataset: Dataset) -> list[str]:
    """A sentence for each run that measured what aorta cost it."""
    found = []
    for judged in dataset.runs:
        overhead = judged.noted.overhead
        if overhead is not None and overhead.cost is not None and overhead.interval is not None:
            of_run = "this run" if len(dataset.runs) == 1 else judged.label
            ms, most_ms, num = slower_launches(judged)
            bare_ms = (judged.mean_of("step_ms") or math.inf) - ms
            whole = _with_launches(overhead, ms, ms / bare_ms, most_ms / bare_ms)
            text = _cost_text(overhead, whole, of_run) + _above_limit(whole)
            if most_ms > (overhead.limit or 0.01) * bare_ms:
                text += (
                    f". {number(ms)} ms a step [0, {number(most_ms)}] of what aorta costs is CUPTI's, which"
                    f" times the kernels and makes {num:.0f} launches slower (--kernels off is without it)"
                )
            found.append(text)
    return found


def _with_launches(overhead: OverheadRecord, ms: float, share: float, most_share: float) -> OverheadRecord:
    """Add what CUPTI takes of launches, which no difference between steps shows: it takes it of all."""
    parts = {"cost": share, "later_cost": share, "always_on": share, "always_on_ms": ms}
    ends = ("interval", "later_interval", "always_on_interval")
    known = {name: value for name in (*parts, *ends) if (value := getattr(overhead, name)) is not None}
    more = {name: known[name] + part for name, part in parts.items() if name in known}
    wider = {name: (known[name][0], known[name][1] + most_share) for name in ends if name in known}
    return msgspec.structs.replace(overhead, **more, **wider)


def _cost_text(overhead: OverheadRecord, whole: OverheadRecord, of_run: str) -> str:
    """overhead: what steps have shown, which decides what can be told. whole: with launches."""
    assert overhead.interval is not None
    assert whole.interval is not None
    first_ms = overhead.step_interval_ms
    if overhead.only_first and first_ms is not None and first_ms[0] > 0:
        return (
            f"what aorta cost {of_run} is not known: its first {overhead.num_first} recorded steps"
            " took longer than the unrecorded ones after them, and other reasons for that are as likely"
        )
    low, high = overhead.interval
    if high <= 0 or (low <= 0 and high > VAGUE):
        most = f", {100 * whole.interval[1]:.0f} % at most" if high > 0 else _SHORTER
        return f"what aorta cost {of_run} cannot be told from how its steps vary{most}"
    text = f"aorta cost {_share(whole.cost, whole.interval, whole.always_on)} of {of_run}"
    if whole.later_cost is not None and whole.later_interval is not None:
        limit = "" if overhead.limit is None else f", limit {100 * overhead.limit:.3g} %"
        text += (
            f" ({_share(whole.later_cost, whole.later_interval, whole.always_on)} after its first"
            f" {overhead.num_first} steps, which are all recorded{limit})"
        )
    return text


def _above_limit(overhead: OverheadRecord) -> str:
    """Say where what is always on costs more than the overhead that was asked for."""
    always_on, ms = overhead.always_on, overhead.always_on_ms
    if always_on is None or ms is None or overhead.limit is None or always_on <= overhead.limit:
        return ""
    return (
        f". More than the limit of {100 * overhead.limit:.3g} % stays on in every step, recorded or not:"
        f" {_share(always_on, overhead.always_on_interval)},"
        f" {quantity(ms, 'ms') if ms >= 1 else quantity(1e3 * ms, 'us')} a step"
    )


def slower_launches(judged: Run) -> tuple[float, float, float]:
    """ms by which CUPTI makes a step longer, and at most, and the step's launches; 0 where no CUPTI was on.

    A device that does not idle hides what a launch takes longer.
    """
    counts = [judged.mean_of(of_operation(COUNT, name)) for name in operations(judged.metrics, COUNT)]
    idle_ms = judged.mean_of("idle_ms")
    is_rocm = judged.noted.versions.get("hip")  # which has no CUPTI
    if judged.source != "kernels" or not counts or idle_ms is None or is_rocm:
        return 0.0, 0.0, 0.0
    num = sum(count or 0.0 for count in counts) - (judged.mean_of(GRAPH_NODES) or 0.0)
    burst_us = (judged.noted.coverage.get("kernel_records") or {}).get("tracer_launch_us")
    ms = num * (LAUNCH_US if burst_us is None else IN_PROGRAM * burst_us) / 1e3
    return min(ms, idle_ms), min(2 * ms, idle_ms), num


def _share(cost: float | None, interval: tuple[float, float] | None, always_on: float | None = None) -> str:
    assert cost is not None
    assert interval is not None
    # Recording makes no run faster: what is below what stays on is the scatter of its steps.
    mean = 100 * max(0.0, cost, always_on or 0.0)
    low, high = max(0.0, 100 * interval[0]), max(mean, 100 * interval[1])
    return f"{mean:.2g} % [{low:.2g}, {high:.2g}]" if high < 10 else f"{mean:.0f} % [{low:.0f}, {high:.0f}]"
