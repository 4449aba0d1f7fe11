"""The collectives of steps in which nothing is called for them: learned in others, and checked by number.

    steps   seen ... seen     unseen unseen unseen ...     seen (now and then)
    calls   noted one by one  those learned, checked       noted, and compared

Being called for each collective costs the threads that launch them more than all that is noted, and a
training step issues the same ones every time. So once steps agree, what sees collectives is taken off, and
recorded steps get what was learned. Two things tell where that is not theirs: the backends' counts by group,
kept in C++, which are compared here at each step's end; and the operations of the step's kernels in their
order, which KernelSteps compares (aorta/steps). Such a step has no list of collectives and says why, and the
next ones are seen again. A size that changes alone is told by neither: it is known anew from the steps that
are seen now and then (`Sampling.is_seen`).

Only where kernel records time the steps: without them a collective has no times unless it is seen. Programs
whose sizes differ from step to step (tokens of experts) and those with sends and receives, which NCCL does
not count, are seen in every recorded step.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from aorta.steps.notes import CollectiveCall, LearnedCalls, RecordedStep

AGREE = 8
"""Seen steps in a row that have to be of known sequences before one is unseen."""
MOST_SEQUENCES = 16
"""Limit of different sequences that are known: steps with and without a reduction, say."""
MOST_AGREE = 4096
"""Limit to which AGREE grows, twice with each step that was not as learned."""

Counts = dict[str, int]
"""The backend's number of collectives so far, by the group's key."""


class Learner:
    """Learns the collectives of steps that are seen, and tells those of steps that are not."""

    def __init__(self, read: Callable[[], Counts], next_numbers: Callable[[Counts], Counts]) -> None:
        """read: the backends' counts now. next_numbers: our numbers of the next calls at these, by group."""
        self.read = read
        self._next_numbers = next_numbers
        self._known: dict[frozenset[tuple[str, int]], _Sequence] = {}
        """By the number of collectives in each group."""
        self._num_agreed = 0
        """Seen steps in a row that were of known sequences."""
        self._num_needed = AGREE
        self._is_refuted = False
        """True: a thread of ours was told that kernels were not those of a step's calls."""
        self.num_learned: Counter[str] = Counter()
        """Collectives of unseen steps, by operation."""

    @property
    def is_sure(self) -> bool:
        """True where the next step need not be seen."""
        return self._num_agreed >= self._num_needed

    def refute(self) -> None:
        """Note that a step was not as learned, or that its kernels could not show it. Any thread may call."""
        self._is_refuted = True

    def _doubt(self) -> None:
        self._num_agreed = 0
        self._num_needed = min(2 * self._num_needed, MOST_AGREE)

    # -- a step ----------------------------------------------------------------------------------------

    def begin(self, step: RecordedStep, counts: Counts) -> None:
        """Note the counts at the start of a step that kernel records time."""
        step.counts = counts
        if step.is_unseen:
            step.first_numbers = self._next_numbers(counts)

    def end_body(self, step: RecordedStep) -> None:
        """Tell an unseen step's calls as far as its body goes: perhaps no other step ends its window."""
        if step.is_unseen and step.counts is not None:
            step.learned = self._told(step, self.read())

    def end(self, step: RecordedStep, counts: Counts) -> None:
        """Learn from a step whose window ends now, with the start of the next one, or tell its calls."""
        if self._is_refuted:
            self._is_refuted = False
            self._known.clear()
            self._doubt()
        if not step.is_unseen:
            self._learn(step, counts)
            return
        step.learned = self._told(step, counts)
        if step.learned is None:
            self._doubt()
            return
        self.num_learned.update([call.op for call in step.learned.calls])

    def _told(self, step: RecordedStep, counts: Counts) -> LearnedCalls | None:
        issued = _issued(step.counts, counts)
        sequence = None if issued is None else self._known.get(issued)
        return None if sequence is None else LearnedCalls(sequence.step.calls, step.first_numbers)

    def _learn(self, step: RecordedStep, counts: Counts) -> None:
        issued = _issued(step.counts, counts)
        if issued is None or not _is_regular(step, issued):
            self._num_agreed = 0
            return
        signature = [_signature(call) for call in step.calls]
        known = self._known.get(issued)
        if known is not None and known.signature == signature:
            self._num_agreed += 1
            if _num_named(step) >= _num_named(known.step):
                known.step = step
            return
        self._num_agreed = 0
        if known is not None or len(self._known) < MOST_SEQUENCES:
            self._known[issued] = _Sequence(signature, step)


class _Sequence:
    """The calls of a step, and the newest step that had them."""

    __slots__ = ("signature", "step")

    def __init__(self, signature: list[Any], step: RecordedStep) -> None:
        self.signature = signature
        self.step = step


def _issued(before: Counts | None, after: Counts) -> frozenset[tuple[str, int]] | None:
    """Return the number of collectives by group between two readings; None where that is not known."""
    if before is None or not before.keys() <= after.keys():
        return None
    return frozenset(
        (key, count - before.get(key, 0)) for key, count in after.items() if count != before.get(key, 0)
    )


def _is_regular(step: RecordedStep, issued: frozenset[tuple[str, int]]) -> bool:
    """True where kernels can time all calls of a seen step, and the backends counted each of them once."""
    if not step.by_kernels or step.kernels_lost is not None or step.untimed is not None:
        return False
    if any(call.reason is not None or call.start is not None or call.stream == "host" for call in step.calls):
        return False
    return frozenset(Counter(call.group.key for call in step.calls).items()) == issued


def _signature(call: CollectiveCall) -> tuple[Any, ...]:
    members = call.members
    return (
        call.group.key, call.group.name, call.op, call.bytes, call.dtype, call.is_async, call.peer,
        call.stream,
        None if members is None else tuple((m.op, m.bytes, m.dtype, m.peer) for m in members),
    )  # fmt: skip


def _num_named(step: RecordedStep) -> int:
    return sum(call.module is not None for call in step.calls)
