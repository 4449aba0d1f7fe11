"""Finds steps in which every rank works longer than usual, for no other cause that is known."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from aorta.account.cause import CauseKind
from aorta.account.judge.cells import Host
from aorta.account.judge.judged import last_holds_the_end
from aorta.account.judge.occasional import MIN_SLOW, Occasions, occasions
from aorta.account.judge.stacks import Samples, samples_of_ranks
from aorta.account.load.rank.host import BEHIND_UPDATE
from aorta.account.load.rank.phases import PREFIX
from aorta.account.metrics import WORK
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.records.schema import UNLIKE
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.why.causes.finding import ANY_CELL, WAIT, CauseFinding
from aorta.why.causes.losses.parts import Parts

MOST_OF_ALL = 0.8
"""Part of the optimizer's time, or of all bytes, in the slow steps: then a batch ends in them that was
accumulated over several steps. Of what slow steps take longer, that kernels do: then batches were longer."""
MORE_TOKENS = 1.05
IDLE_PARTS = ("launch", "asleep", "synchronisation", "idle")
"""Of a device: what it waits for in slow steps may be any of them."""
AHEAD, MOSTLY_LEFT = 8, 0.5
"""Steps behind a slow one, in which a host may make up for it; the part of it that must be left then."""
BEHIND = 0.8
"""Of what slow steps take longer, from which on it lies behind the optimizer's update."""


def slow_steps(judged: Run, parts: Parts, known: Occasions | None) -> Iterator[CauseFinding]:
    """Of the rank that works least in each step, so that nothing of it is waiting for a rank.

    known: slow ones of all steps.
    """
    common = parts.work_ms.min(axis=0)
    if parts.on_device:
        idle = [parts.ms_by_kind[name] for name in IDLE_PARTS if name in parts.ms_by_kind]
        common = np.sum([parts.work_ms, *idle], axis=0).min(axis=0)
    slow = occasions(common, judged.global_step[judged.judged_steps], known)
    optimizer_ms = Host(judged, judged.judged_steps).span("optimizer")
    if slow is None or _has_more_to_do(judged, optimizer_ms, slow.is_slow):
        return
    longer_ms, work = float(slow.excess_ms[slow.is_slow].mean()), parts.work_ms.min(axis=0)
    more_ms = float(work[slow.is_slow].mean() - np.median(work[~slow.is_slow]))
    is_unlike = judged.noted.not_measured.get("tokens") == UNLIKE
    if parts.on_device and is_unlike and more_ms >= MOST_OF_ALL * longer_ms:
        return  # its kernels take longer, for longer batches
    facts = {
        "slow_ms": float(np.median(common[slow.is_slow])),
        "usual_ms": float(np.median(common[~slow.is_slow])),
    }
    if (saves := _saves(judged)) is not None and slow.are_most_of(saves):
        yield _of_saving(parts, slow.in_steps(saves, common))
        return
    kind: CauseKind = "pause"
    behind = _behind_update(judged, slow.is_slow)
    if behind is not None and behind[0] - behind[1] >= BEHIND * longer_ms:
        kind, (behind_ms, usual_ms) = "between_steps", behind
        facts |= {"behind_ms": behind_ms, "usual_behind_ms": usual_ms}
    yield CauseFinding(
        kind,
        slow.excess_ms,
        takes={("compute", *ANY_CELL): 1.0},
        facts={"op": "slow_steps", "what": "slow steps", **facts},
        occasions=slow,
    )


def slow_of_all_steps(judged: Run, of_account: Ints, on_device: bool) -> CauseFinding | None:
    """Slow steps by the lengths of all, where those of the account, which were recorded, have too few of it.
    What they are slow for, samples of the stacks tell, and the finding is nothing without."""
    step_ms = positive(judged.values("step_ms")).mean(axis=0)
    if last_holds_the_end(judged):
        step_ms[-1] = np.median(step_ms)
    steps = judged.global_step[judged.judged_steps]
    slow = occasions(step_ms, steps)
    samples = samples_of_ranks(judged)
    if slow is not None and on_device:
        slow = _without_made_up(slow, step_ms)
    if slow is None or not samples or np.isin(of_account, steps[slow.is_slow]).sum() >= MIN_SLOW:
        return None
    optimizer_ms = judged.host_parts.get(f"{PREFIX}optimizer", np.zeros((1, judged.num_steps)))
    if _has_more_to_do(judged, positive(optimizer_ms[:, judged.judged_steps]), slow.is_slow):
        return None
    saving, own = (
        sum(_more_ms(one, slow.is_slow, which(one)) for one in samples) for which in (_is_saving, _is_own)
    )
    if max(saving, own) <= 0:
        return None  # the ranks that were sampled wait in them for another one
    each_ms = float(slow.excess_ms[slow.is_slow].mean())
    facts = {"op": "slow_steps", "what": "slow steps"}
    in_steps = {"part_ms": each_ms, "in_steps": int(slow.is_slow.sum()), "num_steps": len(steps)}
    savers = [rank for rank, one in zip(judged.ranks, samples, strict=False) if _is_saving(one).any()]
    if saving > own and len(savers) == 1 < len(judged.ranks):  # which the others wait for
        facts["who"] = f"rank {savers[0]}"
    return CauseFinding(
        "checkpoint" if saving > own else "pause",
        slow.excess_ms,
        takes={},
        facts=facts | (in_steps if saving > own else {}),
        occasions=slow,
    )


