"""Losses that the device's samples and the allocator's counters show."""

from collections.abc import Iterator

import numpy as np

from aorta.account.judge.stacks import samples_of_ranks
from aorta.account.load.measures import memory_limit_bytes
from aorta.account.metrics import THROTTLED
from aorta.account.model import Run
from aorta.account.numbers import percent
from aorta.account.rows import positive
from aorta.timeline.arrays import Floats
from aorta.why.causes.finding import ANY_CELL, WAIT, CauseFinding, of_the_least
from aorta.why.causes.losses.parts import Parts
from aorta.why.causes.losses.program_code import EMPTY_CACHE

NEARLY_FULL = 0.95
"""Part of the device's memory."""
MIN_OTHER_STEPS = 3
"""Steps without a loss, from which on they tell what is usual."""
RETRY_SHARE = 0.1
"""Part of the steps with retries, from which on they are named though no time shows."""


def clocks(judged: Run, parts: Parts) -> Iterator[CauseFinding]:
    """Compute that takes longer because a clock is held down, on the rank that loses most."""
    loss = parts.clock_loss_ms
    if parts.usual_clock_mhz is None or not loss.any():
        return
    worst = int(np.argmax(loss.sum(axis=1)))
    slow = loss[worst] > 0
    num = int((loss.sum(axis=1) > 0).sum())
    ranks = judged.ranks
    reasons = []
    for name, values in judged.metrics.items():
        if name.startswith(f"{THROTTLED}."):
            share = float(np.nanmean(values[worst, judged.num_warmup :]))
            if share > 0:
                reasons.append(f"{name.partition('.')[2]} in {percent(share)} of the steps")
    longest = loss.max(axis=0)
    own = float(loss.mean() / longest.mean())  # the other ranks wait for the rest
    yield CauseFinding(
        "clock",
        longest,
        takes={WAIT: 1 - own, ("compute", "hidden"): own},
        facts={
            "who": f"rank {ranks[worst]}" if num < len(ranks) or num == 1 else f"all {num} ranks",
            "low_mhz": float(np.median(parts.clock_mhz[worst][slow])),
            "usual_mhz": parts.usual_clock_mhz,
            "in_steps": int(slow.sum()),
            "num_steps": len(slow),
        },
        evidence=[f"the driver gives as reasons: {', '.join(reasons)}"] if reasons else [],
        rank=ranks[worst],
        source="telemetry",
    )


def retries(judged: Run, step_ms: Floats) -> Iterator[tuple[CauseFinding, Floats]]:
    """Steps in which the allocator had to free its cache, against the others; and which steps those are."""
    counts = judged.metrics.get("alloc_retries")
    if counts is None:
        return
    counts = positive(counts[:, judged.judged_steps])
    has = counts.sum(axis=0) > 0
    if not has.any():
        return
    num_others = int((~has).sum())
    ms = np.zeros(len(step_ms))
    if num_others >= MIN_OTHER_STEPS:
        ms[has] = np.maximum(step_ms[has] - np.median(step_ms[~has]), 0.0)
    worst = int(np.argmax(counts.sum(axis=1)))
    yield (
        CauseFinding(
            "memory",
            ms,
            takes={(*ANY_CELL, *WAIT): 1.0},
            facts={
                "what": "allocation retries",
                "who": f"rank {judged.ranks[worst]}",
                "num_retries": float(counts.sum()),
                "in_steps": int(has.sum()),
                "num_steps": len(has),
                "with_ms": float(np.median(step_ms[has])),
                "without_ms": float(np.median(step_ms[~has])) if num_others else float("nan"),
            },
            rank=judged.ranks[worst],
            source="telemetry",
            is_risk=bool(has.mean() >= RETRY_SHARE),
        ),
        has.astype(np.float64),
    )


def given_back(judged: Run, parts: Parts) -> Iterator[CauseFinding]:
    """Launches that take longer where the allocator gives memory back to the driver without being short of
    it, and asks for it again: the program empties its cache."""
    counts = judged.metrics.get("device_frees")
    launch_ms = parts.ms_by_kind.get("launch")
    if counts is None or launch_ms is None:
        return
    counts = positive(counts[:, judged.judged_steps])
    retried = positive(judged.values("alloc_retries")).sum(axis=0) > 0
    has = (counts > 0).all(axis=0) & ~retried
    if not has.any():
        return
    common = of_the_least(launch_ms)
    usual_ms = float(np.median(common[~has])) if (~has).sum() >= MIN_OTHER_STEPS else 0.0
    ms, cells = np.where(has, positive(common - usual_ms), 0.0), ["launch", "synchronisation", "blocked"]
    facts: dict[str, object] = {
        "op": "given_back",
        "what": "memory given back to the driver",
        "num_frees": float(counts[:, has].mean()),
        "in_steps": int(has.sum()),
        "num_steps": len(has),
    }
    if has.all() and _empties_between(judged):
        between_ms = of_the_least(parts.ms_by_kind["between_steps"])
        ms, facts["between_ms"] = ms + between_ms, float(between_ms.mean())
        cells.append("between_steps")
    yield CauseFinding("memory", ms, takes={tuple(cells): 1.0}, facts=facts)


def _empties_between(judged: Run) -> bool:
    """Whether samples between two steps are mostly of empty_cache(), on every rank."""
    samples = samples_of_ranks(judged.whole)
    behind = [one.is_judged & one.at("behind_body") for one in samples]
    both = [
        (one.ms[which & one.that_call(EMPTY_CACHE)].sum(), one.ms[which].sum())
        for one, which in zip(samples, behind, strict=True)
    ]
    return bool(both) and all(2 * emptying > all_of_it for emptying, all_of_it in both)


def memory_limit(judged: Run) -> Iterator[CauseFinding]:
    limit = memory_limit_bytes(judged.noted)
    if limit is None:
        return
    worst: tuple[float, int] | None = None
    for name in ("device_memory_bytes", "reserved_memory_bytes", "peak_memory_bytes"):
        values = judged.metrics.get(name)
        if values is None or not np.isfinite(values[:, judged.judged_steps]).any():
            continue
        used_bytes = np.nanmax(np.nan_to_num(values[:, judged.judged_steps]), axis=1)
        row = int(np.argmax(used_bytes))
        if worst is None or used_bytes[row] > worst[0]:
            worst = float(used_bytes[row]), judged.ranks[row]
    if worst is None or worst[0] < NEARLY_FULL * limit:
        return
    yield CauseFinding(
        "memory",
        np.zeros(judged.num_judged),
        takes={},
        facts={
            "what": "device memory nearly full",
            "who": f"rank {worst[1]}",
            "used_bytes": worst[0],
            "limit_bytes": limit,
            "part": worst[0] / limit,
        },
        rank=worst[1],
        source="telemetry",
        is_risk=True,
    )
