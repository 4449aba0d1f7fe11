"""The convoy: 10 µs kernels whose stream shares a queue with 10 ms kernels, against other queues.

In rounds, stream 0 launches a large kernel and every other stream a small one. A small kernel's delay is
counted from the moment at which its own stream was ready for it: the end of the small kernel before it, or
the opening of the gate. On another queue that is launch latency. On the large kernels' queue the next large
kernel stands before it: with start order it waits until that one starts, which is when the large kernel
before has ended; with barriers until it has ended.

Who shares the queue the same run tells, with spins before and after the rounds. The number of streams is a
multiple of the number of queues, so that a device that deals queues out with every launch comes to the same
one in every round.
"""

import msgspec
import numpy as np

from aorta.queues.probe.machine import Floats, Op, Outcome, ProbeMachine, Spin, Stamp
from aorta.queues.probe.parts.placement import predicted_start_us
from aorta.queues.probe.parts.queues import Order
from aorta.queues.probe.parts.sharing import Relation

LARGE_US = 10_000.0
SMALL_US = 10.0
NUM_ROUNDS = 16
CHECK_LONG_US = 3_000.0
CHECK_SHORT_US = 20.0
TRIES = 4
MOST_TURNS = 4
"""Streams over queues."""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Start delay of the small kernels."""

    mean_us: float
    p50_us: float
    p99_us: float
    largest_us: float
    num: int


class Convoy(msgspec.Struct, frozen=True, kw_only=True):
    large_us: float
    small_us: float
    streams: int
    """Streams that launch in turn."""
    beside: list[int]
    """Streams seen to share the large kernels' queue, before the rounds and after them."""
    elsewhere: list[int]
    """Streams seen not to, both times."""
    private: Delays | None
    """None: every stream shares the large kernels' queue."""
    shared: Delays | None
    """None: none does."""
    predicted_shared: Delays | None
    """Delays by arithmetic, from the order that the queue was found to have."""
    reason: str | None
    """Reason why one of them is null."""
    primed: bool


def convoy(
    machine: ProbeMachine,
    queues: int,
    order: Order | None,
    large_us: float = LARGE_US,
    num_rounds: int = NUM_ROUNDS,
) -> Convoy:
    """Repeats the run, TRIES at most, until some stream shares the large kernels' queue."""
    num = launching(machine.num_streams, queues)
    for _ in range(TRIES):
        outcome = machine.run(program(num, large_us, num_rounds))
        behind = seen_behind(outcome.start_us, num)
        if behind.all(axis=0).any():
            break
    return judge(outcome, behind, large_us, num_rounds, order)


def launching(num_streams: int, queues: int) -> int:
    """A multiple of the number of queues, twice that number at least, where there are as many streams."""
    return queues * min(MOST_TURNS, num_streams // queues) if num_streams >= 2 * queues else num_streams


def program(num: int, large_us: float, num_rounds: int) -> list[Op]:
    """A check, the rounds, the check again; each check is two turns of all streams."""
    following = range(1, num)
    check: list[Op] = [
        Spin(0, CHECK_LONG_US),
        *[Stamp(stream) for stream in following],
        Spin(0, CHECK_SHORT_US),
        *[Spin(stream, CHECK_SHORT_US) for stream in following],
    ]
    small: list[Op] = [Spin(stream, SMALL_US) for stream in following]
    return [*check, *[op for _ in range(num_rounds) for op in (Spin(0, large_us), *small)], *check]


def seen_behind(start_us: Floats, num: int) -> Relation:
    """[check, stream from 1]: whether its second kernel waited for the second one of stream 0."""
    rounds = start_us.reshape(-1, num)
    is_behind: Relation = np.array(
        [second[1:] - first[0] > 2 / 3 * CHECK_LONG_US for first, second in (rounds[:2], rounds[-2:])]
    )
    return is_behind


def judge(
    outcome: Outcome, behind: Relation, large_us: float, num_rounds: int, order: Order | None
) -> Convoy:
    """Judges from the stamps of `program`; a stream that the two checks disagree about counts nowhere."""
    num = 1 + behind.shape[1]
    is_delayed: Relation = np.logical_and(behind[0], behind[1])
    elsewhere: Relation = ~np.logical_or(behind[0], behind[1])
    reasons = []
    if not is_delayed.any():
        reasons.append("no stream was seen to share the large kernels' queue before and after the rounds")
    if not elsewhere.any():
        reasons.append("all streams share one queue" if is_delayed.all() else "no stream was seen elsewhere")
    start_us, end_us = outcome.start_us.reshape(-1, num), outcome.end_us.reshape(-1, num)
    predicted = None
    if order is not None and is_delayed.any():
        ops = program(num, large_us, num_rounds)
        queue_of = [0, *[0 if shares else 1 + index for index, shares in enumerate(is_delayed)]]
        start = predicted_start_us(ops, queue_of * (num_rounds + 4), order)
        length = np.array([op.us if isinstance(op, Spin) else 0.0 for op in ops])
        predicted = _summary(start.reshape(-1, num), (start + length).reshape(-1, num), is_delayed)
    return Convoy(
        large_us=large_us,
        small_us=SMALL_US,
        streams=num,
        beside=(1 + np.nonzero(is_delayed)[0]).tolist(),
        elsewhere=(1 + np.nonzero(elsewhere)[0]).tolist(),
        private=_summary(start_us, end_us, elsewhere),
        shared=_summary(start_us, end_us, is_delayed),
        predicted_shared=predicted,
        reason="; ".join(reasons) or None,
        primed=outcome.primed,
    )


def _summary(start_us: Floats, end_us: Floats, streams: Relation) -> Delays | None:
    """Summary of the rounds between the checks; [turn, stream from 0], and which streams from 1 count."""
    if not streams.any():
        return None
    delay = (start_us[2:-2] - end_us[1:-3])[:, 1:]
    return summary(delay[:, streams].ravel())


def summary(delay_us: Floats) -> Delays:
    p50_us, p99_us, largest_us = np.percentile(delay_us, [50, 99, 100]).tolist()
    mean_us = float(delay_us.mean())
    return Delays(mean_us=mean_us, p50_us=p50_us, p99_us=p99_us, largest_us=largest_us, num=len(delay_us))
