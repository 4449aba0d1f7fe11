"""Names and arithmetic that the benchmark of overlapped multiplies and its judge share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

FACTORIZED = "factorized"
SINGLE_HOISTS = ("developed", "join_hoisted")
HOISTED = (*SINGLE_HOISTS, "both_hoisted")
Interval = tuple[float, float]


def configuration(name: str) -> tuple[int, int]:
    """(tiles, streams) of order/S8/n4."""
    _, tiles, streams = name.split("/")
    return int(tiles[1:]), int(streams[1:])


def combined(ms: dict[str, list[float]], terms: Sequence[tuple[int, str]]) -> tuple[float, Interval]:
    """Sum of signed medians with its 95 % interval; rounds are drawn together."""
    drawn = draws(min(len(ms[name]) for _, name in terms))
    values = sum(sign * np.median(np.array(ms[name])[drawn], axis=1) for sign, name in terms)
    low, high = np.percentile(values, (2.5, 97.5))
    return sum(sign * float(np.median(ms[name])) for sign, name in terms), (float(low), float(high))


def bootstrap(values: Any) -> Interval:
    low, high = np.percentile(np.median(values[draws(len(values))], axis=1), (2.5, 97.5))
    return float(low), float(high)


def draws(num: int) -> Any:
    return np.random.default_rng(0).integers(0, num, (1000, num))


def kendall_tau_b(
    x: Sequence[float],
    y: Sequence[float],
    intervals: Sequence[Interval],
    groups: Sequence[Any],
    tie: float = 1e-6,
) -> tuple[float, int] | None:
    """(tau-b, pairs) over pairs of one group whose intervals of x do not overlap; predictions within tie
    are ties."""
    agree = disagree = ties = 0
    for i in range(len(x)):
        for j in range(i):
            (low, high), (other_low, other_high) = intervals[i], intervals[j]
            if groups[i] != groups[j] or (low <= other_high and other_low <= high):
                continue
            if abs(y[i] - y[j]) <= tie * max(abs(y[i]), abs(y[j])):
                ties += 1
            elif (x[i] > x[j]) == (y[i] > y[j]):
                agree += 1
            else:
                disagree += 1
    pairs = agree + disagree + ties
    if agree + disagree == 0:
        return None
    return (agree - disagree) / float(np.sqrt((agree + disagree) * pairs)), pairs
