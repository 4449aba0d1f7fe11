"""Steps that are slow for a reason of their own, told from noise: every third one, or some that stand apart.

A loss that comes with a period is seen by the order of the steps alone: if the slowest of them fall on one
step in N much more often than chance has it, it does not matter how their lengths are distributed. Without a
period slow steps must stand apart from the others in length, as those of a heavy tail do not, and not
follow one another, as they do where something else was going on for a while.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aorta.account.numbers import quantity
from aorta.timeline.arrays import Flags, Floats, Ints

MIN_STEPS = 12
MIN_SLOW = 3
MIN_AT_RANDOM = 5
"""Slow steps without a period: a few long ones of a heavy tail are alike by chance."""
LEAST_CHANCE = 1e-3
"""Of seeing such an order by accident, all periods that are tried together."""
LEAST_CHANCE_APART = 0.02
"""The same of slow steps that also stand apart from all others: few of them, in a short run."""
LONGEST_PERIOD = 64
"""That is looked for by all steps; it and a longer one also by the slowest alone, of which it must have
LEAST_HITS: where few steps are slow, chance deals some other period a higher rank in the mean."""
LONGEST_OF_ALL, LEAST_HITS = 1024, 0.7
MOST_STEPS = 1 << 14
"""Of a longer run the last ones."""
ALIKE = 0.75
"""Of the largest loss, from which on another one is of its kind."""
NEXT_TO_NOTHING = 0.05
A_QUARTER = 0.25
"""Of a loss: what many steps have so much of together is no trace, however long its longest step."""
APART = 1.0
"""Widths of the usual steps, by which a loss of known slow steps is above them."""
MOST = 0.6
"""Of a loss, that is in the known slow steps."""
MOST_STEPS_WITH_IT = 0.75
"""Of the steps that have a loss, from which on all of them are slow ones, the short ones too."""
SCATTERED = 0.5
"""Runs of neighbouring slow steps over slow steps, below which they are one stretch of the run."""


@dataclass(frozen=True, slots=True)
class Occasions:
    """Which steps are slow, and by how much."""

    is_slow: Flags
    excess_ms: Floats
    """[step]: beyond the usual steps; 0 in these."""
    usual_error_ms: float
    """Standard error of the median of the usual steps."""
    period: int | None
    """Steps from one slow step to the next; None where they come at random."""
    half_width: float | None = None
    """Of the 95 % interval of the slow steps' mean excess, over that mean, from more steps than these. None:
    as these have it."""

    @property
    def each_ms(self) -> float:
        return float(np.median(self.excess_ms[self.is_slow]))

    def mean_ms(self) -> tuple[float, tuple[float, float]]:
        """Of all steps, with its 95 % interval: Student's, of the slow steps where the period tells their
        number, else of all."""
        values = self.excess_ms if self.period is None else self.excess_ms[self.is_slow]
        part = len(values) / len(self.excess_ms)
        mean = float(values.mean())
        half = half_width(values, self.usual_error_ms) if self.half_width is None else self.half_width * mean
        return part * mean, (part * max(mean - half, 0.0), part * (mean + half))

    def among(self, known: Ints, steps: Ints) -> tuple[Flags, Flags]:
        """Which steps are slow, and which are usual. known: those of these occasions. A period tells it of
        others, too; without one these are neither."""
        is_slow, is_known = np.isin(steps, known[self.is_slow]), np.isin(steps, known)
        if self.period is None:
            return is_slow, is_known & ~is_slow
        places = np.bincount(known[self.is_slow] % self.period, minlength=self.period)
        is_slow |= ~is_known & (steps % self.period == places.argmax())
        return is_slow, ~is_slow

    def are_most_of(self, has_it: Flags) -> bool:
        """Whether all slow steps are among those that have something, and most of these are slow."""
        num_with_it = int(has_it.sum())
        is_within = bool(has_it[self.is_slow].all()) and num_with_it < len(has_it)
        return is_within and int(self.is_slow.sum()) >= MOST_STEPS_WITH_IT * num_with_it

    def in_steps(self, has_it: Flags, values_ms: Floats) -> "Occasions":
        """The same of all steps that have it."""
        if (has_it == self.is_slow).all():
            return self
        excess_ms = np.where(has_it, np.maximum(values_ms - np.median(values_ms[~has_it]), 0.0), 0.0)
        return replace(self, is_slow=has_it, excess_ms=excess_ms, period=None)

    @property
    def often(self) -> str:
        """'every third step', '8 of 40 steps'."""
        if self.period is not None:
            return f"every {_ordinal(self.period)} step"
        return f"{int(self.is_slow.sum())} of {len(self.is_slow)} steps"

    @property
    def text(self) -> str:
        """'every third step (14 of 42), each 41 ms longer: 13.7 ms a step on average'."""
        num, all_ms = int(self.is_slow.sum()), float(self.excess_ms.sum())
        often = self.often + (f" ({num} of {len(self.is_slow)})" if self.period is not None else "")
        mean_ms = quantity(all_ms / len(self.is_slow), "ms")
        return f"{often}, each {quantity(all_ms / num, 'ms')} longer: {mean_ms} a step on average"


def half_width(values: Floats, other_error: float = 0.0) -> float:
    """Of the 95 % interval of a mean, Student's. other_error: a standard error that is not in the values."""
    from scipy.special import stdtrit

    error = math.hypot(float(values.std(ddof=1)) / math.sqrt(len(values)), other_error)
    return float(stdtrit(len(values) - 1, 0.975)) * error


