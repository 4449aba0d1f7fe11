"""Head-of-line blocking: who is held up by a stream that waits for an event.

One stream runs a long kernel, another waits for its end and then runs a short one, and every other stream
gets a short kernel, submitted later, that depends on nothing. Whoever of these starts only after the long
kernel was blocked by a wait that was none of its business.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from aorta.hw_queue_eval.probe.machine import Floats, Machine, Op, Record, Spin, Wait
from aorta.hw_queue_eval.probe.sharing import SHORT_US, long_us


class Blocking(msgspec.Struct, frozen=True, kw_only=True):
    """Streams held up by one stream's wait."""

    waiting: int
    """The stream that waits for an event."""
    running: int
    """The stream that the event is of."""
    long_us: float
    """How long the event takes."""
    held_up: list[int]
    """Streams that started only after it."""
    beside_waiting: list[int]
    """Streams that share the waiting stream's queue."""
    beside_running: list[int]
    """Streams that share the running stream's queue."""
    delay_us: float | None
    """Median delay of the held-up streams; None where none was."""
    explained: bool
    """Every held-up stream shares a queue with one of the two."""
    all_beside_waiting: bool | None
    """Every stream beside the waiting one was held up; None where there is none."""
    primed: bool


def blocking(machine: Machine, classes: Sequence[Sequence[int]]) -> Blocking:
    """Lets the first stream of the fullest queue wait for one of another queue, where there is one.

    The machine's streams must be on the queues of `classes` in every run, as on `sharing.placed`.
    """
    fullest = max(classes, key=len)
    other = next((members for members in classes if members is not fullest), None)
    waiting = fullest[0]
    running = other[0] if other else fullest[-1]
    outcome = machine.run(program(machine.num_streams, running, waiting))
    return judge(outcome.start_us, machine.num_streams, running, waiting, classes, outcome.primed)


def program(num_streams: int, running: int, waiting: int) -> list[Op]:
    return [
        Spin(running, long_us(num_streams)),
        Record(running, 0),
        Wait(waiting, 0),
        Spin(waiting, SHORT_US),
        *[Spin(stream, SHORT_US) for stream in bystanders(num_streams, running, waiting)],
    ]


def bystanders(num_streams: int, running: int, waiting: int) -> list[int]:
    return [stream for stream in range(num_streams) if stream not in (running, waiting)]


def judge(
    start_us: Floats,
    num_streams: int,
    running: int,
    waiting: int,
    classes: Sequence[Sequence[int]],
    primed: bool,
) -> Blocking:
    others = np.array(bystanders(num_streams, running, waiting), dtype=np.int64)
    delay = start_us[2:] - start_us[0]
    late = delay > 2 / 3 * long_us(num_streams)
    held_up = set(others[late].tolist())
    beside_waiting = _beside(waiting, classes) - {running}
    beside_running = _beside(running, classes) - {waiting}
    return Blocking(
        waiting=waiting,
        running=running,
        long_us=long_us(num_streams),
        held_up=sorted(held_up),
        beside_waiting=sorted(beside_waiting),
        beside_running=sorted(beside_running),
        delay_us=float(np.median(delay[late])) if late.any() else None,
        explained=held_up <= beside_waiting | beside_running,
        all_beside_waiting=beside_waiting <= held_up if beside_waiting else None,
        primed=primed,
    )


def _beside(stream: int, classes: Sequence[Sequence[int]]) -> set[int]:
    return {other for members in classes if stream in members for other in members} - {stream}
