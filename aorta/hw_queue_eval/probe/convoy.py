"""The convoy: 10 µs kernels whose stream shares a queue with 10 ms kernels, against a queue of their own.

Large and small kernels are submitted in turn. A small kernel's delay is counted from the moment at which
its own stream was ready for it: the end of the small kernel before it, or the opening of the gate. On a
queue of its own that is launch latency. On a shared one the next large kernel stands before it in the
queue: with start order it waits until that one starts, which is when the large kernel before has ended;
with barriers until it has ended.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from aorta.hw_queue_eval.probe.machine import Floats, Machine, Op, Spin
from aorta.hw_queue_eval.probe.queues import Order

LARGE_US = 10_000.0
SMALL_US = 10.0
NUM_PAIRS = 16


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
    private: Delays | None
    """None: every stream shares the large kernels' queue."""
    shared: Delays | None
    """None: no two streams share a queue."""
    predicted_shared: Delays | None
    """By arithmetic, from the order that the queue was found to have."""
    reason: str | None
    """Why one of them is null."""
    primed: bool


def convoy(
    machine: Machine,
    classes: Sequence[Sequence[int]],
    order: Order | None,
    large_us: float = LARGE_US,
    num: int = NUM_PAIRS,
) -> Convoy:
    """Puts the large kernels on a stream of the fullest queue, the small ones beside it and elsewhere.

    The machine's streams must be on the queues of `classes` in every run, as on `sharing.placed`.
    """
    fullest = max(classes, key=len)
    beside = fullest[1] if len(fullest) > 1 else None
    elsewhere = next((members[0] for members in classes if members is not fullest), None)
    primed = True
    found: list[Delays | None] = []
    for small in (elsewhere, beside):
        if small is None:
            found.append(None)
            continue
        outcome = machine.run(program(fullest[0], small, large_us, num))
        found.append(summary(delays_us(outcome.start_us[1::2], outcome.end_us[1::2])))
        primed = primed and outcome.primed
    private, shared = found
    reason = "no two streams share a queue" if shared is None else None
    if private is None:
        reason = "all streams share one queue"
    return Convoy(
        large_us=large_us,
        small_us=SMALL_US,
        private=private,
        shared=shared,
        predicted_shared=None if shared is None or order is None else predicted(order, large_us, num),
        reason=reason,
        primed=primed,
    )


def program(large: int, small: int, large_us: float, num: int) -> list[Op]:
    return [op for _ in range(num) for op in (Spin(large, large_us), Spin(small, SMALL_US))]


def delays_us(start_us: Floats, end_us: Floats) -> Floats:
    """Of one stream's kernels, each from the end of the one before it; the first from the gate's opening."""
    ready = np.concatenate([[0.0], end_us[:-1]])
    delay: Floats = start_us - ready
    return delay


def summary(delay_us: Floats) -> Delays:
    p50_us, p99_us, largest_us = np.percentile(delay_us, [50, 99, 100]).tolist()
    mean_us = float(delay_us.mean())
    return Delays(mean_us=mean_us, p50_us=p50_us, p99_us=p99_us, largest_us=largest_us, num=len(delay_us))


def predicted(order: Order, large_us: float, num: int) -> Delays:
    """Start order: 0 for the first, then a large kernel less the small one before; barrier: a large one."""
    if order == "barrier":
        return summary(np.full(num, large_us))
    return summary(np.array([0.0] + [large_us - SMALL_US] * (num - 1)))