def occasions(values_ms: Floats, global_step: Ints, known: Occasions | None = None) -> Occasions | None:
    """None where no steps are slow apart from chance. values_ms and global_step: one per step. known: slow
    steps that more steps than these have shown."""
    values = np.nan_to_num(np.asarray(values_ms, dtype=np.float64))
    found = None if known is None else _as_known(values, known)
    return found if found is not None else _occasions(values, global_step)


def of_all_steps(step_ms: Floats, global_step: Ints, chosen: Ints) -> Occasions | None:
    """Slow steps by the length of all steps, for a choice of them of which more was recorded: a few of a loss
    that comes every 20th step are among these, and tell how large it is."""
    slow = occasions(step_ms, global_step)
    if slow is None or len(chosen) < MIN_STEPS:
        return None
    excess = slow.excess_ms[slow.is_slow]
    is_slow = np.isin(chosen, global_step[slow.is_slow])
    if not is_slow.any() or is_slow.all() or not excess.mean() > 0:
        return None
    part = half_width(excess, slow.usual_error_ms) / float(excess.mean())
    return Occasions(is_slow, np.zeros(len(chosen)), 0.0, slow.period, part)


def _as_known(values: Floats, known: Occasions) -> Occasions | None:
    """None where it is not these steps that have the loss."""
    slow, usual = values[known.is_slow], values[~known.is_slow]
    usual_ms = float(np.median(usual))
    excess = np.where(known.is_slow, values - usual_ms, 0.0)
    is_apart = slow.min() > usual_ms + APART * max(_width(usual), 0.0)
    if not is_apart or not excess.sum() >= MOST * np.maximum(values - usual_ms, 0.0).sum():
        return None
    return replace(known, excess_ms=excess)


def _occasions(values: Floats, global_step: Ints) -> Occasions | None:
    num = len(values)
    if num < MIN_STEPS or not np.ptp(values) > 0:
        return None
    late = slice(max(num - MOST_STEPS, 0), None)
    found = _periodic(values[late], global_step[late])
    if found is not None:
        period, phase = found
        is_slow = np.asarray(global_step % period == phase)
    else:
        threshold = _apart(values[late])
        if threshold is None:
            return None
        is_slow, period = values > threshold, None
    usual = values[~is_slow]
    usual_ms = float(np.median(usual))
    deviation = 1.4826 * float(np.median(np.abs(usual - usual_ms)))
    excess = np.where(is_slow, values - usual_ms, 0.0)
    if not np.median(excess[is_slow]) > 0:
        return None
    return Occasions(is_slow, excess, deviation * math.sqrt(math.pi / 2 / len(usual)), period)


def are_alike(values_ms: Floats) -> bool:
    """Whether a few steps lose much, as much as each other, and the rest next to nothing: a program does the
    same again; what a busy machine takes differs from time to time. For fewer steps than a period needs."""
    values = np.nan_to_num(values_ms)
    largest = float(values.max(initial=0.0))
    is_large = values >= ALIKE * largest
    if not largest > 0 or is_large.sum() < 2 or is_large.mean() > 0.5:
        return False
    return float(values[~is_large].max()) <= NEXT_TO_NOTHING * float(values[is_large].min())


def without_traces(values_ms: Floats) -> Floats:
    """Of a loss that is in few steps: 0 in those that have next to nothing of it."""
    values = np.nan_to_num(values_ms)
    is_trace = values < NEXT_TO_NOTHING * values.max(initial=0.0)
    is_rare = is_trace.mean() > 0.5 and values[is_trace].sum() < A_QUARTER * values.sum()
    return np.where(is_trace, 0.0, values) if is_rare else values


