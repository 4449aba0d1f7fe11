"""Losses that the step records of a run show; no ms of a step is in two of them.

A step's loss is waiting for ranks, exposed transfer, what all ranks spend on the host (or the device idles
for), and compute at a low clock. What one rank alone spends on the host is in the waiting of the others.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.cells import Account
from aorta.account.judge.exposed import exposed_of
from aorta.account.judge.occasional import are_alike, without_traces
from aorta.account.model import JudgedRun, Lead
from aorta.why.causes.finding import CauseFinding, Floats, steps_with, together
from aorta.why.causes.losses.parts import Parts, parts_of
from aorta.why.causes.losses.program_code import program_code
from aorta.why.causes.losses.slow_steps import slow_steps
from aorta.why.causes.losses.telemetry import clocks, memory_limit, retries
from aorta.why.causes.losses.transfer import exposure, small_calls, transfer
from aorta.why.causes.losses.waiting import (
    ASLEEP,
    CELLS_OF_PART,
    IN_TURN,
    PART_KINDS,
    unbalanced_stages,
    waiting,
)

MIN_OTHER_STEPS = 3
WORTH_SAYING = 0.1
"""Of the loss, from which on it is said what others took of the core."""
IN_MODEL = (
    "meanwhile the host runs the program's own code: no data loading, optimizer, checkpoint or wait for the"
    " device"
)
ANNOUNCED = "pause announced by the program"
NOT_RECORDED = "these records do not show what the host does meanwhile"


def findings(judged: JudgedRun, account: Account, lead: Lead) -> list[CauseFinding]:
    """What is lost; some of it too little to name. Where two would explain the same ms of a cell, the first
    has them. judged: the steps of the account."""
    details = exposure(judged)
    launching_ms = 0.0 if details is None or small_calls(judged) is None else details.small_launch_ms
    parts = parts_of(judged, account, lead, launching_ms)
    step_ms = parts.step_ms.mean(axis=0)
    exposed = exposed_of(judged, lead)
    losses: list[CauseFinding] = []
    if exposed is not None:
        # The clock has all of its loss below.
        losses += [finding for finding in waiting(judged, parts, exposed) if finding.kind != "clock"]
        losses += unbalanced_stages(judged, parts, exposed)
        losses += transfer(judged, parts, exposed, details)
    losses = _with_common(losses, [*program_code(judged, account), *_of_all_ranks(parts)])
    losses += slow_steps(judged, parts)
    losses = _one_of_small_messages(judged, losses)
    losses += clocks(judged, parts)
    for finding, is_retry in retries(judged, step_ms):
        if finding.ms.any():
            _leave_to(is_retry > 0, losses)
        losses.append(finding)
    losses += memory_limit(judged)
    return losses


def _of_all_ranks(parts: Parts) -> Iterator[CauseFinding]:
    """What every rank spends: as much as the one that has least of it over the run. In a single step another
    one may have it: hosts of devices are not in step with each other."""
    for name, kind in PART_KINDS:
        by_rank = parts.ms_by_kind.get(name)
        if by_rank is None:
            continue
        common = without_traces(_of_the_least(by_rank))
        if not (common > 0).any():
            continue
        steps = steps_with(common)
        part_ms = float(common[steps].mean())
        yield CauseFinding(
            kind,
            common,
            takes={CELLS_OF_PART.get(name, (name,)): 1.0},
            facts={
                "who": "all ranks" if len(by_rank) > 1 else "the rank",
                "others_ms": part_ms,
                "step_ms": float(parts.step_ms[:, steps].mean()),
                "in_steps": int((common > 0).sum()),
                "num_steps": len(common),
                "waits": False,
                "host": IN_MODEL if parts.knows_host else NOT_RECORDED,
                **_words(name, parts, part_ms),
            },
            is_sure=name == "between_steps" and are_alike(common),
        )


def _of_the_least(by_rank: Floats) -> Floats:
    """[step]: the ranks' mean, as far as the rank with least of it has it."""
    means = by_rank.mean(axis=1)
    if not means.mean() > 0:
        return np.zeros(by_rank.shape[1])
    part: Floats = by_rank.mean(axis=0) * (means.min() / means.mean())
    return part


def _with_common(losses: list[CauseFinding], common: list[CauseFinding]) -> list[CauseFinding]:
    """Where all ranks lose to one kind, and wait in turn for one that loses more, that is the same loss."""
    for finding in common:
        of_kind = [
            other
            for other in losses
            if other.kind == finding.kind
            and other.facts.get("who") == IN_TURN
            and other.facts.get("op") == finding.facts.get("op")
        ]
        for other in of_kind:
            finding.takes = together([finding, other])
            finding.ms = finding.ms + other.ms
            losses.remove(other)
    return [*losses, *common]


def _words(name: str, parts: Parts, part_ms: float) -> dict[str, object]:
    """Facts that the texts of one part have; part_ms: what it takes in a step that has it."""
    if name == "asleep":
        return {"op": "asleep", "what": ASLEEP, "asleep_ms": part_ms}
    facts: dict[str, object] = {"part_ms": part_ms}
    if name == "pause":
        facts["what"] = ANNOUNCED
    if name == "launch" and parts.taken_ms is not None:
        taken_ms = float(parts.taken_ms.mean())
        if taken_ms >= WORTH_SAYING * part_ms:
            facts["taken_ms"] = taken_ms
    return facts


def _one_of_small_messages(judged: JudgedRun, losses: list[CauseFinding]) -> list[CauseFinding]:
    """Their time on the device, what launching them costs the host, and who waits for that: one remedy."""
    small = [finding for finding in losses if finding.kind == "small_messages"]
    if not small:
        return losses
    facts = small_calls(judged) or {}
    for finding in small:
        facts |= {name: value for name, value in finding.facts.items() if name in ("per_call_ms", "origin")}
    host_ms = [finding.mean_ms for finding in small if "per_call_ms" not in finding.facts]
    if host_ms:
        facts["host_ms"] = float(sum(host_ms))
    merged = CauseFinding(
        "small_messages", np.sum([finding.ms for finding in small], axis=0), together(small), facts=facts
    )
    return [merged, *(finding for finding in losses if finding.kind != "small_messages")]


def _leave_to(steps: NDArray[np.bool_], losses: list[CauseFinding]) -> None:
    """In steps that are longer for a reason of their own, the other findings have what they usually have."""
    if (~steps).sum() < MIN_OTHER_STEPS:
        return
    for finding in losses:
        usual = float(np.nanmean(finding.ms[~steps]))
        finding.ms = np.where(steps, np.minimum(finding.ms, usual), finding.ms)
