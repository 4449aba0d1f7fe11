"""Phases of a step as the thread that trains goes through them: columns made from its host spans.

What lies before a backward pass is forward: the model, the loss, and what the loop does for them. What lies
behind an update, until the next batch is asked for, is logging. These are times of the host, with all that it
waits for, in the step as the host goes through it; a device does the work later, in its own step.
"""

from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import HOST_KINDS, HostKind, StepPhase
from aorta.records.table import StepTable
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.row_intervals import NONE, RowIntervals, concat, subtract, union

PREFIX, BYTES = "host.phase.", "host.bytes."
WITH_BYTES: tuple[StepPhase, ...] = ("forward", "backward", "optimizer")
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
OF_KIND: dict[HostKind, StepPhase] = {
    "checkpoint": "checkpoint",
    "data": "data",
    "pause": "evaluation",
    "optimizer": "optimizer",
    "backward": "backward",
}
"""The innermost first: a save that an optimizer's hook makes is a checkpoint."""
_UPDATES: tuple[StepPhase, ...] = ("optimizer", "checkpoint", "evaluation")
"""Phases behind which the program logs."""
STEP = f"{PREFIX}step"
AHEAD = 0.1
"""Of a step: where spans of a line begin by more before it and the line does not tell the host's step, as
those of earlier versions, what follows the update may be the next step's: nothing is told."""


def phase_metrics(block: StepTable) -> dict[str, Floats]:
    """host.phase.<phase> in ms for each phase but rest, NaN in lines without a backward pass, which tells
    what is forward; host.phase.step, the host's step; host.bytes.<phase>, the most that was seen allocated.
    Nothing where no line has them.
    """
    memory = {f"{BYTES}{name}": block.numbers(f"memory.{name}_bytes") for name in WITH_BYTES}
    bytes_of = {name: values for name, values in memory.items() if values is not None}
    window_ms = block.numbers("step_ms")
    is_noted = block.has("host_spans")
    if window_ms is None or not is_noted.any():
        return bytes_of
    is_noted &= np.isfinite(window_ms)
    spans, num = block.host_spans(), len(block)
    begin, end = (
        np.where(np.isfinite(told), told, bound)
        for told, bound in zip(spans.window_ms, (np.zeros(num), window_ms), strict=True)
    )
    is_ahead = ~np.isfinite(spans.window_ms[0][spans.row]) & (spans.start_ms < -AHEAD * window_ms[spans.row])
    is_noted[spans.row[is_ahead]] = False
    is_told = np.zeros(num, dtype=bool)
    is_told[spans.row[spans.kind == HOST_KINDS.index("backward")]] = True
    is_told &= is_noted
    if not is_told.any():
        return bytes_of
    of_kind = np.array([PHASES.index(OF_KIND[kind]) if kind in OF_KIND else -1 for kind in HOST_KINDS])
    phase = of_kind[spans.kind]
    chosen = (phase >= 0) & is_told[spans.row]
    row = spans.row[chosen]
    least, most = begin[row], end[row]
    starts, ends = np.clip(spans.start_ms[chosen], least, most), np.clip(spans.end_ms[chosen], least, most)
    is_long = ends > starts
    parts = _Parts(row[is_long], starts[is_long], ends[is_long], phase[chosen][is_long])
    step = {STEP: np.where(is_told, end - begin, np.nan)}
    return step | _sums(_disjoint(parts), is_told, (begin, end)) | bytes_of


class _Parts(NamedTuple):
    """Stretches of windows that do not overlap, in order, each of one phase."""

    row: Ints
    start: Floats
    end: Floats
    phase: Ints
    """Place in PHASES."""

    def chosen(self, which: NDArray[Any]) -> "_Parts":
        """By a mask, or in an order."""
        return _Parts(self.row[which], self.start[which], self.end[which], self.phase[which])


def _sums(parts: _Parts, is_told: Flags, window_ms: tuple[Floats, Floats]) -> dict[str, Floats]:
    """Of the parts, and of the gaps between them: what a gap is, its neighbours tell."""
    num = len(is_told)
    is_first = np.append(True, parts.row[1:] != parts.row[:-1])
    is_last = np.append(is_first[1:], True)
    before_ms = parts.start - np.where(is_first, window_ms[0][parts.row], np.append(0.0, parts.end[:-1]))
    before = np.append(-1, parts.phase[:-1])
    before[is_first] = -1
    after_ms = window_ms[1][parts.row] - parts.end
    data, backward, *pauses = (
        PHASES.index(name) for name in ("data", "backward", "checkpoint", "evaluation")
    )
    is_update, is_pause = np.zeros((2, len(PHASES) + 1), dtype=bool)  # the last is of phase -1, none
    is_update[[PHASES.index(name) for name in _UPDATES]] = is_pause[[data, *pauses]] = True
    is_logging = is_pause[parts.phase] & is_update[before]
    is_logging |= is_first & (parts.phase == data)
    none = np.where(is_told, 0.0, np.nan)[:, None]
    place = parts.row * len(PHASES) + parts.phase
    sums = none + np.bincount(place, parts.end - parts.start, num * len(PHASES)).reshape(num, len(PHASES))
    logging_ms = np.where(is_logging, before_ms, 0.0)
    logging_ms += np.where(is_last & is_update[parts.phase], after_ms, 0.0)
    forward_ms = np.where(parts.phase == backward, before_ms, 0.0)
    for name, ms in (("forward", forward_ms), ("logging", logging_ms)):
        sums[:, PHASES.index(name)] += np.bincount(parts.row, ms, num)
    return {
        f"{PREFIX}{name}": np.ascontiguousarray(sums[:, PHASES.index(name)])
        for name in (*OF_KIND.values(), "forward", "logging")
    }


def _disjoint(parts: _Parts) -> _Parts:
    """Spans, in order, that nest belong to the innermost kind (OF_KIND); few rows have some."""
    # A span that reaches over several others meets the next one at least.
    meets = (parts.row[1:] == parts.row[:-1]) & (parts.start[1:] < parts.end[:-1])
    if not meets.any():
        return parts
    is_nested = np.isin(parts.row, parts.row[1:][meets])
    apart = [parts.chosen(~is_nested)]
    covered = NONE
    for name in OF_KIND.values():
        chosen = is_nested & (parts.phase == PHASES.index(name))
        of_phase = union(RowIntervals(parts.row[chosen], parts.start[chosen], parts.end[chosen]))
        left = subtract(of_phase, covered)
        apart.append(_Parts(*left, np.full(len(left), PHASES.index(name))))
        covered = union(concat(covered, of_phase))
    row, phase = (np.concatenate([getattr(part, name) for part in apart]) for name in ("row", "phase"))
    start, end = (np.concatenate([getattr(part, name) for part in apart]) for name in ("start", "end"))
    return _Parts(row, start, end, phase).chosen(np.lexsort((start, row)))
