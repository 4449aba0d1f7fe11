"""Exposed communication of the judged steps taken apart: waiting for ranks, transfer, or not split."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.host import AFTER, BEHIND_EXPOSED, BEHIND_WAITS, PREFIX
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.timeline.collective import POINT_TO_POINT

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Exposed:
    """[rank, step] in ms. exposed = wait + transfer + unsplit, in every step of every rank."""

    wait_ms: Floats
    """Before the last rank had come."""
    transfer_ms: Floats
    """After it."""
    unsplit_ms: Floats
    """Where arrivals are not known."""
    caused_ms: Floats
    """Waiting of each of the others for the rank; 0 where nobody knows for whom."""
    lost_ms: Floats
    """The part of wait_ms that delays its rank: the rest of it waits for its own host as well, which has not
    launched what comes next, so that the device would idle if no rank were late."""
    lost_moving_ms: Floats
    """[step]: the part of transfer, and of what may be transfer, that delays the step: as of lost_ms, of the
    rank that it delays least where all ranks communicate with each other."""
    is_split: bool
    """Waiting is known in some step."""

    @property
    def lost_to_ms(self) -> Floats:
        """Of caused_ms, what delays the others."""
        waited, lost = self.wait_ms.sum(axis=0), self.lost_ms.sum(axis=0)
        part = np.divide(lost, waited, out=np.zeros_like(waited), where=waited > 0)
        result: Floats = self.caused_ms * part
        return result

    @property
    def idle_waits_ms(self) -> Floats:
        """Waiting in which the rank has nothing queued behind it: launches that come late, too."""
        return self.wait_ms - self.lost_ms


def exposed_of(judged: Run) -> Exposed | None:
    """None where overlap was not measured, or nothing is exposed.

    Where all ranks communicate in the same groups, they leave together, and the last to come waits least:
    what another rank is exposed beyond that is waiting, even while other calls move. That needs no common
    clock. Elsewhere it is what matched collectives tell.
    """
    return judged.once("exposed", lambda: _exposed_of(judged))


def _exposed_of(run: Run) -> Exposed | None:
    name = "exposed_ms"
    if name not in run.metrics:
        return None
    exposed = positive(run.values(name))
    if not exposed.any():
        return None
    wait = np.zeros_like(exposed)
    is_known = np.zeros(exposed.shape, dtype=bool)
    matched = run.metrics.get("exposed_wait_ms")
    if matched is not None:
        matched = matched[:, run.judged_steps]
        is_known = np.isfinite(matched)
        wait = np.minimum(positive(matched), exposed)
    num_ranks = len(run.ranks)
    if num_ranks > 1 and is_one_group(run):
        wait = np.maximum(wait, exposed - exposed.min(axis=0))
        is_known[:] = True
    caused = np.zeros_like(exposed)
    if num_ranks > 1 and is_known.any():
        caused = _blame(run, exposed) * wait.sum(axis=0) / (num_ranks - 1)
    rest = exposed - wait
    lost = _lost(run, wait, BEHIND_WAITS)
    moving = np.clip(_lost(run, exposed, BEHIND_EXPOSED) - lost, 0.0, rest)
    is_limited = run.source != "host" and run.mean_of_host(BEHIND_EXPOSED) is not None
    is_coupled = is_limited and num_ranks > 1 and is_one_group(run)
    return Exposed(
        wait,
        np.where(is_known, rest, 0.0),
        np.where(is_known, 0.0, rest),
        caused,
        lost,
        moving.min(axis=0) if is_coupled else moving.mean(axis=0),
        bool(is_known.any()),
    )


def _lost(judged: Run, ms: Floats, behind: str) -> Floats:
    """The part of ms that delays its rank, as a column of its host tells. What the host waits for the device
    itself, on other ranks' account, is lost too.

    Steps whose collectives were learned do not say when those were launched: as large a share is lost in them
    as in the rank's steps that do.
    """
    parts = judged.host_parts
    if judged.source == "host" or behind not in parts:
        return ms
    ahead = parts[behind][:, judged.judged_steps]
    for name in (f"{PREFIX}synchronisation", f"{PREFIX}synchronisation{AFTER}"):
        if name in parts:
            ahead = ahead + positive(parts[name][:, judged.judged_steps])
    is_known = ~np.isnan(ahead)
    lost = np.minimum(ahead, ms)
    known_ms = ms.sum(axis=1, where=is_known)
    share = np.divide(
        lost.sum(axis=1, where=is_known), known_ms, out=np.ones_like(known_ms), where=known_ms > 0
    )
    result: Floats = np.where(is_known, lost, ms * share[:, None])
    return result


def is_one_group(judged: Run) -> bool:
    """Every rank takes part in every collective."""
    sizes = {kind.num_ranks for kind in judged.collectives}
    return sizes == {len(judged.ranks)} and not has_point_to_point(judged)


def has_point_to_point(judged: Run) -> bool:
    return any(kind.op in POINT_TO_POINT for kind in judged.collectives)


def _blame(judged: Run, exposed: Floats) -> Floats:
    """[rank, step]: shares of 1 of who came last; by arrival in steps where that is known, else by least
    exposure."""
    share = np.zeros_like(exposed)
    share[np.argmin(exposed, axis=0), np.arange(exposed.shape[1])] = 1.0
    arrivals = judged.arrivals
    if arrivals is None:
        return share
    caused = arrivals.caused_ms[:, judged.judged_steps]
    total = caused.sum(axis=0)
    by_arrival = np.divide(caused, total, out=np.zeros_like(exposed), where=total > 0)
    is_matched = arrivals.num_judged[:, judged.judged_steps].sum(axis=0) > 0
    by_step: Floats = np.where(is_matched, by_arrival, share)
    return by_step
