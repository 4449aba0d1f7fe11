"""Predictions: what a step would take with changes, and what would bound it next."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aorta.replay.changes.change import Change
from aorta.replay.changes.host import ScaleHost
from aorta.replay.graph import StepGraph
from aorta.replay.path import PathPart, critical_path, summed
from aorta.replay.run import Replayed, drafted, host_floor_ms, replay, replay_draft

MOST_SPEEDUP = 4.0
"""Of the host without a profiler against with one; what would need more is no matter of the profiler."""


@dataclass(frozen=True, slots=True)
class Prediction:
    changes: tuple[str, ...]
    base_ms: float
    """Median over the traced steps of the slowest rank, as replayed without changes."""
    predicted_ms: float
    interval_ms: tuple[float, float]
    """Smallest and largest over the traced steps, widened by the replay's own error."""
    next_parts: tuple[PathPart, ...]
    """The critical path of the changed step, summed, the longest first."""
    notes: tuple[str, ...]

    @property
    def change_ms(self) -> float:
        return self.predicted_ms - self.base_ms


def predict(
    steps: Sequence[StepGraph], changes: Sequence[Change], *, untraced_ms: float | None = None
) -> Prediction:
    """The step with these changes, from the steps of one trace.

    untraced_ms: the median step of the same run without a profiler. The profiler slows the host down, so the
    host's speed is set such that the unchanged replay takes this long, where it can be.
    """
    steady = settled(steps)
    notes: list[str] = []
    before: list[Change] = []
    if untraced_ms is not None:
        calibrated = profiler_cost(steady, untraced_ms)
        if calibrated is None:
            notes.append(
                "the untraced step cannot be reached by a faster host: the difference is left as it is"
            )
        else:
            before = [calibrated]
    base, _ = _times(steady, before)
    changed, last = _times(steady, [*before, *changes])
    base_ms, traced_ms = float(np.median(base)), float(np.median(changed))
    scale = 1.0
    if untraced_ms is not None and base_ms > 0:
        scale = untraced_ms / base_ms
    errors = [abs(_as_it_is(step)) for step in steady]
    spread = max(errors) * traced_ms
    return Prediction(
        changes=tuple(change.text for change in changes),
        base_ms=base_ms * scale,
        predicted_ms=traced_ms * scale,
        interval_ms=((min(changed) - spread) * scale, (max(changed) + spread) * scale),
        next_parts=tuple(summed(critical_path(last))),
        notes=(*notes, *last.notes),
    )


def settled(steps: Sequence[StepGraph]) -> Sequence[StepGraph]:
    """Without the first traced step where there are others: a change needs a step to show in full."""
    return steps[1:] if len(steps) > 1 else steps


def profiler_cost(steps: Sequence[StepGraph], untraced_ms: float) -> ScaleHost | None:
    """The speed of the host at which the replay takes as long as untraced steps; None where no speed does."""
    slow, fast = 1.0, 1.0 / MOST_SPEEDUP
    if _median_ms(steps, []) <= untraced_ms:
        return ScaleHost("host without profiler", 1.0)
    if _median_ms(steps, [ScaleHost("", fast)]) > untraced_ms * 1.002:
        return None
    for _ in range(12):
        middle = (slow + fast) / 2
        if _median_ms(steps, [ScaleHost("", middle)]) > untraced_ms:
            slow = middle
        else:
            fast = middle
    return ScaleHost("host without profiler", (slow + fast) / 2)


def _times(steps: Sequence[StepGraph], changes: Sequence[Change]) -> tuple[list[float], Replayed]:
    """Milliseconds of each step, and the replay of the last one."""
    draft = drafted(steps[0], changes)
    first = replay_draft(steps[0], draft)
    times = [max(first.at(step).slowest_ms, host_floor_ms(step, draft)) for step in steps]
    return times, first.at(steps[-1])


def _median_ms(steps: Sequence[StepGraph], changes: Sequence[Change]) -> float:
    return float(np.median(_times(steps, changes)[0]))


def _as_it_is(step: StepGraph) -> float:
    replayed: Replayed = replay(step)
    return max((replayed.error(end.rank) for end in step.ends), key=abs)
