"""Predictions: what a step would take with changes, and what would bound it next."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from aorta.why.replay.changes.change import Change
from aorta.why.replay.changes.host import scale_calls, typical_host
from aorta.why.replay.draft import Draft
from aorta.why.replay.graph import StepGraph, TraceGraph
from aorta.why.replay.path import PathPart, critical_path, summed
from aorta.why.replay.run import Replayed, drafted, host_floor_ms, replay, replay_draft

EVENT_COST_US = 1.3
"""Time that torch.profiler takes to record one host event, used if the untraced step does not tell: the
mean of two hosts (1.7 and 0.9; torch 2.11, CUPTI 13; docs/evidence.md)."""
EVENT_COSTS_US = (0.8, 2.0)
"""Least and most of it in all cases that tell it."""
LEAST_SPEED = 0.25
MOST_SPEED_CHANGE = 0.35
"""Largest change from the usual speed of the host."""
MOST_SLOWER = 1.0
"""A host is shared, and another minute it is slower than when it was traced."""
HALVINGS = 6
MODEL_ERROR = 0.08
"""Half width of the interval around a prediction: of 44 changes that were really made on 2 H200, 80 % took
a step within this part of the predicted one (docs/evidence.md, "Replay and what-ifs")."""
MODEL_ERROR_BEYOND_QUARTILES = 0.03
"""Half width beyond the quartiles of the unchanged steps: of 48 changes, half of them predicted blind, 45
took a step within that range."""
UNSTEADY = 0.05
"""Distance of the quartiles of unchanged steps, from which on it is said."""
ALIKE = 0.005
"""Difference of errors that says nothing."""
DRIFT = 0.03
"""Change from minute to minute of a step that the device bounds, whatever the host does."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The step that changes would give, and what would bound it."""

    changes: tuple[str, ...]
    base_ms: float
    """Median over the traced steps of the slowest rank, as replayed without changes."""
    predicted_ms: float
    interval_ms: tuple[float, float]
    """Smallest and largest over the traced steps, and over the quartiles of untraced ones where they are
    known, widened by the replay's own error and by what such predictions were off."""
    next_parts: tuple[PathPart, ...]
    """The critical path of the changed step, summed, the longest first."""
    notes: tuple[str, ...]
    is_host_bound: bool = False
    """The replayed steps are shorter than what the host needs for one: they use up what was queued before."""

    @property
    def change_ms(self) -> float:
        return self.predicted_ms - self.base_ms


