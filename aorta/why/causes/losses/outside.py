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


def outside_cause(account: Account, path: str, line: CodeLine | None = None) -> Cause | None:
    """Gaps between judged steps, where they are a tenth of steps and gaps together and come twice or more.
    All of them are known, so that the interval is of what other runs may have.

    line: of the program, in which most of it is.
    """
    gaps = account.gaps_ms[np.isfinite(account.gaps_ms)]
    long = gaps[gaps >= LEAST_MS]
    steps_ms = account.judged_ms
    if len(long) < FEWEST or not long.sum() >= LARGE_SHARE * (steps_ms + long.sum()):
        return None
    each, part = float(long.mean()), len(long) / len(gaps)
    half = NORMAL_95 * float(long.std(ddof=1)) / math.sqrt(len(long))
    interval = ratio_interval(part * each, part * half, (steps_ms + float(long.sum())) / len(gaps))
    share = float(long.sum() / (steps_ms + long.sum()))
    return Cause(
        kind="between_steps",
        subject="evaluation or other work in no step" + (f" in {line.text}" if line else ""),
        ms=part * each,
        interval_ms=interval,
        why_no_interval="" if interval else "the gaps differ too much for an interval",
        bound_ms=None,
        share=share,
        evidence=(
            f"{len(long)} gaps between two steps, {quantity(each, 'ms')} each, together"
            f" {quantity(long.sum() / 1e3, 's')}: {percent(share)} of the time from the first judged step to"
            " the last, in no step",
        ),
        change=f"do {f'what {line.text} does' if line else 'it'} less often, or on fewer batches",
        line=line,
        check=f"aorta compare {path} NEW; between of account.wall_ms should fall",
        source="records",
        is_in_step=False,
        global_step=int(account.gap_step[int(np.nanargmax(account.gaps_ms))]),
    )
