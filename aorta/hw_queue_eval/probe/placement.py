"""Which queue a kernel goes to: rules, and what each of them predicts of a program.

A device may give every stream a queue for good, or deal queues out as work is submitted. A dealt queue can
be chosen: `Pinned` lets every stream launch one kernel, in order of its number, before a program begins.
Streams that have unfinished work keep their queue, so that within such a run the groups are known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from aorta.hw_queue_eval.probe.machine import Early, Floats, Machine, Op, Outcome, Record, Spin, Stamp, Wait
from aorta.hw_queue_eval.probe.queues import Order

Rule = Literal["stream_number", "first_kernel", "least_recent", "least_loaded", "each_kernel"]
RULES: dict[Rule, str] = {
    "stream_number": "stream s has queue s mod Q",
    "first_kernel": "the k-th stream to launch a kernel after idle gets queue k mod Q",
    "least_recent": "a stream's first kernel after idle goes to the queue used least recently",
    "least_loaded": "a stream's first kernel after idle goes to the queue with the fewest kernels",
    "each_kernel": "the k-th kernel after idle goes to queue k mod Q",
}


def queues_of(program: Sequence[Op], rule: Rule, queues: int) -> list[int]:
    """Queue of every kernel of the program, which starts on an idle device. Waits and records claim none."""
    owned: dict[int, int] = {}
    last_use = [-queues + queue for queue in range(queues)]
    load = [0] * queues
    found: list[int] = []
    for index, op in enumerate(kernels(program)):
        if rule == "stream_number":
            queue = op.stream % queues
        elif rule == "each_kernel":
            queue = index % queues
        elif op.stream in owned:
            queue = owned[op.stream]
        elif rule == "first_kernel":
            queue = len(owned) % queues
        elif rule == "least_recent":
            queue = min(range(queues), key=lambda q: last_use[q])
        else:
            queue = min(range(queues), key=lambda q: (load[q], last_use[q]))
        owned[op.stream] = queue
        last_use[queue] = index
        load[queue] += 1
        found.append(queue)
    return found


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
        if isinstance(op, Record):
            event_us[op.event] = free
        elif isinstance(op, Wait):
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


def pin_program(streams: int) -> list[Op]:
    """One kernel on each stream, in order."""
    return [Stamp(stream) for stream in range(streams)]


class Pinned:
    """A machine whose programs begin with one kernel on each of the first `streams` streams."""

    def __init__(self, machine: Machine, streams: int | None = None) -> None:
        self.machine = machine
        self.num_streams = machine.num_streams
        self.resident_ctas = machine.resident_ctas
        self.clock = machine.clock
        self.pinned = machine.num_streams if streams is None else streams

    def run(self, program: Sequence[Op]) -> Outcome:
        """Stamps of `program` alone."""
        outcome = self.machine.run([*pin_program(self.pinned), *program])
        return replace(
            outcome, start_us=outcome.start_us[self.pinned :], end_us=outcome.end_us[self.pinned :]
        )


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


def keeps_queue(late: Sequence[bool]) -> bool | None:
    """From who of keeping_program's last two kernels was late; None where neither rule predicts it."""
    return {(False, True): True, (True, False): False}.get((bool(late[-2]), bool(late[-1])))