def predict(
    steps: Sequence[StepGraph],
    changes: Sequence[Change],
    *,
    untraced_ms: float | None = None,
    untraced_quartiles_ms: tuple[float, float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Prediction:
    """The step with these changes, from the steps of one trace.

    untraced_ms: the median step of the same run without a profiler. The profiler slows the host down, so the
    host's speed is set such that the unchanged replay takes this long, where it can be.
        speeds: those of host_speeds, where it was asked before.
    untraced_quartiles_ms: of the same steps as untraced_ms; the interval then spans what follows from each.
    """
    steady = settled(steps)
    if untraced_ms is None:
        speeds = [1.0]
    elif speeds is None:
        speeds = host_speeds(steady, untraced_ms)
    with_speed = [[] if untraced_ms is None else without_profiler(speed) for speed in speeds]
    base, _ = _times(steady, with_speed[0])
    base_ms = float(np.median(base))
    # A replay gives ratios: where the untraced step is known, it is the base of them.
    scale = 1.0
    if untraced_ms is not None and base_ms > 0:
        scale = untraced_ms / base_ms
    replays = [_times(steady, [*host, *changes]) for host in with_speed]
    changed, last = replays[0]
    times = [time * scale for step_times, _ in replays for time in step_times]
    for quartile_ms in untraced_quartiles_ms or ():
        times += _times_at(steady, changes, quartile_ms)
    errors = [max(abs(replay(step).error(end.rank)) for end in step.ends) for step in steady]
    model_error = MODEL_ERROR if untraced_quartiles_ms is None else MODEL_ERROR_BEYOND_QUARTILES
    spread = (max(errors) + model_error) * float(np.median(changed)) * scale
    return Prediction(
        changes=tuple(change.text for change in changes),
        base_ms=base_ms * scale,
        predicted_ms=float(np.median(changed)) * scale,
        interval_ms=(min(times) - spread, max(times) + spread),
        next_parts=tuple(summed(critical_path(last))),
        notes=(*last.notes, *_unsteady(untraced_ms, untraced_quartiles_ms)),
        is_host_bound=float(np.median([last.of_step(step).slowest_ms for step in steady]))
        < (1 - ALIKE) * float(np.median(changed)),
    )


def _unsteady(median_ms: float | None, quartiles_ms: tuple[float, float] | None) -> list[str]:
    if median_ms is None or quartiles_ms is None:
        return []
    distance = (quartiles_ms[1] - quartiles_ms[0]) / median_ms
    if distance <= UNSTEADY:
        return []
    return [
        f"the run's own steps differ by {100 * distance:.0f} % between quartiles: so may the changed ones"
    ]


def _times_at(steps: Sequence[StepGraph], changes: Sequence[Change], untraced_ms: float) -> list[float]:
    """Milliseconds of each changed step of a run whose unchanged ones take this long."""
    host = without_profiler(host_speeds(steps, untraced_ms)[0])
    base_ms = float(np.median(_times(steps, host)[0]))
    return [time * untraced_ms / base_ms for time in _times(steps, [*host, *changes])[0]]


def settled(steps: Sequence[StepGraph]) -> Sequence[StepGraph]:
    """The traced steps without the first, if there are others: a change needs a step to show in full."""
    return steps[1:] if len(steps) > 1 else steps


def without_profiler(speed: float) -> list[Change]:
    """The host as it is without a profiler: every call as long as usual, times the speed."""
    faster = partial(scale_calls, factor=speed)
    return [Change("typical host", typical_host), Change("host without profiler", faster)]


def host_speeds(steps: Sequence[StepGraph], untraced_ms: float) -> list[float]:
    """Factors of the host's time without a profiler: the likely one, then the least and the most that agree
    with the untraced step where it does not settle the matter.

    Recording a host event takes EVENT_COST_US; where another speed gives the untraced step, the nearest of
    those. A step that the device bounds tells no more than that the host is not slower.
    """
    step_ms = _StepAtSpeed(steps)
    host_ms = step_ms.replays.host_ms
    if host_ms <= 0:
        return [1.0]
    events_ms = steps[0].trace.host_events / 1e3
    usual, *range_of_costs = (
        max(LEAST_SPEED, 1 - cost * events_ms / host_ms) for cost in (EVENT_COST_US, *EVENT_COSTS_US)
    )
    low, high = max(LEAST_SPEED, usual - MOST_SPEED_CHANGE), usual + MOST_SLOWER
    target = float(np.clip(untraced_ms, step_ms(low), step_ms(high)))
    is_device_bound = step_ms(usual) <= (1 + ALIKE) * step_ms(low)

    def agrees(speed: float) -> bool:
        return abs(step_ms(speed) / target - 1) <= (DRIFT if is_device_bound and speed <= usual else ALIKE)

    if not agrees(usual):
        # Step time grows with the host's time, so the speed is found by halving towards the target.
        outside, inside = usual, low if step_ms(usual) > target else high
        for _ in range(HALVINGS):
            middle = (outside + inside) / 2
            if abs(step_ms(middle) / target - 1) <= ALIKE or (step_ms(middle) > target) != (
                step_ms(outside) > target
            ):
                inside = middle
            else:
                outside = middle
        return [inside]
    return [usual, *(speed for speed in range_of_costs if agrees(speed))]


@dataclass(slots=True)
class _Replays:
    """Replays of unchanged steps with the usual host, kept by graph; holds no graph itself."""

    length_ns: list[float]
    host_ms: float
    by_speed_ms: dict[float, float]


_KNOWN: "WeakKeyDictionary[TraceGraph, dict[tuple[int, ...], _Replays]]" = WeakKeyDictionary()


class _StepAtSpeed:
    """The median unchanged step with its host at another speed; each speed is replayed once for a graph."""

    def __init__(self, steps: Sequence[StepGraph]) -> None:
        self.steps, graph = steps, steps[0].trace
        known = _KNOWN.setdefault(graph, {})
        places = tuple(step.index for step in steps)
        if places not in known:
            draft = Draft.as_measured(graph)
            typical_host(draft)
            host_ms = float(np.median([host_floor_ms(step, draft) for step in steps]))
            known[places] = _Replays(draft.length_ns, host_ms, {})
        self.replays = known[places]

    def __call__(self, speed: float) -> float:
        by_speed_ms = self.replays.by_speed_ms
        if speed not in by_speed_ms:
            draft = Draft.as_measured(self.steps[0].trace)
            draft.length_ns = list(self.replays.length_ns)
            scale_calls(draft, speed)
            by_speed_ms[speed] = float(np.median(_step_times(self.steps, draft)[0]))
        return by_speed_ms[speed]


def _times(steps: Sequence[StepGraph], changes: Sequence[Change]) -> tuple[list[float], Replayed]:
    """Milliseconds of each step, and the replay of the last one."""
    return _step_times(steps, drafted(steps[0], changes))


def _step_times(steps: Sequence[StepGraph], draft: Draft) -> tuple[list[float], Replayed]:
    first = replay_draft(steps[0], draft)
    times = [max(first.of_step(step).slowest_ms, host_floor_ms(step, draft)) for step in steps]
    return times, first.of_step(steps[-1])
