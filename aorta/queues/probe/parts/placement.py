"""Placement of kernels on queues: rules, and the prediction of each for a program.

A device may give every stream a queue for good, deal queues out to streams as they begin to work, or find
one for every launch. A rule is judged by the starts that it predicts, kernel by kernel.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from aorta.queues.probe.machine import Early, Floats, Op, QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.parts.queues import Order

Rule = Literal[
    "stream_number",
    "first_kernel",
    "first_least_recent",
    "least_loaded",
    "each_kernel",
    "until_taken",
    "each_change",
]
# Of rules that explain as much the first one here is named: with two queues the last two are the same.
RULES: dict[Rule, str] = {
    "stream_number": "stream s has queue s mod Q",
    "first_kernel": "the k-th stream to launch a kernel after idle gets queue k mod Q",
    "first_least_recent": "a stream's first kernel after idle goes to the queue used least recently",
    "least_loaded": "a stream's first kernel after idle goes to the queue with the fewest kernels",
    "each_kernel": "the k-th kernel after idle goes to queue k mod Q",
    "until_taken": "a stream keeps its queue until another stream is given it; its next launch then goes to "
    "the queue used least recently",
    "each_change": "a launch on another stream than the launch before it goes to the next queue in turn",
}


def queues_of(program: Sequence[Op], rule: Rule, queues: int) -> list[int]:
    """Queue of every kernel of the program, which starts on an idle device. Waits and records claim none.

    With `until_taken` the names of the queues are arbitrary: what ran before renames them and no more.
    """
    num_held: dict[int, int] = {}
    used_by: list[int | None] = [None] * queues
    last_use = [-queues + queue for queue in range(queues)]
    load = [0] * queues
    dealt, previous = 0, None
    placed: list[int] = []
    for index, op in enumerate(kernels(program)):
        queue = num_held.get(op.stream)
        if queue is None or not _keeps(rule, op.stream, used_by[queue], previous):
            if rule == "stream_number":
                queue = op.stream % queues
            elif rule in ("first_least_recent", "until_taken"):
                queue = last_use.index(min(last_use))
            elif rule == "least_loaded":
                queue = min(range(queues), key=lambda q: (load[q], last_use[q]))
            else:
                queue = dealt % queues
            dealt += 1
        num_held[op.stream], used_by[queue], last_use[queue] = queue, op.stream, index
        previous = op.stream
        load[queue] += 1
        placed.append(queue)
    return placed


def _keeps(rule: Rule, stream: int, last_user: int | None, previous: int | None) -> bool:
    """True if a stream's next kernel goes where its last one went."""
    if rule == "each_kernel":
        return False
    if rule == "each_change":
        return stream == previous
    return rule != "until_taken" or stream == last_user


def predicted_start_us(program: Sequence[Op], queue_of: Sequence[int], order: Order) -> Floats:
    """Start of every kernel on a device without latencies and with room for all of them.

    A kernel follows its stream, the events that its stream waits for, and its queue: the starts of all that
    was submitted there before it, or with barriers the ends.
    """
    stream_free: dict[int, float] = {}
    queue_free: dict[int, float] = {}
    event_us: dict[int, float] = {}
    starts: list[float] = []
    queue = iter(queue_of)
    for op in program:
        free = stream_free.get(op.stream, 0.0)
        if isinstance(op, QueueRecord):
            event_us[op.event] = free
        elif isinstance(op, QueueWait):
            stream_free[op.stream] = max(free, event_us[op.event])
        elif isinstance(op, Spin | Stamp):
            name = next(queue)
            start = max(free, queue_free.get(name, 0.0))
            end = start + (op.us if isinstance(op, Spin) else 0.0)
            stream_free[op.stream] = end
            queue_free[name] = max(queue_free.get(name, 0.0), start if order == "start" else end)
            starts.append(start)
    return np.array(starts)


def kernels(program: Sequence[Op]) -> Iterator[Spin | Stamp]:
    return (op for op in program if isinstance(op, Spin | Stamp))


def keeping_program(queues: int, long_us: float, short_us: float) -> list[Op]:
    """Tells whether a stream that ran dry keeps its queue while others are busy; the last two kernels answer.

    Queue 0 is blocked. Stream 1 takes queue 1 and runs dry, and the next streams take the other queues. If
    stream 1 keeps its queue its next kernel is free and the new stream behind it gets queue 0; if it takes a
    new one it gets queue 0 itself.
    """
    return [
        Spin(0, long_us),
        Spin(0, short_us),
        Early(1),
        *[Spin(stream, short_us) for stream in range(2, queues)],
        Spin(1, short_us),
        Spin(queues, short_us),
    ]


def claiming_program(
    queues: int, long_us: float, short_us: float, operation: type[QueueWait | QueueRecord]
) -> list[Op]:
    """Tells whether a wait or a record takes a queue as a kernel does; the last two kernels answer.

    Queue 0 is blocked and all others but one are taken. Then a stream without kernels waits for an event
    that has not happened, or records one. If that takes the last queue, the kernel behind it gets queue 0;
    if not, the one after that does.
    """
    event, unused = 0, 1
    return [
        QueueRecord(0, event),
        Spin(0, long_us),
        Spin(0, short_us),
        *[Spin(stream, short_us) for stream in range(1, queues - 1)],
        operation(queues - 1, event if operation is QueueWait else unused),
        Spin(queues, short_us),
        Spin(queues + 1, short_us),
    ]


def which_is_late(late: Sequence[bool]) -> Literal["last but one", "last"] | None:
    """The late one of the last two kernels; None where neither answer of the program predicts it."""
    answers: dict[tuple[bool, bool], Literal["last but one", "last"]] = {
        (True, False): "last but one",
        (False, True): "last",
    }
    return answers.get((bool(late[-2]), bool(late[-1])))
