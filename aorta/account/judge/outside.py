"""The wall time of a run that is in no judged step: before, between and after them."""

import numpy as np

from aorta.account.judge.judged import last_holds_the_end
from aorta.account.model import Run
from aorta.account.rows import of_the_others, positive
from aorta.timeline.arrays import Floats
from aorta.timeline.types import TRACE_SOURCES

CLOCKS_APART_MS = 1000.0
LONGEST_START_MS = 7 * 86_400_000.0
"""A run that starts for longer has another clock than its lines."""
OUTSIDE_WORDS = {
    "start_up": "before the first step",
    "warm_up": "in warm-up steps",
    "between": "in gaps between steps (an evaluation, a restart)",
    "after": "after the last step",
    "unmarked": "before the device reaches the first step or behind the last",
}


def outside_of(run: Run) -> dict[str, float]:
    """Wall time of the run, from when aorta was loaded to its end, or that of a rank's last step if it is
    later; of a run that was not restarted. Of traces the time that they cover."""
    record = run.noted
    if run.source in TRACE_SOURCES and run.num_steps:
        return _outside_of_trace(run)
    if record.finished_unix_ns is None or len(record.attempts) > 1:
        return {}
    if not run.num_steps:
        return {}
    lengths = np.nan_to_num(run.metrics["step_ms"])
    if last_holds_the_end(run):
        lengths = lengths[:, :-1]
    begin, end = (ns / 1e6 for ns in (record.started_unix_ns, record.finished_unix_ns))
    starts = run.start_unix_ns / 1e6
    first, last = starts[:, 0], starts[:, lengths.shape[1] - 1] + lengths[:, -1]
    between = last - first - lengths.sum(axis=1)
    start_ms = float((first - begin).mean())
    earliest_ms = min(start_ms, float(between.mean()), float((end - last).mean()))
    if earliest_ms < -CLOCKS_APART_MS or start_ms > LONGEST_START_MS:
        return {}  # run.json's clock is not that of the lines
    warm_up = lengths[:, : run.num_warmup].sum(axis=1)
    # A step by the device's clock ends after the next one has begun by the host's: this time is told once.
    parts = {
        "judged": lengths.sum(axis=1) - warm_up + np.minimum(between, 0.0),
        "start_up": first - min(begin, float(first.min())),
        "warm_up": warm_up,
        "between": np.maximum(between, 0.0),
        "after": max(end, float(last.max())) - last,
    }
    return {name: float(values.mean()) for name, values in parts.items()}


def _outside_of_trace(judged: Run) -> dict[str, float]:
    lengths = np.nan_to_num(judged.metrics["step_ms"]).mean(axis=0)
    spans = [total["span_ms"] for total in judged.totals.values()]
    whole_ms = float(np.mean([span or 0.0 for span in spans]))
    warm_up_ms = float(lengths[: judged.num_warmup].sum())
    parts = {"judged": float(lengths.sum()) - warm_up_ms, "warm_up": warm_up_ms}
    return parts | {"unmarked": max(whole_ms - float(lengths.sum()), 0.0)}


def gaps_of(run: Run) -> Floats:
    """[judged step]: mean over ranks of the time after it until the next one began, in ms; NaN where no step
    came next."""
    by_rank = _gaps_of_ranks(run)
    mean: Floats = by_rank.mean(axis=0) if len(by_rank) else np.full(run.num_judged, np.nan)
    return np.maximum(mean, 0.0)


def _gaps_of_ranks(run: Run) -> Floats:
    """[rank, judged step]; no rank where they are not known."""
    if run.source in TRACE_SOURCES or not run.num_steps:
        return np.zeros((0, run.num_judged))
    starts = run.start_unix_ns[:, run.judged_steps] / 1e6
    gaps = starts[:, 1:] - starts[:, :-1] - run.values("step_ms")[:, :-1]
    begins = np.sort([one.started_unix_ns / 1e6 for one in run.noted.attempts])
    attempt = np.searchsorted(begins, starts[0], side="right")
    is_next = (np.diff(run.global_step[run.judged_steps]) == 1) & (np.diff(attempt) == 0)
    # A host that is ahead begins its next step before the device ends one, where steps go on by the host's
    # clock; as much is no gap where they go back to the device's.
    beyond = np.pad(np.cumsum(np.where(is_next, np.nan_to_num(gaps), 0.0), axis=1), ((0, 0), (1, 0)))
    gaps = np.diff(np.maximum.accumulate(beyond, axis=1), axis=1)
    return np.pad(np.where(is_next, gaps, np.nan), ((0, 0), (0, 1)), constant_values=np.nan)


def rank_outside(run: Run) -> int | None:
    """The rank whose long gaps the others, which have none, wait for: in their next step, longer than their
    step before, in which the rank with the gap may have waited for them; or in a barrier behind their update,
    where that step is longer than the one which the other left for an evaluation."""
    gaps = positive(_gaps_of_ranks(run))[:, :-1]
    if len(gaps) < 2 or not gaps.any():
        return None
    row = int(gaps.sum(axis=1).argmax())
    is_long = gaps[row] >= gaps[row].max() / 2
    steps_ms = positive(run.values("step_ms"))
    others_steps_ms = of_the_others(steps_ms)[row]
    waits_ms = float(np.diff(others_steps_ms)[is_long].mean())
    if run.noted.coverage.get("evaluations"):
        waits_ms = max(waits_ms, float((others_steps_ms - steps_ms[row])[:-1][is_long].mean()))
    own_ms, others_ms = (float(ms[row, is_long].mean()) for ms in (gaps, of_the_others(gaps)))
    return run.ranks[row] if others_ms <= own_ms / 4 and waits_ms >= own_ms / 2 else None
