"""How much shorter a step becomes at most when its device has less to compute: then its host is what it waits
for, which needs its own time for all that it launches."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from aorta.account.judge.cells import Account, Host
from aorta.account.judge.stacks import samples_of_ranks
from aorta.account.model import Run
from aorta.account.numbers import quantity
from aorta.records.stacks import StackFrame
from aorta.why.causes.finding import CauseFinding

SHORTEST = 0.05
"""Of the steps, whose length at the host is what it needs: it was held up by no full queue. Four programs on
H100 and H200 whose hosts bound them once work was left out took 9 % less to 6 % more than this."""
HELD_UP = 0.9
"""Of a step: where the host takes as long in its shortest ones, it was held up in all of them, or never."""
NOT_HELD_UP, FEWEST_FREE = 0.6, 3
"""Of a step, up to which one was not held up, and how many are enough, however few of all: a host that reads
a value now and then waits until its queue is empty, and launches the next steps as fast as it can."""
EMPTIED = 0.5
"""Of a step, that the host spends beside its own part, from which on its queue is nearly empty behind it."""
MOSTLY_IDLE = 0.4
"""Of a step, that the device has nothing to do, from which on the host is never held up."""
OF_LAUNCHES = ("columns",)
"""Operations that are launched for one image after the other: the host is spared as much."""
READS = ("item", "tolist", "cpu", "numpy")
"""Methods of tensors."""
CHECKS = ("_Orthogonal.forward", "linalg.solve", "linalg.inv", "linalg.cholesky", "Tensor.inverse")
"""Linear algebra, whose error codes the host reads."""
FEWEST = 8
"""Steps."""


class HostNeeds(NamedTuple):
    need_ms: float | None
    """None where it was held up in every step, by a queue that was full."""
    room_ms: float
    """By which a step can become shorter before it takes what the host needs."""
    shown_by: str = ""
    """Steps that show the need: 'it takes less in 1 of 20 steps'."""


def host_needs(judged: Run, account: Account) -> HostNeeds | None:
    """Of the rank with least room. None where it is not known: of a CPU, or of too few steps."""
    whole = judged.whole
    host = Host(whole, whole.judged_steps)
    step_ms, body_ms = host.metric("step_ms"), host.metric("host_ms")
    synchronisation_ms = host.span("synchronisation") + host.tail("synchronisation")
    own_ms = body_ms - synchronisation_ms
    beside_ms = np.maximum(step_ms - body_ms, synchronisation_ms)
    found: list[HostNeeds] = []
    waits_ms = _waits_beside(judged, host)
    for own, steps, beside in zip(own_ms, step_ms, beside_ms, strict=True):
        is_known = np.isfinite(own) & np.isfinite(steps)
        if not account.on_device or is_known.sum() < FEWEST:
            return None
        # A host that fills an empty queue anew is short in many steps that take the device as long as others.
        mean_ms = float(max(steps[is_known].mean(), np.median(steps[is_known])))
        # What makes up for a longer step before it was held up in part: the mean of both tells. Behind a
        # wait, or work beside the step, that emptied the queue there is nothing to make up for.
        is_alone = np.r_[False, beside[:-1] > EMPTIED * mean_ms]
        paired = np.where(is_alone, own, np.fmax(own, (own + np.r_[np.nan, own[:-1]]) / 2))
        need_ms = max(float(np.quantile(paired[is_known], SHORTEST)) - waits_ms, 0.0)
        shown_by = f"it takes less in 1 of {1 / SHORTEST:.0f} steps"
        free = paired[is_known & (paired <= NOT_HELD_UP * mean_ms)]
        if len(free) >= FEWEST_FREE and np.median(free) < need_ms:
            need_ms, shown_by = float(np.median(free)), "as in steps in which no full queue holds it up"
        if account.share("launch") >= MOSTLY_IDLE:
            need_ms, shown_by = float(own[is_known].mean()), "as no full queue holds it up"
        elif need_ms > HELD_UP * mean_ms:
            found.append(HostNeeds(None, math.inf))
            continue
        # What is told is of the account's step, which may be the run's median.
        room_ms = max(min(mean_ms, account.mean_step_ms) - need_ms, 0.0)
        found.append(HostNeeds(need_ms, room_ms, shown_by))
    return min(found, key=lambda one: one.room_ms, default=None)


def _waits_beside(judged: Run, host: Host) -> float:
    """ms of a step that samples show in reads of values, where the host waits for the device, beyond what
    spans tell in steps that have some: not every read within a model is noted."""
    samples = samples_of_ranks(judged.whole)
    ms = [float(one.ms[one.is_judged & one.leaf_is(_reads)].sum()) for one in samples]
    noted_ms = host.span("synchronisation") + host.tail("synchronisation")
    noted_ms = noted_ms[noted_ms > 0]
    return max(min(ms, default=0.0) - float(noted_ms.mean() if len(noted_ms) else 0.0), 0.0)


def _reads(leaf: StackFrame) -> bool:
    return leaf.function.endswith(CHECKS) or (not leaf.file and leaf.function.rpartition(".")[2] in READS)


def within_host_needs(judged: Run, account: Account, losses: list[CauseFinding]) -> Iterator[CauseFinding]:
    """The losses, those of work of the device no larger than the room that its host leaves."""
    needs = host_needs(judged, account)
    for finding in losses:
        of_device = finding.mean_ms
        is_held_up = needs is not None and needs.need_ms is None
        if is_held_up and finding.kind == "compute" and finding.facts.get("op") not in OF_LAUNCHES:
            finding.facts["is_most"] = "unbounded" not in finding.facts
            finding.evidence.append(
                "the device is spared that, and a step may gain less: the host waits in every step until the"
                " device's queue has room, so that no step shows how long the host needs for its own part"
            )
        # Operators that are left out need not be launched.
        spared_ms = 0.0 if needs is None else finding.facts.get("launched", 0.0) * (needs.need_ms or 0.0)
        if (
            needs is not None
            and finding.kind == "compute"
            and of_device > (room := needs.room_ms + spared_ms)
        ):
            finding.facts["device_ms"] = of_device
            finding.ms = finding.ms * (room / of_device)
            finding.more_ms += of_device - room
            of_this = f", {quantity(spared_ms, 'ms')} of them for this" if spared_ms else ""
            computed_ms = of_device * (1 - finding.takes.get(("launch",), 0.0))
            # Less work of the device may be fewer launches: a floor that holds for certain is none.
            finding.evidence.append(
                f"the device computes {quantity(computed_ms, 'ms')} for it; the host needs"
                f" {quantity(needs.need_ms, 'ms')} for its own part of a step{of_this} ({needs.shown_by}):"
                " a step gains what it takes beyond the rest, once for all that the device is spared; more"
                " only where the host has less to do as well, as with fewer launches"
            )
        yield finding
