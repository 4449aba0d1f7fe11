"""A rank that is late in the steps that the overhead left out, and not in the recorded ones.

Of such a step there are the host's times alone: its start, its last backward pass, its first optimizer. The
ranks that wait meet all of these marks before the one that they wait for, which comes to one of them behind
everybody, by more than at another one and than in recorded steps. Where these are not shorter for it nobody
waits: a host may be behind the others' while its device is not.
"""

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.exposed import Floats
from aorta.account.load.rank.host import CPU, READY, UNTIL_BACKWARD, UNTIL_UPDATE
from aorta.account.model import JudgedRun
from aorta.account.numbers import quantity
from aorta.why.causes.finding import WAIT, CauseFinding, of_the_others
from aorta.why.causes.losses.waiting import LEAST_SIGNS, lasts, signs

FEWEST_STEPS = 8
"""Left out, and recorded, from which on they are compared."""
LEAST_SHARE = 0.1
"""Of such a step, from which on it is told: of 240 recordings two came to 0.045 by chance."""
MOST_OF_IT = 0.5
"""Of its lateness, from which on CPU time, or other programs on its core, are the reason."""
SIZES = 1.4
"""Ratio, at most, of what steps are longer by to what a rank is behind at every mark."""
MOST_UNLIKE = 0.1
"""Of the steps, in which a rank may be behind while they are no longer, or the other way round."""
ALL = "every mark"
MARKS = {
    ALL: "every mark of its steps",
    "": "its next step",
    UNTIL_BACKWARD: "the backward pass",
    UNTIL_UPDATE: "the optimizer",
}
"""Columns of ms after the step's start, and what begins there."""


def late_in_left_out(judged: JudgedRun) -> CauseFinding | None:
    """What each of the judged steps that were left out would be shorter by."""
    run = judged.run
    step_ms = judged.values("step_ms")
    is_left_out = steps_left_out(judged)
    is_known = ~is_left_out & np.isfinite(step_ms).all(axis=0)
    if len(run.ranks) < 2 or min(is_left_out.sum(), is_known.sum()) < FEWEST_STEPS:
        return None
    # Medians: blocks behind a change are recorded, in which the rank is late as well.
    more_ms = step_ms.mean(axis=0) - np.median(step_ms[:, is_known].mean(axis=0))
    longer_ms = float(more_ms[is_left_out].mean())
    behind_ms = {mark: _behind(at_ms) for mark, at_ms in _marks(judged).items()}
    found = _at_all_marks(behind_ms, more_ms, is_left_out, is_known)
    found = found or _latest(behind_ms, is_left_out, is_known)
    if found is None:
        return None
    row, mark, late_ms, usual_ms = found
    mean_ms = float(late_ms.mean())
    cost_ms = min(mean_ms, longer_ms)
    if (
        cost_ms < LEAST_SHARE * float(step_ms[:, is_left_out].mean())
        or (run.clock_residual_us or 0.0) / 1e3 > mean_ms
    ):
        return None
    # Of a few steps the sizes differ too much: then it has to be late in nearly every one.
    if max(signs(late_ms), signs(np.sign(late_ms))) < LEAST_SIGNS or not lasts(late_ms, knows_busy=True):
        return None
    return CauseFinding(
        "late_rank",
        late_ms * (cost_ms / mean_ms),
        takes={WAIT: 1.0},
        facts={"who": f"rank {run.ranks[row]}", "op": _doing(judged, row, is_left_out, cost_ms)},
        evidence=[
            f"in {int(is_left_out.sum()):,} judged steps that the overhead left out it comes to"
            f" {MARKS[mark]} {quantity(mean_ms + usual_ms, 'ms')} behind the others, in recorded"
            f" ones {quantity(usual_ms, 'ms')}; steps take {quantity(longer_ms, 'ms')} more then"
        ],
        rank=run.ranks[row],
        is_sure=True,
    )


def steps_left_out(judged: JudgedRun) -> NDArray[np.bool_]:
    """[judged step]: left out by the overhead on some rank. After a slow step each rank judges by itself what
    is recorded."""
    if not judged.run.left_out.any():
        return np.zeros(judged.num_steps, dtype=bool)
    is_timed, has_length = (
        np.isfinite(judged.values(name)).all(axis=0) for name in ("compute_ms", "step_ms")
    )
    result: NDArray[np.bool_] = np.logical_and(~is_timed, has_length)
    return result


