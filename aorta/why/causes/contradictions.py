"""Causes that cannot be true of their account are left out, and a sentence says so instead."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from aorta.account.cause import Cause, CauseKind
from aorta.account.judge.cells import Account
from aorta.account.judge.contradictions import PRINTED, in_text, please_report
from aorta.account.load.rank.calls import ROUNDING_MS
from aorta.account.load.rank.impossible import ROUNDING
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.program import without_in_force

OF_ONE_OPERATION: tuple[CauseKind, ...] = ("small_messages", "no_prefetch", "wide_dtype")
Taken = dict[str, float]
"""By cell, the ms of the mean step that a cause takes."""


class Exposures:
    """Exposed ms of each operation in the mean step, and what causes have named of it."""

    def __init__(self, judged: Run) -> None:
        self._judged = judged
        self._named: dict[str, float] = {}

    def exceeded(self, finding: CauseFinding, taken: Taken) -> str | None:
        """Why a finding cannot be of its operation beside those before it; None where it can, or is of
        several."""
        op = str(finding.facts.get("op"))
        name = f"exposed_ms.{op}"
        if finding.kind not in OF_ONE_OPERATION or name not in self._judged.metrics:
            return None
        exposed = float(positive(self._judged.values(name)).mean())
        named = self._named.get(op, 0.0) + taken.get("transfer", 0.0) + taken.get("communication", 0.0)
        if named > exposed * (1 + PRINTED) + ROUNDING_MS:
            return f"causes have {named:.3f} ms of {op}, of which {exposed:.3f} are exposed"
        self._named[op] = named
        return None


def without_contradictions(
    named: Sequence[tuple[Cause, Taken]], account: Account, in_force: frozenset[str] = frozenset()
) -> tuple[list[tuple[Cause, Taken]], list[str]]:
    """The causes that can be true, and what to say instead of the others and of their sentences.

    in_force: what the program has set, and libraries that it uses, by the names of rules.
    """
    kept: list[tuple[Cause, Taken]] = []
    cannot_tell: list[str] = []
    left = {name: account.mean_ms(name) for name in account.cells}
    for cause, taken in named:
        wrong = next(in_cause(cause, taken, left, account), None)
        if wrong is not None:
            cannot_tell.append(please_report(f"what {cause.subject} costs", wrong))
            continue
        for name, ms in taken.items():
            left[name] -= ms
        wrong = next(in_advice(cause.change, in_force, account), None)
        if wrong is not None:
            cause = msgspec.structs.replace(
                cause, change=please_report(f"what would mend {cause.subject}", wrong)
            )
        evidence = []
        for text in cause.evidence:
            # What is in no step of the account may be longer than any of them.
            wrong = next(in_text(text, account.limits), None) if cause.is_in_step else None
            if wrong is None:
                evidence.append(text)
            else:
                cannot_tell.append(please_report(f"more of {cause.subject}", wrong))
        kept.append((msgspec.structs.replace(cause, evidence=tuple(evidence)), taken))
    return kept, cannot_tell


def in_advice(change: str, in_force: frozenset[str], account: Account) -> Iterator[str]:
    """Why a remedy cannot be given."""
    if without_in_force(change, in_force) != change:
        yield f"«{change}» offers what is in force"
    yield from in_text(change.replace("=None", ""), account.limits)  # of a setting


def in_cause(cause: Cause, taken: Taken, left: Taken, account: Account) -> Iterator[str]:
    """What cannot be. left: by cell, the ms that no larger cause has taken."""
    step = account.mean_step_ms
    allowed = ROUNDING_MS + ROUNDING * step
    if not math.isfinite(cause.ms) or cause.ms < 0:
        yield f"{cause.ms} ms"
        return
    if cause.rank is not None and cause.rank not in account.ranks:
        yield f"there is no rank {cause.rank}"
    if cause.is_waited_for and len(account.ranks) < 2:
        yield "one rank waits for nobody"
    if cause.interval_ms is not None:
        low, high = cause.interval_ms
        if not 0 < low <= cause.ms * (1 + PRINTED) or not cause.ms * (1 - PRINTED) <= high:
            yield f"{cause.ms:.3f} ms lie outside of [{low:.3f}, {high:.3f}], or that holds 0"
    if not 0 <= cause.share <= 1 + ROUNDING:
        yield f"{100 * cause.share:.1f} % of the whole"
    if not cause.is_in_step:
        return
    if cause.ms > step + allowed:
        yield f"{cause.ms:.3f} ms of a step of {step:.3f} ms"
    if cause.interval_ms is not None and cause.interval_ms[1] > step + allowed:
        yield f"up to {cause.interval_ms[1]:.3f} ms of a step of {step:.3f} ms"
    if cause.bound_ms is not None and not 0 <= cause.bound_ms <= step - cause.ms + allowed:
        yield f"without {cause.ms:.3f} ms, a step of {step:.3f} ms would take {cause.bound_ms:.3f} ms"
    if cause.ms > sum(taken.values()) + allowed:
        yield f"{cause.ms:.3f} ms, and the cells of a step hold {sum(taken.values()):.3f} of it"
    for name, ms in taken.items():
        if ms > left.get(name, 0.0) + allowed:
            yield f"{ms:.3f} ms of {name}, of which {left.get(name, 0.0):.3f} are left"
    yield from in_text(cause.subject, account.limits)
