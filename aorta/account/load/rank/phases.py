"""Phases of a step as the thread that trains goes through them: columns made from its host spans.

What lies before a backward pass is forward: the model, the loss, and what the loop does for them. What lies
behind an update, until the next batch is asked for, is logging. These are times of the host, with all that it
waits for; on a device the work itself comes later.
"""

from typing import get_args

import numpy as np

from aorta.account.load.rank.columns import Floats
from aorta.records.schema import HOST_KINDS, HostKind, StepPhase
from aorta.records.table import StepTable
from aorta.timeline.row_intervals import NONE, RowIntervals, clip, concat, lengths_ms, subtract, union

PREFIX = "host.phase."
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


def phase_metrics(block: StepTable) -> dict[str, Floats]:
    """host.phase.<phase> in ms for each phase but rest, NaN in lines without a backward pass.

    That tells what is forward. Nothing where no line has one.
    """
    window_ms = block.numbers("step_ms")
    is_noted = block.has("host_spans")
    if window_ms is None or not is_noted.any():
        return {}
    is_noted &= np.isfinite(window_ms)
    spans, num = block.host_spans(), len(block)
    is_told = np.zeros(num, dtype=bool)
    is_told[spans.row[spans.kind == HOST_KINDS.index("backward")]] = True
    is_told &= is_noted
    if not is_told.any():
        return {}
    is_known = is_told[spans.row]
    covered, by_phase = NONE, {}
    for kind, phase in OF_KIND.items():
        chosen = (spans.kind == HOST_KINDS.index(kind)) & is_known
        of_kind = union(RowIntervals(spans.row[chosen], spans.start_ms[chosen], spans.end_ms[chosen]))
        of_kind = clip(of_kind, np.zeros(num), window_ms)
        by_phase[phase] = subtract(of_kind, covered)
        covered = union(concat(covered, of_kind))
    rows = np.flatnonzero(is_told)
    gaps = subtract(union(RowIntervals(rows, np.zeros(len(rows)), window_ms[rows])), covered)
    before, behind = _neighbours(gaps, by_phase)
    is_forward = behind == PHASES.index("backward")
    is_behind_update = np.isin(before, [PHASES.index(phase) for phase in _UPDATES])
    is_first = (before < 0) & (behind == PHASES.index("data"))
    is_ahead = np.isin(behind, [-1, *(PHASES.index(phase) for phase in ("data", "checkpoint", "evaluation"))])
    by_phase["forward"] = gaps.chosen(is_forward)
    by_phase["logging"] = gaps.chosen(~is_forward & is_ahead & (is_behind_update | is_first))
    none = np.where(is_told, 0.0, np.nan)
    return {f"{PREFIX}{phase}": none + lengths_ms(part, num) for phase, part in by_phase.items()}


def _neighbours(
    gaps: RowIntervals, by_phase: dict[StepPhase, RowIntervals]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """[gap]: the phases before and behind it in its row, by their places in PHASES; -1: the window's end."""
    parts = concat(*by_phase.values())
    phases = np.concatenate([np.full(len(part), PHASES.index(name)) for name, part in by_phase.items()])
    width = 1.0 + max(float(parts.end.max(initial=0.0)), float(gaps.end.max(initial=0.0)))
    keys = parts.row * width + parts.start
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], gaps.row * width + (gaps.start + gaps.end) / 2)
    phases, rows = np.append(phases[order], -1), np.append(parts.row[order], -1)
    before = np.where(rows[place - 1] == gaps.row, phases[place - 1], -1)
    behind = np.where(rows[place] == gaps.row, phases[place], -1)
    return before, behind
