"""Finds steps in which every rank works longer than usual, for no other cause that is known."""

import warnings
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.occasional import occasions
from aorta.account.metrics import WORK
from aorta.account.model import JudgedRun
from aorta.account.rows import positive
from aorta.why.causes.finding import ANY_CELL, CauseFinding
from aorta.why.causes.losses.parts import Parts

MOST_OF_ALL = 0.8
"""Part of the optimizer's time, or of all bytes, in the slow steps: then a batch ends in them that was
accumulated over several steps."""
MORE_TOKENS = 1.05


def slow_steps(judged: JudgedRun, parts: Parts) -> Iterator[CauseFinding]:
    """Of the rank that works least in each step, so that nothing of it is waiting for a rank."""
    common = parts.work_ms.min(axis=0)
    slow = occasions(common, judged.run.global_step[judged.num_warmup :])
    if slow is None or _has_more_to_do(judged, parts, slow.is_slow):
        return
    yield CauseFinding(
        "pause",
        slow.excess_ms,
        takes={("compute", *ANY_CELL): 1.0},
        facts={
            "op": "slow_steps",
            "what": "slow steps",
            "who": "all ranks" if len(judged.run.ranks) > 1 else "the rank",
            "slow_ms": float(np.median(common[slow.is_slow])),
            "usual_ms": float(np.median(common[~slow.is_slow])),
        },
        occasions=slow,
    )


def _has_more_to_do(judged: JudgedRun, parts: Parts, is_slow: NDArray[np.bool_]) -> bool:
    """More tokens, or the end of an accumulated batch."""
    if WORK in judged.run.metrics:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step without tokens gives NaN, wanted here
            tokens = np.nanmedian(judged.values(WORK), axis=0)
        if np.median(tokens[is_slow]) > MORE_TOKENS * np.median(tokens[~is_slow]):
            return True
    num_bytes = [
        positive(values[:, judged.num_warmup :]).sum(axis=0)
        for name, values in judged.run.metrics.items()
        if name.startswith("bytes.")
    ]
    for amount in (
        parts.optimizer_ms.sum(axis=0),
        np.sum(num_bytes, axis=0) if num_bytes else np.zeros(len(is_slow)),
    ):
        if amount.any() and float(amount[is_slow].sum()) >= MOST_OF_ALL * float(amount.sum()):
            return True
    return False
