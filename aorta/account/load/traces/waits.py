"""Waits of a run of traces, whose collectives are matched by order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.collectives import add_waits_of_kinds
from aorta.account.load.waits import RankWaits, StepWaits, add_waits, arrivals
from aorta.account.model import Arrivals, CollectiveKind, Run
from aorta.timeline.intervals import clip, length_ms
from aorta.timeline.matching import RankCalls
from aorta.timeline.waits import RankView, exposed_waiting
from aorta.traces.model import NS_PER_MS

Row = tuple[RankCalls, NDArray[np.int64], dict[int, tuple[float, float]]]
"""Of one rank: its calls, the global step that issued each, and the steps' windows in ms from
RankCalls.origin_ns."""


def add_waits_of_traces(run: Run, rows: Sequence[Row], view: RankView) -> None:
    """Adds exposed_wait_ms, and waits and transfers per operation and kind of collective.

    Nothing is added for a rank and step with a collective between ranks that was not matched."""
    if len(run.ranks) < 2:
        return
    place = {int(step): i for i, step in enumerate(run.global_step)}
    exposed_wait = np.full((len(run.ranks), run.num_steps), np.nan)
    step_waits = []
    for r, ((calls, step_of_call, windows), waits) in enumerate(zip(rows, view.waits, strict=True)):
        unknown = np.isnan(waits.wait_ms)
        start_ms, end_ms = ((ns - calls.origin_ns) / NS_PER_MS for ns in (calls.start_ns, calls.end_ns))
        waiting = exposed_waiting(
            start_ms[~unknown], (start_ms + waits.wait_ms)[~unknown], end_ms[~unknown], calls.exposed
        )
        for step, window in windows.items():
            if step in place and not unknown[(start_ms < window[1]) & (end_ms > window[0])].any():
                exposed_wait[r, place[step]] = length_ms(clip(waiting, *window))
        column = np.array([place.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64)
        step_waits.append(StepWaits(np.array(calls.op, dtype=str), column, waits))
    if np.isfinite(exposed_wait).any():
        run.metrics["exposed_wait_ms"] = exposed_wait
    add_waits(run.metrics, step_waits, run.num_steps)
    detailed = {int(step): i for i, step in enumerate(run.global_step[run.has_collectives])}
    for r, ((calls, step_of_call, _), waits) in enumerate(zip(rows, view.waits, strict=True)):
        column = np.array([detailed.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64)
        add_waits_of_kinds([(kind, _is_of(kind, calls)) for kind in run.collectives], r, column, waits)


def _is_of(kind: CollectiveKind, calls: RankCalls) -> NDArray[np.bool_]:
    """[call]: as far as the trace tells, it is of this kind."""
    belongs = [
        op == kind.op
        and (kind.bytes is None or size == kind.bytes)
        and (kind.num_ranks is None or key.ranks is None or len(key.ranks) == kind.num_ranks)
        for op, size, key in zip(calls.op, calls.size_bytes, calls.group, strict=True)
    ]
    return np.array(belongs, dtype=bool)


def arrivals_of_traces(run: Run, rows: Sequence[Row], view: RankView) -> Arrivals | None:
    """None where no collective was matched."""
    if len(run.ranks) < 2 or not any(view.num_matched):
        return None
    place = {int(step): i for i, step in enumerate(run.global_step)}
    of_ranks = [
        RankWaits(
            start_ns=calls.start_ns,
            column=np.array([place.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64),
            num_ranks=np.array(
                [len(key.ranks or ()) or len(run.ranks) for key in calls.group], dtype=np.int64
            ),
            wait_ms=waits.wait_ms,
            late_rank=waits.late_rank,
        )
        for (calls, step_of_call, _), waits in zip(rows, view.waits, strict=True)
    ]
    return arrivals(run.ranks, of_ranks, run.num_steps)
