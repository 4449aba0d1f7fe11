"""Losses that the step records of a run show; no ms of a step is in two of them.

A step's loss is waiting for ranks, exposed transfer, what all ranks spend on the host (or the device idles
for), and compute at a low clock. What one rank alone spends on the host is in the waiting of the others.
"""

from collections.abc import Iterator

import numpy as np

from aorta.causes.finding import Finding, Floats
from aorta.causes.from_telemetry import clocks, memory_limit, retries
from aorta.causes.parts import Parts, parts_of
from aorta.causes.transfer import transfer
from aorta.causes.waiting import PART_KINDS, exposed_of, waiting
from aorta.report.model import JudgedRun, Lead

MIN_OTHER_STEPS = 3
IN_MODEL = (
    "the host is in the program's own code then: in no batch, optimizer, checkpoint or wait for the device"
)
NOT_RECORDED = "what the host does then is not in these records"


def findings(judged: JudgedRun, lead: Lead) -> list[Finding]:
    """What is lost, in no order; some of it too little to name."""
    parts = parts_of(judged, lead)
    step_ms = np.median(parts.step_ms, axis=0)
    exposed = exposed_of(judged)
    seen: list[Finding] = []
    if exposed is not None:
        # The clock has all of its loss below.
        seen += [one for one in waiting(judged, parts, exposed) if one.kind != "clock"]
        seen += transfer(judged, parts, exposed)
    seen += _of_all_ranks(parts)
    seen += clocks(judged, parts)
    for finding, is_retry in retries(judged, step_ms):
        if finding.ms.any():
            _leave_to(is_retry > 0, seen)
        seen.append(finding)
    seen += memory_limit(judged)
    return seen


def _of_all_ranks(parts: Parts) -> Iterator[Finding]:
    """What every rank spends: the least of the ranks in each step."""
    for name, kind in PART_KINDS:
        own = parts.own.get(name)
        if own is None:
            continue
        common = own.min(axis=0)
        if not common.any():
            continue
        some = common[common > 0]
        yield Finding(
            kind,
            common,
            facts={
                "who": "all ranks" if len(own) > 1 else "the rank",
                "part_ms": float(np.median(some)),
                "others_ms": float(np.median(some)),
                "in_steps": len(some),
                "num_steps": len(common),
                "waits": False,
                "host": IN_MODEL if parts.knows_host else NOT_RECORDED,
            },
        )


def _leave_to(steps: Floats, others: list[Finding]) -> None:
    """In steps that are longer for a reason of their own, the other findings have what they usually have."""
    if (~steps).sum() < MIN_OTHER_STEPS:
        return
    for finding in others:
        usual = float(np.nanmedian(finding.ms[~steps]))
        finding.ms = np.where(steps, np.minimum(finding.ms, usual), finding.ms)
