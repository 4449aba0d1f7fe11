"""Who is late: the rank that the others wait for, by what there is to tell it.

Of recorded steps that is what each rank costs the others (late_of_recorded), of steps that the overhead left
out the host's marks (late_in_left_out), of many ranks of a running job their digests (late_in_digests). What
one of them finds and why it is late, is a cause (aorta.why.causes), whose rank every output shows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aorta.account.judge.occasional import Occasions, occasions
from aorta.account.load.rank.host import CPU, READY, UNTIL_BACKWARD, UNTIL_UPDATE
from aorta.account.model import Run
from aorta.account.rows import of_the_others
from aorta.records.digests import Slots
from aorta.timeline.arrays import Flags, Floats, Ints

ONE_RANK = 0.6
"""Part of a loss from which on it is that of one rank."""
LEAST_SIGNS = 3.3
"""Standard deviations of a sum with signs by chance: seen in one of 2000."""
STRETCHES = 4
"""Of the run."""
MIN_STRETCH = 8
"""Steps of it."""
LASTING = 0.4
"""Lateness of a stretch over that of the run."""
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
LATE_SHARE = 0.05
"""Part of a step by which a rank has to be late, and in NOISE_SCALES of what ranks differ by as a rule."""
NOISE_SCALES = 8.0
MOST_LATE_SHARE = 0.02
"""Part of the ranks, or one node's, of which more than that are no stragglers: they are made so."""
NODE_RANKS = 8


@dataclass(frozen=True, slots=True)
class LateRank:
    """The rank that the others wait for."""

    rank: int
    wait_ms: float
    """What the step would be shorter by."""


# ---- recorded steps -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Lateness:
    """The rank that the others wait for in recorded steps, and when."""

    row: int
    ms: Floats
    """[step]"""
    occasions: Occasions | None
    """Steps where it is late, if it is not in most."""
    is_sure: bool
    """It is late in more steps than chance would have it."""

    @property
    def steps(self) -> "slice | Flags":
        return slice(None) if self.occasions is None else self.occasions.is_slow

    @property
    def when(self) -> str:
        return "a step" if self.occasions is None else "in such a step"


def late_of_recorded(lost_ms: Floats, global_step: Ints, knows_busy: bool) -> Lateness | None:
    """The rank that costs the others most, by lost_ms [rank, step]. None where it is no rank for sure: it
    must be late in most steps and all along the run, or in steps that come with a period or stand apart.

    knows_busy: records tell how busy the machine was.
    """
    by_rank = lost_ms.sum(axis=1)
    total = float(by_rank.sum())
    if total <= 0:
        return None
    worst = int(np.argmax(by_rank))
    # What the others cost this one comes back when it is no longer late; only the balance is lost.
    net = lost_ms[worst] - of_the_others(lost_ms)[worst]
    is_sure = signs(net) >= LEAST_SIGNS and lasts(net, knows_busy)
    is_usual = by_rank[worst] >= ONE_RANK * total and is_late_in_most(net, knows_busy)
    slow_steps = occasions(net, global_step)
    if slow_steps is not None and slow_steps.excess_ms.mean() >= np.median(net[~slow_steps.is_slow]):
        return Lateness(worst, net if is_usual else slow_steps.excess_ms, slow_steps, is_sure=True)
    return Lateness(worst, net, None, is_sure) if is_usual else None


def is_late_in_most(net: Floats, knows_busy: bool) -> bool:
    """Whether it is, all along the run, and be it that chance would not have it in as many steps."""
    is_usual = (net > 0).mean() >= ONE_RANK or signs(net) >= LEAST_SIGNS
    return bool(is_usual and lasts(net, knows_busy))


def signs(net: Floats) -> float:
    """The sum over what it varies by where each step's sign is chance, as with ranks that are late in turn:
    one long step makes 1, however long it is."""
    size = float(np.sqrt((net**2).sum()))
    return float(net.sum()) / size if size > 0 else 0.0


