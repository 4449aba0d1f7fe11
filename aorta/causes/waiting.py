"""Why ranks wait for each other: for whom, and what that rank did meanwhile.

A rank that comes last to a collective costs the others their wait. What it spends more time on than the
others do, in the same step, is the reason, the most specific first; each ms of waiting has one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.causes.cause import CauseKind
from aorta.causes.finding import CauseFinding, Floats, of_the_others, positive
from aorta.causes.parts import Parts
from aorta.report.model import JudgedRun
from aorta.timeline.collective import POINT_TO_POINT

ONE_RANK = 0.6
"""Part of a loss from which on it is that of one rank."""
UNEQUAL = 1.1
"""Bytes of a rank's all_to_all over the mean of the ranks."""
PART_KINDS: tuple[tuple[str, CauseKind], ...] = (
    ("garbage_collection", "garbage_collection"),
    ("checkpoint", "checkpoint"),
    ("data", "data_loading"),
    ("pause", "pause"),
    ("optimizer", "optimizer"),
    ("between_steps", "between_steps"),
    ("synchronisation", "synchronisation"),
    ("small_messages", "small_messages"),
    ("launch", "launch_bound"),
)


@dataclass(slots=True)
class Exposed:
    """Exposed communication of the judged steps, [rank, step] in ms."""

    wait_ms: Floats
    transfer_ms: Floats
    caused_ms: Floats
    """Waiting of each of the others for the rank; 0 where nobody knows for whom."""
    is_split: bool
    """Waiting is known; otherwise all of it counts as transfer."""


def exposed_of(judged: JudgedRun) -> Exposed | None:
    """None where overlap was not measured.

    Where all ranks communicate in the same groups, they leave together, and the last to come waits least:
    what another rank is exposed beyond that is waiting, even while other calls move. That needs no common
    clock. Elsewhere it is what matched collectives tell.
    """
    run, judged_steps = judged.run, slice(judged.num_warmup, None)
    exposed = positive(run.metrics["exposed_ms"][:, judged_steps])
    if not exposed.any():
        return None
    wait = np.zeros_like(exposed)
    matched = run.metrics.get("exposed_wait_ms")
    is_split = matched is not None
    if matched is not None:
        wait = np.minimum(positive(matched[:, judged_steps]), exposed)
    num_ranks = len(run.ranks)
    if num_ranks > 1 and _is_one_group(judged):
        wait = np.maximum(wait, exposed - exposed.min(axis=0))
        is_split = True
    caused = np.zeros_like(exposed)
    if num_ranks > 1 and is_split:
        total = wait.sum(axis=0) / (num_ranks - 1)
        share = _blame(judged, exposed)
        caused = share * total
    return Exposed(wait, exposed - wait, caused, is_split)


def unbalanced_stages(judged: JudgedRun, parts: Parts, exposed: Exposed) -> Iterator[CauseFinding]:
    """The stage of a pipeline that computes longest, beyond the mean of the stages: what equal stages would
    take less, as far as the others are exposed meanwhile. That part of their exposed time is no transfer."""
    if exposed.is_split or len(judged.run.ranks) < 2 or not _has_point_to_point(judged):
        return
    ranks, compute = judged.run.ranks, parts.compute_ms
    worst = int(np.argmax(np.median(compute, axis=1)))
    balanced = compute.mean(axis=0)
    others = [row for row in range(len(ranks)) if row != worst]
    loss = np.minimum(positive(compute[worst] - balanced), exposed.transfer_ms[others].max(axis=0))
    if not loss.any():
        return
    exposed.transfer_ms[others] = positive(exposed.transfer_ms[others] - (compute[worst] - compute[others]))
    compute_ms, others_ms = float(np.median(compute[worst])), float(np.median(compute[others]))
    yield CauseFinding(
        "late_rank",
        loss,
        facts={
            "who": f"rank {ranks[worst]}",
            "op": "stage",
            "compute_ms": compute_ms,
            "others_compute_ms": others_ms,
            "more_ms": compute_ms - others_ms,
            "balanced_ms": float(np.median(balanced)),
            "what": _what_takes_longer(parts),
        },
        rank=ranks[worst],
    )


def _has_point_to_point(judged: JudgedRun) -> bool:
    return any(kind.op in POINT_TO_POINT for kind in judged.run.collectives)


def _what_takes_longer(parts: Parts) -> str:
    return "its compute kernels take" if parts.on_device else "its code between collectives takes"


def _is_one_group(judged: JudgedRun) -> bool:
    """Every rank takes part in every collective."""
    sizes = {kind.num_ranks for kind in judged.run.collectives}
    return sizes == {len(judged.run.ranks)} and not _has_point_to_point(judged)


def _blame(judged: JudgedRun, exposed: Floats) -> Floats:
    """[rank, step]: shares of 1 of who came last; by arrival where that is known, else by least exposure."""
    arrivals = judged.run.arrivals
    share = np.zeros_like(exposed)
    columns = np.arange(exposed.shape[1])
    if arrivals is None:
        share[np.argmin(exposed, axis=0), columns] = 1.0
        return share
    caused = arrivals.caused_ms[:, judged.num_warmup :]
    total = caused.sum(axis=0)
    np.divide(caused, total, out=share, where=total > 0)
    return share


