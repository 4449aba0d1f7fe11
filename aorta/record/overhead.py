"""Which steps are recorded, so that recording costs no more than was asked for. Plain logic without a clock.

    step  0 ... 23      24 ... 39        then blocks of 8
          all recorded  none recorded    one block of `every` recorded, on all ranks the same

What recording costs is the difference between a recorded block and the steps on both sides of it, which were
not recorded. The larger `every` is, the smaller the mean over all steps.

Where steps scatter, their lengths take long to tell the cost. The process's CPU time scatters less and
bounds it: a step waits for recording no longer than recording runs, on its own thread or on another that
holds a lock, and for what the driver's records take on the device, which is known. So `every` is chosen by
the smaller of the two upper ends; what is reported as cost is the difference of lengths.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median, variance

import msgspec
from msgspec.structs import astuple

from aorta.records.schema import OverheadRecord

NUM_WARM = 8
"""Steps that compile, allocate and connect: recorded, and not judged."""
NUM_FIRST = NUM_WARM + 16
"""Steps at the start that are recorded, whatever that costs, so that a short run has an answer."""
BLOCK = 8
"""Steps that are recorded in a row, or are not: what a switch costs is spread over them."""
NUM_FIRST_LEFT_OUT = 2
"""Blocks after them that are not: the first cost is the difference."""
FIRST_EVERY = 64
"""`every` until the first cost is known."""
MOST_EVERY = 1024
DETAILED = ((256, 1), (4096, 8), (65536, 64))
"""(place, rate): up to this place, the lines of recorded steps have details in one block of so many."""
DETAILED_LATER = 256
"""Rate after that: details of 20 kB then come to 80 bytes a step."""
SEEN_EVERY = 16
"""Of so many recorded blocks one is seen, on average: names and sizes of collectives are as old as that."""
LOOKS = 64
"""Where every block is recorded, one of so many is not: otherwise the cost would not be known any more."""
LEAST_BESIDE, MOST_BESIDE = 4, 16
"""Steps beside a recorded block with which it is compared: on each side at most, together at least."""
SLOW = 3.0
"""A step of so many usual lengths is slow: the next block is recorded. In differences it counts as that."""
CHANGED = 1.2
"""Ratio of usual lengths, now and before the last recorded block: the next blocks are recorded."""
ENOUGH_PAIRS = 3
"""Differences from which on that of the first steps does not count any more."""
FEW_WIDTH = 4.0
"""Width of the interval, in errors within blocks, while too few show how blocks differ."""
DEVICE_SHARE = 0.005
"""Share of a step that the driver's records take on the device where kernels are not tiny."""
HOOKS, MOST_HOOKS = 2.6, 4.0
"""In a step that is left out, all that the training thread runs for us over what of it is timed: about, and
at most. Not timed are hooks of batches, of the backward pass and before the optimizer: docs/evidence.md."""
MOST_PAIRS = 256
"""Latest differences from which the cost is known."""


def is_recorded(place: int, every: int) -> bool:
    """True for a step that is recorded. place: its number, counted from the first step of this process.

    every is a power of two. The steps of a larger one are among those of a smaller one, so ranks that learn
    of a change at different times still have steps in common.
    """
    if 0 <= place < NUM_FIRST:
        return True
    block = block_of(place)  # below 0 where the program has gone back behind its first step
    if 0 <= block < NUM_FIRST_LEFT_OUT:
        return False
    return block % LOOKS != 0 if every == 1 else (block + 1) % every == 0


def is_seen(place: int) -> bool:
    """True for a step in which collectives are noted one by one if it is recorded, whatever is known of them.

    One block of SEEN_EVERY, drawn by its number: so `every`, whichever it is, has its share of them, and what
    they cost more is in the differences that choose it.
    """
    block = block_of(place)
    drawn = (block ^ block >> 5) * 0x9E3779B1 % 2**32 >> 16
    return place < NUM_FIRST or drawn < 2**16 // SEEN_EVERY


def has_details(place: int) -> bool:
    """True for a step whose line has details if it is recorded: in a long run, fewer and fewer.

    Rates are powers of two, as `every` is, so what is recorded rarely has details as long as it can.
    """
    rate = next((rate for end, rate in DETAILED if place < end), DETAILED_LATER)
    return rate == 1 or (block_of(place) + 1) % rate == 0