def lasts(net: Floats, knows_busy: bool) -> bool:
    """Whether the stretches of the run, all but one, show what the whole shows: a machine that is busy for a
    while makes no rank late. All of them where no record tells how busy it was."""
    num_stretches = min(STRETCHES, len(net) // MIN_STRETCH)
    if num_stretches < 2:
        return True
    means = sorted(float(stretch.mean()) for stretch in np.array_split(net, num_stretches))
    return means[1 if knows_busy and num_stretches == STRETCHES else 0] >= LASTING * float(net.mean()) > 0


# ---- steps that were left out -------------------------------------------------------------------------


class LateLeftOut(NamedTuple):
    """A rank that is late in steps that were left out."""

    row: int
    mark: str
    """Of MARKS: what it comes to behind the others."""
    late_ms: Floats
    """[step that was left out]: how late it is beyond recorded steps."""
    usual_ms: float
    """How late it is in recorded ones."""
    longer_ms: float
    """By what steps that were left out are longer."""
    op: str = ""
    """What its thread does meanwhile beyond the others': works, is starved, sleeps."""

    @property
    def cost_ms(self) -> float:
        """What each of these steps would be shorter by, in the mean."""
        return min(float(self.late_ms.mean()), self.longer_ms)


def late_in_left_out(run: Run) -> LateLeftOut | None:
    """The rank that is late in the steps that the overhead left out, and not in the recorded ones.

    Of such a step there are the host's times alone: its start, its last backward pass, its first optimizer.
    The ranks that wait meet all of these marks before the one that they wait for, which comes to one of them
    behind everybody, by more than at another one and than in recorded steps. Where these are not shorter for
    it nobody waits: a host may be behind the others' while its device is not.
    """
    step_ms = run.values("step_ms")
    is_left_out = steps_left_out(run)
    is_known = ~is_left_out & np.isfinite(step_ms).all(axis=0)
    if len(run.ranks) < 2 or min(is_left_out.sum(), is_known.sum()) < FEWEST_STEPS:
        return None
    # Medians: blocks behind a change are recorded, in which the rank is late as well.
    more_ms = step_ms.mean(axis=0) - np.median(step_ms[:, is_known].mean(axis=0))
    longer_ms = float(more_ms[is_left_out].mean())
    behind_ms = {mark: _behind(at_ms) for mark, at_ms in marks(run).items()}
    found = _at_all_marks(behind_ms, more_ms, is_left_out, is_known)
    found = found or _latest(behind_ms, is_left_out, is_known)
    if found is None:
        return None
    row, mark, late_ms, usual_ms = found
    late = LateLeftOut(row, mark, late_ms, usual_ms, longer_ms)
    is_small = late.cost_ms < LEAST_SHARE * float(step_ms[:, is_left_out].mean())
    if is_small or (run.clock_residual_us or 0.0) / 1e3 > late_ms.mean():
        return None
    # Of a few steps the sizes differ too much: then it has to be late in nearly every one.
    if max(signs(late_ms), signs(np.sign(late_ms))) < LEAST_SIGNS or not lasts(late_ms, knows_busy=True):
        return None
    return late._replace(op=_doing(run, row, is_left_out, late.cost_ms))


def steps_left_out(judged: Run) -> Flags:
    """[judged step]: left out by the overhead on some rank. After a slow step each rank judges by itself what
    is recorded."""
    if not judged.left_out.any():
        return np.zeros(judged.num_judged, dtype=bool)
    is_timed, has_length = (
        np.isfinite(judged.values(name)).all(axis=0) for name in ("compute_ms", "step_ms")
    )
    return np.logical_and(~is_timed, has_length)


def marks(run: Run) -> dict[str, Floats]:
    """[rank, judged step] by mark: ms after the first start of the step, on a common clock."""
    moved_ns = np.array([run.clock_offset_ns.get(rank, 0) for rank in run.ranks], dtype=np.int64)
    start_ns = run.start_unix_ns[:, run.judged_steps] + moved_ns[:, None]
    start_ms = (start_ns - start_ns.min(axis=0)) / 1e6
    marks = {"": np.append(start_ms[:, 1:], np.full((len(start_ms), 1), np.nan), axis=1)}
    for name in (UNTIL_BACKWARD, UNTIL_UPDATE):
        if name in run.host_parts:
            marks[name] = start_ms + run.host_parts[name][:, run.judged_steps]
    return marks


def _behind(at_ms: Floats) -> Floats:
    """[rank, step]: how long after the last one of the others it comes; below 0 where it comes before it."""
    in_order = np.sort(at_ms, axis=0)
    last, before = in_order[-1], in_order[-2]
    behind_ms: Floats = np.where(at_ms == last, last - before, at_ms - last)
    return behind_ms


def _at_all_marks(
    behind_ms: dict[str, Floats], more_ms: Floats, is_left_out: Flags, is_known: Flags
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
    behind_ms: dict[str, Floats], is_left_out: Flags, is_known: Flags
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


def _doing(judged: Run, row: int, is_left_out: Flags, cost_ms: float) -> str:
    """What the late rank's thread does beyond the others': it works, is starved of its core, or sleeps."""
    parts = judged.host_parts
    for op, name in (("starved", READY), ("works", CPU)):
        if name in parts:
            used = np.nan_to_num(parts[name][:, judged.judged_steps][:, is_left_out])
            if float((used[row] - of_the_others(used)[row]).mean()) >= MOST_OF_IT * cost_ms:
                return op
    return "sleeps"


# ---- digests of a running job -------------------------------------------------------------------------


def late_in_digests(slots: Slots, usual_ms: Floats | None = None) -> list[LateRank]:
    """The ranks that the others wait for, the latest first. usual_ms: by rank of the world what to compare
    with, where there is something."""
    late_ms = late_ms_of(slots)
    if usual_ms is not None:
        late_ms = late_ms - np.nan_to_num(usual_ms)
        late_ms = late_ms - np.nanmedian(late_ms) if np.isfinite(late_ms).any() else late_ms
    known = np.isfinite(late_ms)
    if known.sum() < 2 or known.sum() < 0.9 * len(late_ms):
        return []
    scale_ms = 1.4826 * float(np.median(np.abs(late_ms[known])))
    least_ms = max(NOISE_SCALES * scale_ms, LATE_SHARE * float(np.nanmedian(slots["median_step_ms"])))
    ranks = np.flatnonzero(known & (np.nan_to_num(late_ms) > least_ms))
    if len(ranks) > min(max(NODE_RANKS, MOST_LATE_SHARE * len(late_ms)), 0.5 * len(late_ms)):
        return []
    return [LateRank(int(rank), float(late_ms[rank])) for rank in ranks[np.argsort(-late_ms[ranks])]]


def late_ms_of(slots: Slots) -> Floats:
    """By rank of the world: how much less than the median its communication is exposed; NaN: not known."""
    late_ms = np.full(int(slots["world_size"][0]), np.nan)
    exposed_ms = slots["median_exposed_ms"]
    if np.isfinite(exposed_ms).any():
        late_ms[slots["rank"]] = np.nanmedian(exposed_ms) - exposed_ms
    return late_ms
