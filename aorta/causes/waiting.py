"""Why ranks wait for each other: for whom, and what that rank did meanwhile.

A rank that comes last to a collective costs the others their wait. What it spends more time on than the
others do, in the same step, is the reason, the most specific first; each ms of waiting has one.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aorta.causes.cause import CauseKind
from aorta.causes.finding import Finding, Floats, of_the_others, positive
from aorta.causes.parts import Parts
from aorta.report.model import JudgedRun

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
    ("launch", "launch_bound"),
)


def caused_ms(judged: JudgedRun) -> Floats | None:
    """[rank, step]: exposed waiting of each of the others for the rank; None where ranks were not matched."""
    run, kept = judged.run, slice(judged.num_warmup, None)
    if run.arrivals is None or "exposed_wait_ms" not in run.metrics or len(run.ranks) < 2:
        return None
    caused = run.arrivals.caused_ms[:, kept]
    exposed = positive(run.metrics["exposed_wait_ms"][:, kept]).sum(axis=0)
    total = (len(run.ranks) - 1) * caused.sum(axis=0)
    scale = np.divide(exposed, total, out=np.zeros_like(total), where=total > 0)
    result: Floats = caused * np.minimum(scale, 1.0)
    return result


def waiting(judged: JudgedRun, parts: Parts) -> Iterator[Finding]:
    caused = caused_ms(judged)
    if caused is None:
        return
    left = caused.copy()
    ranks = judged.run.ranks
    for name, kind in PART_KINDS:
        if name in parts.own:
            yield from _explained(kind, parts.own[name], left, ranks)
    yield from _explained("clock", parts.clock_loss_ms, left, ranks)
    work = _more_work(judged)
    if work is not None:
        is_busy, facts = work
        yield from _explained("imbalance", parts.compute_ms, left, ranks, facts, is_busy)
    yield from _late_rank(judged, parts, left)


def _explained(
    kind: CauseKind,
    own: Floats,
    left: Floats,
    ranks: list[int],
    facts: dict[str, object] | None = None,
    where: NDArray[np.bool_] | None = None,
) -> Iterator[Finding]:
    """Takes from `left` what a part explains. where: ranks and steps of which it may."""
    more = positive(own - of_the_others(own))
    if where is not None:
        more = np.where(where, more, 0.0)
    explained = np.minimum(more, left)
    left -= explained
    by_rank = explained.sum(axis=1)
    total = float(by_rank.sum())
    if total <= 0:
        return
    worst = int(np.argmax(by_rank))
    is_one = by_rank[worst] >= ONE_RANK * total
    row = own[worst]
    yield Finding(
        kind,
        explained.sum(axis=0),
        facts={
            "who": f"rank {ranks[worst]}" if is_one else "different ranks in turn",
            "part_ms": _usual(row),
            "others_ms": _usual(of_the_others(own)[worst]),
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
    some = values[values > 0]
    return median if median > 0 or not len(some) else float(np.median(some))


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


def _late_rank(judged: JudgedRun, parts: Parts, left: Floats) -> Iterator[Finding]:
    ranks, found = judged.run.ranks, judged.run.arrivals
    assert found is not None
    by_rank = left.sum(axis=1)
    total = float(by_rank.sum())
    if total <= 0:
        return
    worst = int(np.argmax(by_rank))
    if by_rank[worst] < ONE_RANK * total:
        return  # nobody in particular: ranks vary, and no record tells why
    kept = slice(judged.num_warmup, None)
    num_last = int(found.num_last[worst, kept].sum())
    num_judged = int(found.num_judged[worst, kept].sum())
    compute = float(np.median(parts.compute_ms[worst]))
    others = float(np.median(of_the_others(parts.compute_ms)[worst]))
    yield Finding(
        "late_rank",
        # What the others cost this one comes back when it is no longer late; only the balance is lost.
        positive(left[worst] - of_the_others(left)[worst]),
        facts={
            "who": f"rank {ranks[worst]}",
            "num_last": num_last,
            "num_judged": num_judged,
            "compute_ms": compute,
            "others_compute_ms": others,
            "more_ms": compute - others,
            "what": "its code between collectives takes"
            if not parts.on_device
            else "its compute kernels take",
        },
        rank=ranks[worst],
    )
