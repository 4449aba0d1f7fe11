"""Number of hardware queues: the staircase.

Each of n streams gets two kernels A, B of length T, stream after stream. On a stream with a queue of its
own A starts at once. Where streams share a queue, what was submitted later waits its turn: until the B of
the stream before it has started (start order), or has ended (barrier). So the number of A that start at
once is the number of queues that the n streams occupy, and the whole takes (ceil(n/Q) + 1) T with start
order, 2 ceil(n/Q) T with barriers, when Q queues are filled evenly. A second run with one kernel per
stream tells the two apart: T or ceil(n/Q) T.
"""

from collections.abc import Sequence
from math import ceil
from typing import Literal

import msgspec

from aorta.queues.probe.machine import ProbeMachine, Spin
from aorta.timeline.arrays import Floats

SPIN_US = 1000.0
"""Long against the dispatching of kernels, which a device does one by one: an H200 takes 20 µs for 64."""
STREAM_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 28, 31, 32, 33, 36, 40, 48, 56, 64)
AGREES = 0.1
"""Relative distance within which a time is what arithmetic predicts."""

Order = Literal["start", "barrier"]


class QueueStep(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the staircase; times in units of the kernels' length."""

    streams: int
    at_once: int
    """Streams whose first kernel started before any kernel had ended."""
    pair_spins: float
    """Length of the run with two kernels per stream, in spins."""
    single_spins: float
    """Length of the run with one kernel per stream, in spins."""
    primed: bool


class QueueCount(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the staircase."""

    queues: int
    """Largest number of streams that started at once."""
    at_least: bool
    """Every stream that was tried had a queue to itself: there may be more."""
    order: Order | None
    """Order within a shared queue; None where no streams share one."""
    worst_error: float
    """Largest relative distance of a measured pair time from the evenly filled prediction."""
    even: bool
    """All times are within AGREES of it: streams are spread evenly over the queues."""
    agrees: bool
    """Times alone, without looking at starts, give the same number."""
    from_times: int
    primed: bool
    steps: list[QueueStep]


def staircase(machine: ProbeMachine) -> QueueCount:
    """Runs it for every count of STREAM_COUNTS up to machine.num_streams."""
    usable = [count for count in STREAM_COUNTS if count <= machine.num_streams]
    return count_queues([_step(machine, count) for count in usable])


def _step(machine: ProbeMachine, num_streams: int) -> QueueStep:
    pairs = machine.run([Spin(stream, SPIN_US) for stream in range(num_streams) for _ in range(2)])
    singles = machine.run([Spin(stream, SPIN_US) for stream in range(num_streams)])
    return QueueStep(
        streams=num_streams,
        at_once=started_at_once(pairs.start_us[::2], pairs.end_us),
        pair_spins=pairs.span_us / SPIN_US,
        single_spins=singles.span_us / SPIN_US,
        primed=pairs.primed and singles.primed,
    )


def started_at_once(first_start_us: Floats, all_end_us: Floats) -> int:
    """Kernels that started before any had ended, halfway at the latest: none of these waited for another."""
    half = 0.5 * (first_start_us.min() + all_end_us.min())
    return int((first_start_us < half).sum())


def predicted_spins(num_streams: int, queues: int, order: Order) -> tuple[float, float]:
    """Spins that pairs and singles take when the queues are filled evenly."""
    deepest = ceil(num_streams / queues)
    if order == "start":
        return deepest + 1.0, 1.0
    return 2.0 * deepest, float(deepest)


def count_queues(steps: Sequence[QueueStep]) -> QueueCount:
    """Joins the points: the number of queues twice, from who started at once and from the times alone."""
    queues = max(step.at_once for step in steps)
    at_least = queues == max(step.streams for step in steps)
    from_times, order = _fit(steps)
    error = max(abs(step.pair_spins / predicted_spins(step.streams, queues, order)[0] - 1) for step in steps)
    return QueueCount(
        queues=queues,
        at_least=at_least,
        order=None if at_least else order,
        worst_error=error,
        even=error <= AGREES,
        agrees=from_times == queues,
        from_times=from_times,
        primed=all(step.primed for step in steps),
        steps=list(steps),
    )


def _fit(steps: Sequence[QueueStep]) -> tuple[int, Order]:
    """The number of queues, and the order, whose predicted times are nearest to the measured ones.

    With as many queues as streams both orders predict the same; the first that fits best is taken.
    """
    orders: tuple[Order, ...] = ("start", "barrier")
    candidates = [(queues, order) for order in orders for queues in range(1, steps[-1].streams + 1)]
    return min(candidates, key=lambda candidate: _misfit(steps, *candidate))


def _misfit(steps: Sequence[QueueStep], queues: int, order: Order) -> float:
    total = 0.0
    for step in steps:
        pairs, singles = predicted_spins(step.streams, queues, order)
        total += (step.pair_spins / pairs - 1) ** 2 + (step.single_spins / singles - 1) ** 2
    return total
