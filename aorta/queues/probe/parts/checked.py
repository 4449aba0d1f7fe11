"""Runs that carry their own proof of which streams share a queue.

Nothing is taken from another run, nor from a rule. Before the program and after it, on the same streams in
the same run, spins show who waits behind whom: with two spins per stream, stream after stream, as many
first ones start at once as there are queues.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.queues.probe.machine import Floats, Op, Outcome, ProbeMachine, QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.parts.queues import pairs_program, started_at_once

CHECK_US = 100.0
MOST_GROUPS = 6
"""Most groups of the two checks of "one queue", each followed by the fillers."""
TRIES = 3
"""Runs for one whose placement is as asked."""

Where = Literal["different queues", "one queue"]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of an experiment's streams, from the stamps of its own runs."""

    where: Where
    verified: int
    """Runs in which they were."""
    runs: int
    """Runs that used more than one stream."""

    @property
    def always(self) -> bool:
        return self.verified == self.runs


class QueueLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Streams to try; whether they are where they should be the stamps of each run say."""

    apart: list[int]
    """Streams on different queues."""
    together: list[int]
    """Two on one queue; empty where there can be none."""
    fillers: list[int]
    """Launch a kernel between any two of `together`: queues that are dealt out in turn, or least recently
    used first, come back to the same one only when all others have been dealt."""


def layout(num_streams: int, queues: int, classes: Sequence[Sequence[int]]) -> QueueLayout:
    """Layout from the groups of streams where there are fixed ones, else from the number of queues alone."""
    if classes:
        pair = next((list(members[:2]) for members in classes if len(members) > 1), [])
        return QueueLayout(apart=[members[0] for members in classes], together=pair, fillers=[])
    enough = num_streams > queues
    return QueueLayout(
        apart=list(range(min(queues, num_streams))),
        together=[0, 1] if enough else [],
        fillers=list(range(2, queues + 1)) if enough else [],
    )


class CheckedProbe:
    """A machine whose runs are repeated until their streams are seen `where` they should be, TRIES at most.

    A run that never is counts all the same, and `seen` says how many were.
    """

    def __init__(
        self, machine: ProbeMachine, where: Where = "different queues", fillers: Sequence[int] = ()
    ) -> None:
        self.machine, self.where, self.fillers = machine, where, fillers
        self.num_streams, self.resident_ctas = machine.num_streams, machine.resident_ctas
        self.clock = machine.clock
        self.runs = 0
        self.verified = 0

    def run(self, program: Sequence[Op]) -> Outcome:
        """Stamps of `program` alone."""
        streams = list(dict.fromkeys(op.stream for op in program))
        full_program, stamps = self.checked_program(program, streams)
        for attempt in range(TRIES):
            outcome = self.machine.run(full_program)
            seen = self._as_asked(outcome, stamps, len(streams))
            if seen or (attempt == 0 and self.runs >= 2 * TRIES and not self.verified):
                break
        if len(streams) > 1:
            self.runs += 1
            self.verified += seen
        return replace(outcome, start_us=outcome.start_us[stamps == 1], end_us=outcome.end_us[stamps == 1])

    @property
    def seen(self) -> Seen:
        return Seen(where=self.where, verified=self.verified, runs=self.runs)

    def checked_program(
        self, program: Sequence[Op], streams: Sequence[int]
    ) -> tuple[list[Op], NDArray[np.int64]]:
        """The whole; by kernel its part: 0 the check before, 1 the program, 2 the check after, −1 fillers."""
        check = self._check(streams)
        end = 1 + max([op.event for op in program if isinstance(op, QueueRecord | QueueWait)], default=-1)
        last = next(op.stream for op in reversed(program) if isinstance(op, Spin | Stamp))
        join: list[Op] = [
            QueueRecord(last, end),
            *[QueueWait(stream, end) for stream in streams if stream != last],
        ]
        full_program: list[Op] = []
        parts: list[int] = []
        for part, ops in enumerate((check, program, [*join, *check])):
            for group in groups(ops):
                full_program += group
                parts += [part] * sum(isinstance(op, Spin | Stamp) for op in group)
                full_program += [Stamp(stream) for stream in self.fillers]
                parts += [-1] * len(self.fillers)
        return full_program, np.array(parts)

    def _check(self, streams: Sequence[int]) -> list[Op]:
        if len(streams) < 2:
            return []
        pairs = pairs_program(len(streams), CHECK_US)
        renamed: list[Op] = [Spin(streams[op.stream], CHECK_US) for op in pairs]
        return renamed if self.where == "different queues" else [*renamed[:2], *renamed[2::2]]

    def _as_asked(self, outcome: Outcome, parts: NDArray[np.int64], num: int) -> bool:
        if num < 2:
            return True
        checks = [(outcome.start_us[parts == part], outcome.end_us[parts == part]) for part in (0, 2)]
        if self.where == "different queues":
            return all(started_at_once(start[::2], end) == num for start, end in checks)
        return all(bool((behind_first(start) > 2 / 3 * CHECK_US).all()) for start, _ in checks)


def behind_first(start_us: Floats) -> Floats:
    """Delay of the kernels after the first two, which are of one stream, behind the first's start."""
    delay: Floats = start_us[2:] - start_us[0]
    return delay


def groups(program: Sequence[Op]) -> Iterator[list[Op]]:
    """A kernel with the waits before it and the records after it."""
    group: list[Op] = []
    has_wait = False
    for op in program:
        if has_wait and not isinstance(op, QueueRecord):
            yield group
            group, has_wait = [], False
        group.append(op)
        has_wait = has_wait or isinstance(op, Spin | Stamp)
    if group:
        yield group
