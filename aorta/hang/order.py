"""Order of a rank's collectives across its groups: where it departs from the usual one, what comes next.

A report numbers collectives by group. Across groups the time of issue orders them, and a program orders
them alike in every step: a rank that did not is the one to blame for ranks that wait for each other.
"""

from typing import NamedTuple

from aorta.hang.report import LISTED_BEFORE, CallState, HangReport
from aorta.timeline.collective import UNEVEN

OF_ANY_SIZE = UNEVEN | {"coalesced"}
"""Operations whose sizes may differ between ranks, and between steps."""


class Signature(NamedTuple):
    """What two ranks must agree on in a collective."""

    op: str
    bytes: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} of {self.bytes} bytes {self.dtype}" if self.dtype else self.op


def signature(call: CallState) -> Signature:
    return Signature(call.op, call.bytes, call.dtype)


def comparable(call: CallState) -> Signature:
    """Signature that is equal wherever two ranks, or two steps, issued the same collective."""
    return Signature(call.op, 0, "") if call.op in OF_ANY_SIZE else signature(call)


class Issued(NamedTuple):
    """A collective with its group."""

    key: str
    group: str
    call: CallState

    def __str__(self) -> str:
        return f"{signature(self.call)} (group {self.group})"

    def alike(self, peer: "Issued") -> bool:
        return self.key == peer.key and comparable(self.call) == comparable(peer.call)


def departure(report: HangReport, number: int) -> str | None:
    """How a step of this rank departs from the nearest whole one; None where it does not, or is not known.

    number: the earliest step in which ranks wait. The rank that departed may be further.
    """
    steps = _steps(report)
    if steps is None or number not in steps:
        return None
    whole_steps = [step for step in steps if step not in (number, *_unsure(report, steps))]
    if not whole_steps:
        return None
    usual_step = min(whole_steps, key=lambda step: (abs(step - number), step))
    usual = steps[usual_step]
    for index, item in enumerate(steps[number]):
        if index >= len(usual):
            return f"rank {report.rank} issued {item}, which step {usual_step} had not"
        if not item.alike(usual[index]):
            skips = index + 1 < len(usual) and item.alike(usual[index + 1])
            verb = "went on to" if skips else "issued"
            return f"rank {report.rank} {verb} {item} where step {usual_step} had {usual[index]}"
    num = len(steps[number])
    if num < len(usual) and number < max(steps):
        return f"rank {report.rank} left step {number} without {usual[num]}, which step {usual_step} had"
    return None


def next_keys(report: HangReport) -> list[str]:
    """Groups whose collectives the rank would issue next, by its latest whole step; empty where the report
    does not tell."""
    steps = _steps(report)
    if not steps or report.step is None:
        return []
    whole_steps = [step for step in steps if step < report.step and step not in _unsure_first(report, steps)]
    if not whole_steps:
        return []
    usual = steps[max(whole_steps)]
    return [item.key for item in usual[len(steps.get(report.step, [])) :]]


def _steps(report: HangReport) -> dict[int, list[Issued]] | None:
    """Collectives of all groups in order of their issue, by step; None where a time is not known."""
    issued = [
        Issued(group.key, group.name, call)
        for group in report.groups or ()
        if len(group.ranks) > 1
        for call in group.calls
    ]
    if any(item.call.age_s is None for item in issued):
        return None
    issued.sort(key=lambda item: -(item.call.age_s or 0.0))
    steps: dict[int, list[Issued]] = {}
    for item in issued:
        steps.setdefault(item.call.step, []).append(item)
    return steps


def _unsure(report: HangReport, steps: dict[int, list[Issued]]) -> set[int]:
    """Steps that may not be listed whole: the last one is under way, the first one may be cut off."""
    return {max(steps)} | _unsure_first(report, steps)


def _unsure_first(report: HangReport, steps: dict[int, list[Issued]]) -> set[int]:
    num_finished = max(
        (sum(call.finished is not False for call in group.calls) for group in report.groups or ()), default=0
    )
    return {min(steps)} if num_finished >= LISTED_BEFORE else set()