def waiting(judged: JudgedRun, parts: Parts, exposed: Exposed) -> Iterator[CauseFinding]:
    if not exposed.is_split or len(judged.run.ranks) < 2:
        return
    left = exposed.caused_ms.copy()
    ranks = judged.run.ranks
    for name, kind in PART_KINDS:
        if name in parts.ms_by_kind:
            yield from _explained(kind, parts.ms_by_kind[name], left, ranks)
    yield from _explained("clock", parts.clock_loss_ms, left, ranks)
    work = _more_work(judged)
    if work is not None:
        is_busy, facts = work
        yield from _explained("imbalance", parts.compute_ms, left, ranks, facts, is_busy)
    yield from _late_rank(judged, parts, left)


def _explained(
    kind: CauseKind,
    by_rank_ms: Floats,
    left: Floats,
    ranks: list[int],
    facts: dict[str, object] | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> Iterator[CauseFinding]:
    """Takes from `left` what a part explains. allowed: ranks and steps of which it may."""
    excess = positive(by_rank_ms - of_the_others(by_rank_ms))
    if allowed is not None:
        excess = np.where(allowed, excess, 0.0)
    explained = np.minimum(excess, left)
    left -= explained
    # What comes behind the last collective of a step delays the others in the next one.
    carried = np.roll(excess - explained, 1, axis=1)
    carried[:, 0] = 0.0
    later = np.minimum(carried, left)
    left -= later
    explained = explained + later
    by_rank = explained.sum(axis=1)
    total = float(by_rank.sum())
    if total <= 0:
        return
    worst = int(np.argmax(by_rank))
    is_one = by_rank[worst] >= ONE_RANK * total
    row = by_rank_ms[worst]
    yield CauseFinding(
        kind,
        explained.sum(axis=0),
        facts={
            "who": f"rank {ranks[worst]}" if is_one else "different ranks in turn",
            "part_ms": _usual(row),
            "others_ms": _usual(of_the_others(by_rank_ms)[worst]),
            "in_steps": int((explained.sum(axis=0) > 0).sum()),
            "num_steps": explained.shape[1],
            "waits": True,
            **(facts or {}),
        },
        rank=ranks[worst] if is_one else None,
    )


def _usual(values: Floats) -> float:
    """Median; of what is rare, the median of the steps that have it."""
    median = float(np.median(values))
    nonzero = values[values > 0]
    return median if median > 0 or not len(nonzero) else float(np.median(nonzero))


def _more_work(judged: JudgedRun) -> tuple[NDArray[np.bool_], dict[str, object]] | None:
    """Ranks and steps that an all_to_all gave more than the others."""
    sizes = judged.run.metrics.get("bytes.all_to_all")
    if sizes is None:
        return None
    sizes = sizes[:, judged.num_warmup :]
    mean = positive(sizes).mean(axis=0)
    ratio = np.divide(positive(sizes), mean, out=np.ones_like(sizes), where=mean > 0)
    is_busy = ratio > UNEQUAL
    if not is_busy.any():
        return None
    worst = int(np.argmax(np.median(ratio, axis=1)))
    return is_busy, {
        "ratio": float(np.median(ratio[worst])),
        "bytes": float(np.median(sizes[worst])),
        "mean_bytes": float(np.median(mean)),
    }


def _late_rank(judged: JudgedRun, parts: Parts, left: Floats) -> Iterator[CauseFinding]:
    ranks, arrivals = judged.run.ranks, judged.run.arrivals
    by_rank = left.sum(axis=1)
    total = float(by_rank.sum())
    if total <= 0:
        return
    worst = int(np.argmax(by_rank))
    usually = left[worst] > of_the_others(left)[worst]
    if by_rank[worst] < ONE_RANK * total or usually.mean() < ONE_RANK:
        return  # nobody in particular: ranks vary, and no record tells why
    judged_steps = slice(judged.num_warmup, None)
    arrived: dict[str, object] = {}
    if arrivals is not None:
        arrived["num_last"] = int(arrivals.num_last[worst, judged_steps].sum())
        arrived["num_judged"] = int(arrivals.num_judged[worst, judged_steps].sum())
    compute = float(np.median(parts.compute_ms[worst]))
    others_ms = float(np.median(of_the_others(parts.compute_ms)[worst]))
    yield CauseFinding(
        "late_rank",
        # What the others cost this one comes back when it is no longer late; only the balance is lost.
        positive(left[worst] - of_the_others(left)[worst]),
        facts={
            "who": f"rank {ranks[worst]}",
            **arrived,
            "compute_ms": compute,
            "others_compute_ms": others_ms,
            "more_ms": compute - others_ms,
            "what": _what_takes_longer(parts),
        },
        rank=ranks[worst],
    )