def share_recorded(every: int) -> float:
    """Share of the steps that are recorded, once the first ones are over."""
    return 1 - 1 / LOOKS if every == 1 else 1 / every


def block_of(place: int) -> int:
    """Number of the block of a step; negative before the first one."""
    return (place - NUM_FIRST) // BLOCK


_Lengths = tuple[float, float]
"""Length of a step and CPU time of the process in it, in ms."""


class Cost(msgspec.Struct, frozen=True):
    """What a recorded step takes longer than one that is not, in ms, with its 95 % interval. Or any step."""

    ms: float
    low_ms: float
    high_ms: float

    @property
    def most_ms(self) -> float:
        """The upper end of what recording can cost, which is never below 0: steps that were shorter by more
        than their scatter have changed, and tell nothing."""
        return self.high_ms - min(self.ms, 0.0) if self.high_ms >= 0 else math.inf


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """A recorded block against the steps beside it: differences a recorded step."""

    ms: float
    error_sq: float
    """Square of its own error."""
    cpu_ms: float
    cpu_error_sq: float


class Meter:
    """Measures what recording costs from the lengths of steps."""

    def __init__(self) -> None:
        self.num_steps = self.num_recorded = 0
        self.num_later = self.num_later_recorded = 0
        """The same without the first NUM_FIRST steps."""
        self.total_ms = self.later_ms = 0.0
        self._num_plain = 0
        self._own_ms = self._threads_ms = self._plain_ms = 0.0
        """In steps that are not recorded: time of our own code where a step ends and begins, CPU time of our
        own threads, and length of these steps."""
        self._costs: tuple[Cost | None, Cost | None] | None = None
        """By length and by CPU time, of the pairs that there are; None: to be worked out."""
        self._pairs: deque[Pair] = deque(maxlen=MOST_PAIRS)
        self._first_pair: Pair | None = None
        """That of the first steps, which also learn names and warm up: it is the cost until another is
        there, and bounds it until others are."""
        self._is_first = True
        self._before: deque[_Lengths] = deque(maxlen=MOST_BESIDE)
        """The steps before the recorded ones."""
        self._during: list[_Lengths] = []
        """The steps of the recorded block."""
        self._switches: list[_Lengths] = []
        """The steps beside it that its switches fall into."""
        self._after: list[_Lengths] = []

    def add(
        self,
        step_ms: float,
        place: int,
        recorded: bool,
        switched: bool,
        own_ms: float = 0.0,
        cpu_ms: float = 0.0,
    ) -> None:
        """Take the next step. switched: it is not recorded, and something was put on or taken off in it.

        own_ms: time of our own code at its ends. cpu_ms: CPU time of the process in it.
        """
        if not (recorded or switched):
            self.add_plain([step_ms], cpu_ms, own_ms)
            return
        self.num_steps += 1
        self.num_recorded += recorded
        self.total_ms += step_ms
        if not 0 <= place < NUM_FIRST:
            self.num_later += 1
            self.num_later_recorded += recorded
            self.later_ms += step_ms
        if 0 <= place < NUM_WARM:
            return
        if self._after:
            self._conclude()
        (self._during if recorded else self._switches).append((step_ms, cpu_ms))
        # Only what is near the steps beside it can be compared: of a long stretch its two ends.
        if len(self._during) > MOST_BESIDE * (2 if self._before else 1):
            del self._during[MOST_BESIDE if self._before else 0]

    def add_plain(self, lengths_ms: Sequence[float], cpu_ms: float, own_ms: float) -> None:
        """Take steps in a row, none of which is recorded or switched.

        cpu_ms: of one of them in the mean. own_ms: of all together.
        """
        total_ms = math.fsum(lengths_ms)
        self.num_steps += len(lengths_ms)
        self.num_later += len(lengths_ms)
        self.total_ms += total_ms
        self.later_ms += total_ms
        self._num_plain += len(lengths_ms)
        self._own_ms += own_ms
        self._plain_ms += total_ms
        steps = [(step_ms, cpu_ms) for step_ms in lengths_ms]
        if self._during:
            num_missing = MOST_BESIDE - len(self._after)
            self._after += steps[:num_missing]
            if len(self._after) < MOST_BESIDE:
                return
            self._conclude()
            steps = steps[num_missing:]
        self._before.extend(steps[-MOST_BESIDE:])

    def threads_took(self, cpu_ms: float) -> None:
        """Note CPU time of our own threads in steps that are not recorded."""
        self._threads_ms += cpu_ms

    def interrupted(self) -> None:
        """Forget the block that is measured: something else took its time, a checkpoint say."""
        self._before.clear()
        self._during, self._switches, self._after = [], [], []

    def _conclude(self) -> None:
        """Compare the recorded block with the steps on both of its sides."""
        beside = [*self._before, *self._after]
        if len(beside) >= LEAST_BESIDE and self._during:
            wall, cpu = (
                _difference(*([step[i] for step in of] for of in (self._during, self._switches, beside)))
                for i in (0, 1)
            )
            pair = Pair(*wall, *cpu)
            self._costs = None
            if self._is_first and not self._before:
                self._first_pair = pair
            else:
                self._pairs.append(pair)
        self._is_first = False
        self._before = deque(self._after, maxlen=MOST_BESIDE)
        self._during, self._switches, self._after = [], [], []

    # -- what it has found ---------------------------------------------------------------------------

    def _known_pairs(self) -> list[Pair]:
        return list(self._pairs) or ([] if self._first_pair is None else [self._first_pair])

    @property
    def plain_ms(self) -> float | None:
        """Length of the latest steps that were not recorded; None before there are some."""
        latest = [*self._before, *self._after]
        return median(ms for ms, _ in latest) if latest else None

    def settle(self) -> None:
        """Compare what there is so far, as far as it goes."""
        if self._during and len(self._after) + len(self._before) >= LEAST_BESIDE and self._after:
            self._conclude()

    def cost(self) -> Cost | None:
        """None before the first difference."""
        return self._known_costs()[0]

    def _known_costs(self) -> tuple[Cost | None, Cost | None]:
        if self._costs is None:
            self._costs = _costs_of(self._known_pairs())
        return self._costs

    def _most_ms(self) -> float | None:
        """Return what a recorded step costs at most; None before a difference that tells it.

        Until enough blocks were compared, by whichever says more, the first steps or those after them:
        where a program or its machine drifts, a few differences are off by more than their scatter shows.
        """
        plain_ms = self.plain_ms
        known = [self._known_costs()]
        if self._first_pair is not None and len(self._pairs) < ENOUGH_PAIRS:
            known.append(_costs_of([self._first_pair]))
        most_ms = [
            min(cost.most_ms, cpu.most_ms + DEVICE_SHARE * plain_ms)
            for cost, cpu in known
            if cost is not None and cpu is not None and plain_ms
        ]
        return max(most_ms) if len(most_ms) == len(known) and max(most_ms) < math.inf else None

    def always_on(self) -> Cost | None:
        """What every step takes longer, recorded or not; None before one was left out.

        The low end is what clocks have seen. What they cannot see, without being most of it, is in proportion
        to that: calls of hooks, and what waits for a thread.
        """
        if not self._num_plain:
            return None
        own_ms, threads_ms = self._own_ms / self._num_plain, self._threads_ms / self._num_plain
        return Cost(HOOKS * own_ms + threads_ms, own_ms, MOST_HOOKS * own_ms + 2 * threads_ms)

    def chosen_every(self, limit: float) -> int:
        """The smallest `every` whose mean cost stays within limit, by the upper end of the cost."""
        most_ms, plain_ms = self._most_ms(), self.plain_ms
        if most_ms is None or not plain_ms:
            return FIRST_EVERY
        every = 1
        while every < MOST_EVERY and most_ms * share_recorded(every) > self._left(limit) * plain_ms:
            every *= 2
        return every

    def _left(self, limit: float) -> float:
        """The share of a step that is left for recording, beside what stays on."""
        always_on, plain_ms = self.always_on(), self.plain_ms
        return max(limit - (always_on.ms / plain_ms if always_on and plain_ms else 0.0), limit / 8)

    def has_room(self, limit: float, more_ms: float = 0.0, num_blocks: int = 1) -> bool:
        """True where so many blocks may be recorded out of turn within the limit. more_ms: of steps that were
        not added yet."""
        most_ms = self._most_ms()
        if most_ms is None:
            return False
        return most_ms * (self.num_later_recorded + num_blocks * BLOCK) <= self._left(limit) * (
            self.later_ms + more_ms
        )

    def record(self, limit: float | None) -> OverheadRecord:
        """Describe all this for run.json."""
        cost, always_on = self.cost(), self.always_on()
        all_of_it, later = (
            _shares(cost, always_on, num_recorded, num_steps, total_ms)
            for num_recorded, num_steps, total_ms in (
                (self.num_recorded, self.num_steps, self.total_ms),
                # Nothing recorded later costs nothing, but nobody has seen that.
                (self.num_later_recorded, self.num_later if self.num_later_recorded else 0, self.later_ms),
            )
        )
        stays = _shares(always_on, None, self._num_plain, self._num_plain, self._plain_ms)
        return OverheadRecord(
            limit=limit,
            cost=None if all_of_it is None else all_of_it[0],
            interval=None if all_of_it is None else all_of_it[1:],
            later_cost=None if later is None else later[0],
            later_interval=None if later is None else later[1:],
            step_ms=None if cost is None else cost.ms,
            step_interval_ms=None if cost is None else (cost.low_ms, cost.high_ms),
            always_on=None if stays is None else stays[0],
            always_on_interval=None if stays is None else stays[1:],
            always_on_ms=None if always_on is None else always_on.ms,
            every=self.num_later / self.num_later_recorded if self.num_later_recorded else None,
            num_steps=self.num_steps,
            num_recorded=self.num_recorded,
            num_first=NUM_FIRST,
            num_pairs=len(self._pairs),
        )

    # -- over a restart ------------------------------------------------------------------------------

    def pairs(self) -> list[Pair]:
        return list(self._pairs)

    def continue_with(self, pairs: Sequence[Pair]) -> None:
        """Begin with what an attempt before this one has measured."""
        self._pairs.extend(pairs)
        self._costs = None