def _marks(judged: JudgedRun) -> dict[str, Floats]:
    """[rank, judged step] by mark: ms after the first start of the step, on a common clock."""
    run, judged_steps = judged.run, slice(judged.num_warmup, None)
    moved_ns = np.array([run.clock_offset_ns.get(rank, 0) for rank in run.ranks], dtype=np.int64)
    start_ns = run.start_unix_ns[:, judged_steps] + moved_ns[:, None]
    start_ms = (start_ns - start_ns.min(axis=0)) / 1e6
    marks = {"": np.append(start_ms[:, 1:], np.full((len(start_ms), 1), np.nan), axis=1)}
    for name in (UNTIL_BACKWARD, UNTIL_UPDATE):
        if name in run.host_parts:
            marks[name] = start_ms + run.host_parts[name][:, judged_steps]
    return marks


def _behind(at_ms: Floats) -> Floats:
    """[rank, step]: how long after the last one of the others it comes; below 0 where it comes before it."""
    in_order = np.sort(at_ms, axis=0)
    last, before = in_order[-1], in_order[-2]
    behind_ms: Floats = np.where(at_ms == last, last - before, at_ms - last)
    return behind_ms


def _at_all_marks(
    behind_ms: dict[str, Floats], more_ms: Floats, is_left_out: NDArray[np.bool_], is_known: NDArray[np.bool_]
) -> tuple[int, str, Floats, float] | None:
    """As `_latest`, of a row that is behind at every mark: the others wait between two steps' marks.

    Steps have to be longer by as much as it is behind, in the very steps in which it is: else its device has
    work queued meanwhile, and nobody waits.
    """
    least_ms = np.min([np.nan_to_num(at_ms) for at_ms in behind_ms.values()], axis=0)
    row = int(np.argmax(np.median(least_ms[:, is_left_out], axis=1)))
    usual_ms = max(float(np.median(least_ms[row, is_known])), 0.0)
    late_ms = least_ms[row] - usual_ms
    size_ms = float(np.median(late_ms[is_left_out]))
    is_late, is_longer = late_ms > size_ms / 2, more_ms > size_ms / 2
    is_unlike = (is_late != is_longer)[is_left_out | is_known]
    if size_ms <= 0 or is_unlike.mean() > MOST_UNLIKE or not is_late[is_left_out].any():
        return None
    ratio = float(np.median(more_ms[is_late & is_left_out])) / size_ms
    return (row, ALL, late_ms[is_left_out], usual_ms) if 1 / SIZES < ratio < SIZES else None


def _latest(
    behind_ms: dict[str, Floats], is_left_out: NDArray[np.bool_], is_known: NDArray[np.bool_]
) -> tuple[int, str, Floats, float] | None:
    """The row that falls behind most within a step, at which mark, by how much in each step that was left
    out beyond recorded ones, and in those. None without two marks.

    A host that is behind at all of them delays nobody as long as its device has work queued.
    """
    best: tuple[int, str, Floats, float] | None = None
    for mark, at_mark in behind_ms.items():
        others = [np.maximum(np.nan_to_num(at_ms), 0.0) for name, at_ms in behind_ms.items() if name != mark]
        for row, at_ms in enumerate(np.nan_to_num(at_mark)):
            if not others:
                return None
            least = min((other[row] for other in others), key=lambda ms: float(ms[is_left_out].mean()))
            usual_ms = max(float(np.median((at_ms - least)[is_known])), 0.0)
            late_ms = (at_ms - least)[is_left_out] - usual_ms
            if best is None or late_ms.mean() > best[2].mean():
                best = row, mark, late_ms, usual_ms
    return best


def _doing(judged: JudgedRun, row: int, is_left_out: NDArray[np.bool_], cost_ms: float) -> str:
    """What the late rank's thread does beyond the others': it works, is starved of its core, or sleeps."""
    parts, judged_steps = judged.run.host_parts, slice(judged.num_warmup, None)
    for op, name in (("starved", READY), ("works", CPU)):
        if name in parts:
            used = np.nan_to_num(parts[name][:, judged_steps][:, is_left_out])
            if float((used[row] - of_the_others(used)[row]).mean()) >= MOST_OF_IT * cost_ms:
                return op
    return "sleeps"
