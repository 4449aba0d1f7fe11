"""What a program does between steps that is in no step: it costs the run, and not the step."""

import math

import numpy as np

from aorta.account.cause import Cause, CodeLine, ratio_interval
from aorta.account.judge.cells import LARGE_SHARE, Account
from aorta.account.numbers import percent, quantity

LEAST_MS = 1.0
"""Of a gap between two steps: clocks and rounding make shorter ones."""
FEWEST = 2
NORMAL_95 = 1.96


def outside_cause(account: Account, path: str, line: CodeLine | None, rank: int | None) -> Cause | None:
    """Gaps between judged steps, where they are a tenth of steps and gaps together and come twice or more.
    All of them are known, so that the interval is of what other runs may have.

    line: of the program, in which most of it is. rank: the only one that has them, and that the others wait
    for: each ms of it costs one of the run. It is worth what the run gains where all ranks have a part of it;
    done less often it may give all.
    """
    gaps = account.gaps_ms[np.isfinite(account.gaps_ms)]
    long = gaps[gaps >= LEAST_MS]
    steps_ms, num_ranks = account.judged_ms, 1 if rank is None else len(account.step_ms)
    if len(long) < FEWEST or not num_ranks * long.sum() >= LARGE_SHARE * (steps_ms + long.sum()):
        return None
    each, part = float(long.mean()), len(long) / len(gaps)
    shown, total_s = quantity(num_ranks * each, "ms"), quantity(num_ranks * long.sum() / 1e3, "s")
    half = NORMAL_95 * float(long.std(ddof=1)) / math.sqrt(len(long))
    part, share = num_ranks * part, num_ranks * float(long.sum() / (steps_ms + long.sum()))
    who = waits = ""
    dealt = 1.0 if rank is None else 1 - 1 / num_ranks
    place = "" if line is None else line.text + (f" (called from {line.caller})" if line.caller else "")
    what = f"what {place} does" if place else "it"
    if rank is not None:
        who, waits = f" on rank {rank}", "; the others wait for it"
        saved, most = (quantity(factor * part * each, "ms") for factor in (dealt, 1.0))
        change = (
            f"let each rank do a part of {what}, which saves {saved} for each step; or do it less often, or"
            f" on fewer batches, which may save up to {most}"
        )
    else:
        seldom = f"do {what} less often"
        if len(account.step_ms) > 1:
            seldom = (
                f"let each rank do a part of {what}, where all go through the same rows; or do it less often"
            )
        change = (
            f"{seldom}, or on fewer batches; a model is called there on as many rows at a time as memory"
            " allows, and under torch.no_grad()"
        )
    interval = ratio_interval(part * each, part * half, (steps_ms + float(long.sum())) / len(gaps))
    if interval:
        interval = dealt * interval[0], interval[1]
    return Cause(
        kind="between_steps",
        subject=f"evaluation or other work in no step{who}" + (f" in {place}" if place else ""),
        ms=dealt * part * each,
        interval_ms=interval,
        why_no_interval="" if interval else "the gaps differ too much for an interval",
        bound_ms=None,
        share=dealt * share,
        evidence=(
            f"{len(long)} gaps between two steps{who}, {shown} each, together {total_s}: {percent(share)} of"
            f" the time from the first judged step to the last, in no step{waits}",
        ),
        change=change,
        line=line,
        check=f"aorta compare {path} NEW; between of account.wall_ms should fall",
        source="records",
        rank=rank,
        is_waited_for=rank is not None,
        is_in_step=False,
        global_step=int(account.gap_step[int(np.nanargmax(account.gaps_ms))]),
    )