def _shares(
    cost: Cost | None, always_on: Cost | None, num_recorded: int, num_steps: int, total_ms: float
) -> tuple[float, float, float] | None:
    """What num_steps cost, num_recorded of them recorded, over what they would have taken without."""
    if cost is None or not num_steps:
        return None
    always = always_on or Cost(0.0, 0.0, 0.0)
    mean_ms, low_ms, high_ms = (
        num_recorded * recorded_ms + num_steps * ms
        for recorded_ms, ms in zip(astuple(cost), astuple(always), strict=True)
    )
    bare_ms = total_ms - mean_ms
    return None if bare_ms <= 0 else (mean_ms / bare_ms, low_ms / bare_ms, high_ms / bare_ms)


def _difference(during: list[float], switches: list[float], beside: list[float]) -> tuple[float, float]:
    """How much longer a recorded step took, with all that its block and its switches took, and its error."""
    usual, most = median(beside), SLOW * max(median(beside), median(during))
    beside = [min(length, SLOW * usual) for length in beside]
    during, switches = ([min(length, most) for length in of] for of in (during, switches))
    difference = (sum(during) + sum(switches) - (len(during) + len(switches)) * fmean(beside)) / len(during)
    return difference, _error_sq(during) + _error_sq(beside)


def _costs_of(pairs: Sequence[Pair]) -> tuple[Cost | None, Cost | None]:
    """By length and by CPU time."""
    return (
        _mean([(pair.ms, pair.error_sq) for pair in pairs]),
        _mean([(pair.cpu_ms, pair.cpu_error_sq) for pair in pairs]),
    )


def _mean(differences: Sequence[tuple[float, float]]) -> Cost | None:
    """The mean of differences with their squared errors, and its 95 % interval; None without any."""
    n = len(differences)
    if n == 0:
        return None
    values = [value for value, _ in differences]
    if n < 5:  # too few to know their scatter: their own errors, and generously
        error, width = math.sqrt(fmean(square for _, square in differences) / n), FEW_WIDTH
    else:
        error, width = math.sqrt(variance(values) / n), t_95(n - 1)
    mean = fmean(values)
    return Cost(mean, mean - width * error, mean + width * error)


def _error_sq(lengths: Sequence[float]) -> float:
    """Square of the error of their mean."""
    return variance(lengths) / len(lengths) if len(lengths) > 1 else 0.0


def t_95(freedom: int) -> float:
    """Student's t of a two-sided 95 % interval, to 0.2 % from 3 degrees of freedom on.

    Source: Abramowitz and Stegun, 26.7.5, for the normal quantile 1.95996.
    """
    x = 1.959964
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + math.fsum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
