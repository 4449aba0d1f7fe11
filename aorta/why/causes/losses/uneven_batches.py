"""Ranks that compute longer than the others because batches differ in size: step for step, whoever it is."""

from collections.abc import Iterator

import numpy as np

from aorta.account.judge.cells import Exposed
from aorta.account.judge.late import ONE_RANK
from aorta.account.metrics import WORK
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.records.schema import UNLIKE
from aorta.why.causes.finding import ANY_CELL, CauseFinding, of_one_rank
from aorta.why.causes.losses.parts import Parts
from aorta.why.causes.losses.waiting import IN_TURN

MORE_TOKENS = 1.05
"""Of the ranks' mean, that a rank must get in the mean step where the program tells tokens."""


def uneven_batches(run: Run, parts: Parts, exposed: Exposed) -> Iterator[CauseFinding]:
    """What the longest computing rank of each step has beyond the mean of the ranks, which batches of one
    size would save, as far as the others wait for it. A clock that is held down is another cause."""
    cells = parts.account.cells
    if not exposed.is_split or len(run.ranks) < 2 or "bytes.all_to_all" in run.metrics or not _differ(run):
        return
    work = np.sum([cells[name] for name in ("compute", "hidden") if name in cells], axis=0)
    work = work - parts.clock_loss_ms
    row, steps = work.argmax(axis=0), np.arange(work.shape[1])
    waited = exposed.lost_to_ms[row, steps]
    loss = np.minimum(positive(work.max(axis=0) - work.mean(axis=0)), waited)
    if not loss.any():
        return
    by_rank = np.bincount(row, loss, len(run.ranks))
    worst = int(by_rank.argmax())
    is_one = by_rank[worst] >= ONE_RANK * by_rank.sum()
    yield CauseFinding(
        "imbalance",
        loss,
        takes=of_one_rank(len(run.ranks), "compute", "hidden", *ANY_CELL),
        facts={
            "op": "batches",
            "who": f"rank {run.ranks[worst]}" if is_one else IN_TURN,
            "longest_ms": float(work.max(axis=0).mean()),
            "mean_ms": float(work.mean()),
            "low_ms": float(work.min()),
            "high_ms": float(work.max()),
        },
        rank=run.ranks[worst] if is_one else None,
        # Beside a collective that waits kernels are slower: without it the others would wait longer.
        more_ms=max(float(np.median(waited) - loss.mean()), 0.0),
    )


def _differ(judged: Run) -> bool:
    """Rank 0's batches were seen to, or the program says so of the ranks' tokens."""
    tokens = positive(judged.values(WORK)) if WORK in judged.metrics else np.zeros(1)
    if not tokens.any():
        record = judged.record
        return record is not None and record.not_measured.get("tokens") == UNLIKE
    return float(tokens.max(axis=0).mean()) > MORE_TOKENS * float(tokens.mean())
