"""A comparison that is looked at after every pair of runs, and stops when it is decided.

The interval of each look is Student's, at a level so strict that over all looks together no more than alpha
of series without a difference leave it. The level grows with the number of pairs: three pairs hardly know
their own spread, so what is spent on them is lost to the looks that can tell a small change. It depends on
the first and the last look alone, and is found by simulating series of normal differences, the same each
time.

Source: Kim and DeMets, Biometrika 74 (1987), for spending by a power of the information.
"""

import bisect
import math
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from aorta.timeline.arrays import Floats

Outcome = Literal["slower", "faster", "same", "cannot tell"]

FIRST_LOOK = 3
"""Pairs before which nothing is decided: two tell no spread worth the name."""
NUM_SERIES = 20_000
MOST_ADVISED = 500
POWER = 0.9
"""Share of series that tell a change that matters, where it is said how many pairs would."""


class Look(NamedTuple):
    """What the pairs so far say of candidate over reference."""

    num_pairs: int
    ratio: float | None
    interval: tuple[float, float] | None
    """Holds the true ratio at every look of 1 - alpha of series; None before the first look."""
    outcome: Outcome
    pairs_needed: int | None
    """Pairs of a series that would tell a change that matters in POWER of cases, if pairs go on to differ as
    these do; None where that is not known, or more than MOST_ADVISED."""

    @property
    def is_decided(self) -> bool:
        return self.outcome != "cannot tell"


@lru_cache(maxsize=16)
def levels_of_looks(last: int, alpha: float) -> Floats:
    """Level of each look from FIRST_LOOK to `last`, so that alpha of series leave any of the intervals."""
    from scipy.special import stdtr

    rng = np.random.default_rng(0)
    differences = rng.standard_normal((NUM_SERIES, last))
    num = np.arange(1, last + 1)
    mean = np.cumsum(differences, axis=1) / num
    squares = np.cumsum(differences**2, axis=1) - num * mean**2
    looks = num >= FIRST_LOOK
    freedom = num[looks] - 1
    error = np.sqrt(squares[:, looks] / freedom / num[looks])
    p_values = 2 * stdtr(freedom, -np.abs(mean[:, looks]) / error)
    part = num[looks] / last
    return float(np.quantile((p_values / part).min(axis=1), alpha)) * part


def look(log_ratios: list[float], last: int, matters: float, alpha: float) -> Look:
    """After these pairs, of a series of at most `last`. log_ratios: of candidate over reference, by pair."""
    from scipy.special import stdtrit

    num = len(log_ratios)
    if num == 0:
        return Look(0, None, None, "cannot tell", None)
    mean = float(np.mean(log_ratios))
    if num < FIRST_LOOK:
        return Look(num, math.exp(mean), None, "cannot tell", None)
    levels = levels_of_looks(max(last, FIRST_LOOK), alpha)
    level = float(levels[num - FIRST_LOOK])
    deviation = float(np.std(log_ratios, ddof=1))
    half = float(stdtrit(num - 1, 1 - level / 2)) * deviation / math.sqrt(num)
    margin = math.log1p(matters)
    outcome: Outcome = "cannot tell"
    if mean + half <= margin and mean - half >= -margin:
        outcome = "same"
    elif mean - half > 0:
        outcome = "slower"
    elif mean + half < 0:
        outcome = "faster"
    interval = math.exp(mean - half), math.exp(mean + half)
    return Look(num, math.exp(mean), interval, outcome, _pairs_needed(deviation, margin, float(levels[-1])))


def _pairs_needed(deviation: float, margin: float, level: float) -> int | None:
    """level: of the last look."""
    from scipy.special import stdtrit

    def tells(num: int) -> bool:
        needed = float(stdtrit(num - 1, 1 - level / 2) + stdtrit(num - 1, POWER))
        return needed * deviation <= margin * math.sqrt(num)

    numbers = range(FIRST_LOOK, MOST_ADVISED + 1)
    place = bisect.bisect_left(numbers, True, key=tells)
    return numbers[place] if place < len(numbers) else None