def _without_made_up(slow: Occasions, step_ms: Floats) -> Occasions | None:
    """Without what the steps behind them are shorter by: a host that waits for its device, as to read a
    value, launches ahead of it again behind that. None where they make up for most of it."""
    usual_ms = float(np.median(step_ms[~slow.is_slow]))
    before = np.maximum.accumulate(np.where(slow.is_slow, np.arange(len(step_ms)), -len(step_ms)))
    is_behind = ~slow.is_slow & (np.arange(len(step_ms)) - before <= AHEAD)
    made_up_ms, all_ms = float((usual_ms - step_ms[is_behind]).sum()), float(slow.excess_ms.sum())
    left = 1 - min(max(made_up_ms, 0.0) / all_ms, 1.0)
    return replace(slow, excess_ms=left * slow.excess_ms) if left >= MOSTLY_LEFT else None


def _is_saving(samples: Samples) -> Flags:
    return samples.in_phase("checkpoint")


def _is_own(samples: Samples) -> Flags:
    return ~samples.in_phase("checkpoint", "communication", "backward")


def _more_ms(samples: Samples, is_slow: Flags, which: Flags) -> float:
    """What a slow step has more of than a usual one."""
    chosen = samples.is_judged & which
    in_slow = is_slow[samples.column[chosen]]
    ms = samples.ms[chosen] * len(is_slow)
    return float(ms[in_slow].sum() / is_slow.sum() - ms[~in_slow].sum() / (~is_slow).sum())


def _saves(judged: Run) -> Flags | None:
    """[step]: some rank saves a checkpoint in it; None where that is not known."""
    host = Host(judged, judged.judged_steps)
    saving = host.span("checkpoint") + host.tail("checkpoint")
    return np.asarray(saving.max(axis=0) > 0) if saving.any() else None


def _of_saving(parts: Parts, slow: Occasions) -> CauseFinding:
    """All that steps with a checkpoint take longer: copies to the host, writing, ranks that wait for it."""
    steps = parts.step_ms.mean(axis=0)
    excess_ms = np.where(slow.is_slow, positive(steps - np.median(steps[~slow.is_slow])), 0.0)
    return CauseFinding(
        "checkpoint",
        excess_ms,
        takes={("checkpoint", "copy", *WAIT, "transfer", *ANY_CELL): 1.0},
        facts={
            "op": "slow_steps",
            "part_ms": float(excess_ms[slow.is_slow].mean()),
            "in_steps": int(slow.is_slow.sum()),
            "num_steps": len(steps),
        },
        occasions=replace(slow, excess_ms=excess_ms),
    )


def _behind_update(judged: Run, is_slow: Flags) -> tuple[float, float] | None:
    """ms behind the optimizer's update in slow steps and in the others; None where some step lacks it."""
    values = judged.host_parts.get(BEHIND_UPDATE)
    if values is None:
        return None
    behind = values[:, judged.judged_steps].min(axis=0)
    if not np.isfinite(behind).all():
        return None
    return float(behind[is_slow].mean()), float(np.median(behind[~is_slow]))


def _has_more_to_do(judged: Run, optimizer_ms: Floats, is_slow: Flags) -> bool:
    """More tokens, or the end of an accumulated batch. optimizer_ms: [rank, step]."""
    if WORK in judged.metrics:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step without tokens gives NaN, wanted here
            tokens = np.nanmedian(judged.values(WORK), axis=0)
        if np.median(tokens[is_slow]) > MORE_TOKENS * np.median(tokens[~is_slow]):
            return True
    num_bytes = [
        positive(values[:, judged.judged_steps]).sum(axis=0)
        for name, values in judged.metrics.items()
        if name.startswith("bytes.")
    ]
    for amount in (
        optimizer_ms.sum(axis=0),
        np.sum(num_bytes, axis=0) if num_bytes else np.zeros(len(is_slow)),
    ):
        if amount.any() and float(amount[is_slow].sum()) >= MOST_OF_ALL * float(amount.sum()):
            return True
    return False
