"""Head-of-line blocking: who is held up by a stream that waits for an event.

One stream runs a long kernel, another waits for its end and then runs a short one, and every other stream
gets a short kernel, submitted later, that depends on nothing. Whoever of these starts only after the long
kernel was blocked by a wait that was none of its business.

Who shares a queue with whom the same run tells: it begins with the same launches in the same order twice
more, without the wait, once with a long kernel on the one stream and once on the other. Who is late then
sits behind that stream in its queue.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from aorta.queues.probe.machine import Floats, Op, ProbeMachine, QueueRecord, QueueWait, Spin
from aorta.queues.probe.parts.sharing import SHORT_US, long_us

AHEAD = 4
"""Kernels of the two streams at the beginning of a stage."""


class Blocking(msgspec.Struct, frozen=True, kw_only=True):
    """Streams held up by one stream's wait."""

    waiting: int
    """The stream that waits for an event."""
    running: int
    """The stream that the event is of."""
    long_us: float
    """Duration of the wait for the event."""
    held_up: list[int]
    """Streams that started only after it."""
    beside_waiting: list[int]
    """Streams that share the waiting stream's queue, as seen earlier in the same run."""
    beside_running: list[int]
    """Streams that share the running stream's queue."""
    delay_us: float | None
    """Median delay of the held-up streams; None where none was."""
    explained: bool
    """Every held-up stream shares a queue with one of the two."""
    all_beside_waiting: bool | None
    """Every stream beside the waiting one was held up; None where there is none."""
    primed: bool


def blocking(machine: ProbeMachine, classes: Sequence[Sequence[int]] = ()) -> Blocking:
    """Lets one stream wait for one of another queue, where `classes` say which that would be.

    Without them streams 1 and 0 are taken; what they share the run says itself.
    """
    fullest = max(classes, key=len, default=())
    second_class = next((members for members in classes if members is not fullest), None)
    waiting, running = 1, 0
    if fullest:
        waiting, running = fullest[0], second_class[0] if second_class else fullest[-1]
    outcome = machine.run(program(machine.num_streams, running, waiting))
    return judge(outcome.start_us, machine.num_streams, running, waiting, outcome.primed)


def program(num_streams: int, running: int, waiting: int) -> list[Op]:
    """Three stages of equal launches; nothing of a stage starts before the one before it has ended."""
    long = long_us(num_streams)
    bystander_streams = bystanders(num_streams, running, waiting)
    late: list[Op] = [Spin(stream, SHORT_US) for stream in bystander_streams]
    beside_running = [*_spins(running, long, SHORT_US), *_spins(waiting, SHORT_US, SHORT_US), *late]
    beside_waiting = [*_spins(running, SHORT_US, SHORT_US), *_spins(waiting, long, SHORT_US), *late]
    held_up = [
        *_spins(running, SHORT_US, long),
        QueueRecord(running, 0),
        Spin(waiting, SHORT_US),
        QueueWait(waiting, 0),
        Spin(waiting, SHORT_US),
        *late,
    ]
    streams = [running, waiting, *bystander_streams]
    return [*beside_running, *_behind(streams, 1, beside_waiting), *_behind(streams, 2, held_up)]


def _behind(streams: Sequence[int], stage: int, ops: Sequence[Op]) -> list[Op]:
    """`ops`, each stream of which waits first for everything that all streams did before.

    The first stream collects, so that the waits are two per stream and not one per pair.
    """
    events = range(1 + stage * len(streams), 1 + (stage + 1) * len(streams))
    remaining = list(zip(streams[1:], events[1:], strict=True))
    joined: list[Op] = [QueueRecord(stream, event) for stream, event in remaining]
    joined += [QueueWait(streams[0], event) for _, event in remaining]
    joined.append(QueueRecord(streams[0], events[0]))
    waiting = set(streams[1:])
    for op in ops:
        if op.stream in waiting:  # directly before the stream's first operation
            joined.append(QueueWait(op.stream, events[0]))
            waiting.remove(op.stream)
        joined.append(op)
    return joined


def _spins(stream: int, first_us: float, second_us: float) -> list[Op]:
    return [Spin(stream, first_us), Spin(stream, second_us)]


def bystanders(num_streams: int, running: int, waiting: int) -> list[int]:
    return [stream for stream in range(num_streams) if stream not in (running, waiting)]


def judge(start_us: Floats, num_streams: int, running: int, waiting: int, primed: bool) -> Blocking:
    """Judges from the starts of `program`."""
    bystander_streams = np.array(bystanders(num_streams, running, waiting), dtype=np.int64)
    stages = start_us.reshape(3, AHEAD + len(bystander_streams))
    long = long_us(num_streams)
    long_start = [stages[0, 0], stages[1, 2], stages[2, 1]]
    delay = np.array([stages[stage, AHEAD:] - long_start[stage] for stage in range(3)])
    late = delay > 2 / 3 * long
    beside_running, beside_waiting, held_up = ({*bystander_streams[row].tolist()} for row in late)
    return Blocking(
        waiting=waiting,
        running=running,
        long_us=long,
        held_up=sorted(held_up),
        beside_waiting=sorted(beside_waiting),
        beside_running=sorted(beside_running),
        delay_us=float(np.median(delay[2, late[2]])) if late[2].any() else None,
        explained=held_up <= beside_waiting | beside_running,
        all_beside_waiting=beside_waiting <= held_up if beside_waiting else None,
        primed=primed,
    )
