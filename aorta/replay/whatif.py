"""Predictions: what a step would take with changes, and what would bound it next."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aorta.replay.changes.change import Change
from aorta.replay.changes.host import ScaleHost, TypicalHost
from aorta.replay.graph import StepGraph
from aorta.replay.path import PathPart, critical_path, summed
from aorta.replay.run import Replayed, drafted, host_floor_ms, replay, replay_draft

EVENT_COST_US = 1.7
"""What torch.profiler takes to record one event of the host: 1.4 to 2.0 on four cases that the host bounds
(torch 2.11, CUPTI 13; docs/validation.md)."""
LEAST_SPEED = 0.25
SPEEDS = (-0.15, -0.125, -0.1, -0.075, -0.05, -0.025, 0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15)
"""Tried about the usual one."""
MODEL_ERROR = 0.08
"""Of 44 changes that were really made on 2 H200, 80 % took a step within this part of the predicted one
(docs/validation.md, "Replay and what-ifs")."""
ALIKE = 0.005
"""Difference of errors that says nothing."""


@dataclass(frozen=True, slots=True)
class Prediction:
    changes: tuple[str, ...]
    base_ms: float
    """Median over the traced steps of the slowest rank, as replayed without changes."""
    predicted_ms: float
    interval_ms: tuple[float, float]
    """Smallest and largest over the traced steps, widened by the replay's own error and by MODEL_ERROR."""
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
    untraced: list[Change] = []
    if untraced_ms is not None:
        untraced = profiler_cost(steady, untraced_ms)
    base, _ = _times(steady, untraced)
    changed, last = _times(steady, [*untraced, *changes])
    base_ms, traced_ms = float(np.median(base)), float(np.median(changed))
    scale = 1.0
    if untraced_ms is not None and base_ms > 0:
        scale = untraced_ms / base_ms
    errors = [abs(_as_it_is(step)) for step in steady]
    spread = (max(errors) + MODEL_ERROR) * traced_ms
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


def profiler_cost(steps: Sequence[StepGraph], untraced_ms: float) -> list[Change]:
    """The host as it is without a profiler: every call as long as usual, and faster by what recording costs.

    Recording a host event takes EVENT_COST_US; where another speed near that one gives the untraced step,
    that one. A step that the device bounds tells nothing of the host, so the usual cost is taken there.
    """
    typical = TypicalHost()
    host_ms = float(np.median([host_floor_ms(step, drafted(step, [typical])) for step in steps]))
    usual = 1.0
    if host_ms > 0:
        usual = max(LEAST_SPEED, 1 - EVENT_COST_US * steps[0].trace.host_events / 1e3 / host_ms)
    speeds = [usual + change for change in SPEEDS if LEAST_SPEED <= usual + change <= 1.0] or [usual]
    errors = {
        speed: abs(_median_ms(steps, [typical, ScaleHost("", speed)]) / untraced_ms - 1) for speed in speeds
    }
    best = min(errors.values())
    speed = min((s for s in speeds if errors[s] <= best + ALIKE), key=lambda s: abs(s - usual))
    return [typical, ScaleHost("host without profiler", speed)]


def _times(steps: Sequence[StepGraph], changes: Sequence[Change]) -> tuple[list[float], Replayed]:
    """Milliseconds of each step, and the replay of the last one."""
    draft = drafted(steps[0], changes)
    first = replay_draft(steps[0], draft)
    times = [max(first.of_step(step).slowest_ms, host_floor_ms(step, draft)) for step in steps]
    return times, first.of_step(steps[-1])


def _median_ms(steps: Sequence[StepGraph], changes: Sequence[Change]) -> float:
    return float(np.median(_times(steps, changes)[0]))


def _as_it_is(step: StepGraph) -> float:
    replayed: Replayed = replay(step)
    return max((replayed.error(end.rank) for end in step.ends), key=abs)