def _periodic(values: Floats, global_step: Ints) -> tuple[int, int] | None:
    """Period and phase (of the global step) whose steps are the slowest; None where chance explains them."""
    num = len(values)
    ranks = np.empty(num)
    in_order = np.argsort(values, kind="stable")
    ranks[in_order] = np.arange(num)
    best: tuple[float, int, int, int] | None = None
    for period in range(2, min(LONGEST_PERIOD, (num - 1) // (MIN_SLOW - 1)) + 1):
        phase = global_step % period
        count = np.bincount(phase, minlength=period)
        sums = np.bincount(phase, weights=ranks, minlength=period)
        usable = (count >= MIN_SLOW) & (2 * count <= num + 1)
        spread = np.sqrt(np.maximum(count * (num - count) * (num + 1) / 12, 1e-9))
        z = np.where(usable, (sums - count * (num - 1) / 2) / spread, -np.inf)
        top = int(np.argmax(z))
        if best is None or z[top] > best[0]:
            best = float(z[top]), period, top, int(count[top])
    found: list[tuple[float, int, int]] = []
    if best is not None and np.isfinite(best[0]):
        _, period, phase_of_best, count_of_best = best
        hits = int((global_step[in_order[num - count_of_best :]] % period == phase_of_best).sum())
        found.append((_log_chance_of_hits(hits, count_of_best, num), period, phase_of_best))
    num_tried, of_slowest = _of_the_slowest(in_order, global_step)
    if not found and not of_slowest:
        return None
    log_chance, period, phase_of_best = min([*found, *of_slowest])
    chance = num_tried * math.exp(log_chance)
    if chance >= LEAST_CHANCE:
        is_phase = global_step % period == phase_of_best
        slow, usual = values[is_phase], values[~is_phase]
        if chance >= LEAST_CHANCE_APART or not slow.min() - usual.max() > _width(usual):
            return None
    return period, phase_of_best


def _of_the_slowest(
    in_order: NDArray[np.intp], global_step: Ints
) -> tuple[int, list[tuple[float, int, int]]]:
    """How many phases were tried, and the least likely one that has enough of the slowest steps: logarithm of
    its chance, period and phase. in_order: places of the steps, the slowest last."""
    num, num_tried = len(in_order), 0
    best: list[tuple[float, int, int]] = []
    slowest = global_step[in_order[::-1][: num // 2 + 1]]
    for period in range(2, min(LONGEST_OF_ALL, (num - 1) // (MIN_SLOW - 1)) + 1):
        # Of longer periods all phases, as nearly all of them have steps enough.
        is_short = period <= LONGEST_PERIOD
        num_tried += int((np.bincount(global_step % period) >= MIN_SLOW).sum()) if is_short else period
        of_slowest = np.bincount(slowest[: max(num // period, MIN_SLOW)] % period)
        top = int(of_slowest.argmax())
        if of_slowest[top] < LEAST_HITS * (num // period):
            continue
        count = int((global_step % period == top).sum())
        hits = int((slowest[:count] % period == top).sum())
        if MIN_SLOW <= count <= (num + 1) / 2 and hits >= LEAST_HITS * count:
            found = _log_chance_of_hits(hits, count, num), period, top
            best = [min([found, *best])]
    return num_tried, best


def _log_chance_of_hits(num_hits: int, num_drawn: int, num: int) -> float:
    """Of as many drawn steps and more among the num_drawn slowest of num: hypergeometric."""
    logs = [
        _log_choose(num_drawn, hits) + _log_choose(num - num_drawn, num_drawn - hits)
        for hits in range(max(num_hits, 2 * num_drawn - num), num_drawn + 1)
    ]
    most = max(logs)
    return most + math.log(math.fsum(math.exp(one - most) for one in logs)) - _log_choose(num, num_drawn)


def _log_choose(num: int, drawn: int) -> float:
    return math.lgamma(num + 1) - math.lgamma(drawn + 1) - math.lgamma(num - drawn + 1)


def _apart(values: Floats) -> float | None:
    """A length that no step has, between usual and slow ones; None where all are of a kind."""
    in_order = np.sort(values)
    num = len(in_order)
    gaps = np.diff(in_order)
    allowed = np.zeros(num - 1, dtype=bool)
    allowed[(num - 1) // 2 : num - MIN_AT_RANDOM] = True  # at most half of the steps are slow
    if not allowed.any():
        return None
    place = int(np.argmax(np.where(allowed, gaps, -1.0)))
    threshold = float((in_order[place] + in_order[place + 1]) / 2)
    usual, slow = in_order[: place + 1], in_order[place + 1 :]
    is_slow = values > threshold
    num_stretches = int(is_slow[0]) + int((np.diff(is_slow.astype(int)) == 1).sum())
    is_scattered = num_stretches >= SCATTERED * len(slow)
    is_apart = gaps[place] > max(_width(slow), _width(usual))
    return threshold if is_scattered and is_apart else None


def _width(values: Floats) -> float:
    """From the 5th to the 95th percentile."""
    low, high = np.percentile(values, [5, 95])
    return float(high - low)


ORDINALS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth"}


def _ordinal(number: int) -> str:
    if number in ORDINALS:
        return ORDINALS[number]
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
