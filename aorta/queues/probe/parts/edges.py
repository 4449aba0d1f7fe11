"""Edges between streams, by where the streams are and by how many of them wait.

An edge is what `chain` calls a switch: kernel, event, wait, kernel of another stream. Its price is the gap
from end to start along the chain less the gap along one stream. Each edge is measured beside nothing else,
with kernels that last (a gap hidden in the launching of empty ones would show), and with further queues
that do nothing but wait for the end of the chain. Every run checks where its streams are, see `checked`.

Where queues are dealt out, two streams come to one queue only with launches on all other queues between any
two of theirs. A device dispatches kernels one by one, and beside these a chain would take as long as they do.
They depend on nothing, so a long kernel at the chain's beginning keeps it back until they have run.
"""

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from aorta.queues.probe.machine import Floats, Op, ProbeMachine, QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.parts.chain import ChainDifference, Placement, chain_program, pseudo_median, slopes_us
from aorta.queues.probe.parts.checked import MOST_GROUPS, CheckedProbe, QueueLayout, Seen, Where

LENGTHS = (16, 48, 96)
REPETITIONS = 8
KERNEL_US = 10.0
STREAM_COUNTS = (2, 3, 4, 8)
WAITING_COUNTS = (1, 2, 6)
FILLER_US = 2.0
"""Time for a kernel that depends on nothing; an H200 needs 0.8 … 1.1 µs."""
MOST_KERNELS = 1800
"""Most kernels of a run, fillers included."""


class QueueEdge(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps from the end of a kernel to the start of the one that follows it."""

    where: Where
    streams: int
    """Streams that the chain goes around."""
    waiting: int
    """Other queues whose head waits all the time."""
    kernel_us: float
    """0: kernels that only read the clock."""
    same_us: float
    """Gap along one stream."""
    edge_us: float
    """Gap along the chain."""
    longer: ChainDifference
    """edge_us less same_us, 95 %."""
    seen: Seen
    """Check that the streams were where they are said to be."""
    primed: bool


def edges(machine: ProbeMachine, plan: QueueLayout) -> list[QueueEdge]:
    """Edges along different queues, as many as the plan has, and along one."""
    apart, together = plan.apart, plan.together
    different: Where = "different queues"
    rows = [edge(machine, different, apart[:num]) for num in STREAM_COUNTS if num <= len(apart)]
    for num in WAITING_COUNTS:
        if 2 + num <= len(apart):
            rows.append(edge(machine, different, apart[:2], apart[2 : 2 + num]))
    rows += [
        edge(machine, different, apart[:num], kernel_us=KERNEL_US) for num in (2, 4) if num <= len(apart)
    ]
    if together:
        largest = MOST_KERNELS // (1 + len(plan.fillers))
        lengths = [min(length, largest // (len(LENGTHS) - index)) for index, length in enumerate(LENGTHS)]
        for kernel_us in (0.0, KERNEL_US):
            rows.append(
                edge(machine, "one queue", together, (), kernel_us, lengths=lengths, fillers=plan.fillers)
            )
    return rows


def edge(
    machine: ProbeMachine,
    where: Where,
    streams: Sequence[int],
    waiting: Sequence[int] = (),
    kernel_us: float = 0.0,
    lengths: Sequence[int] = LENGTHS,
    repetitions: int = REPETITIONS,
    fillers: Sequence[int] = (),
) -> QueueEdge:
    """Chains along one stream and around all of them, in random order."""
    checked = CheckedProbe(machine, where, fillers)
    placements: tuple[Placement, ...] = ("same", "switching")
    order = random.Random(0)
    spans: dict[Placement, Floats] = {p: np.zeros((repetitions, len(lengths))) for p in placements}
    primed = True
    first = int(bool(fillers))  # of the chain
    for repetition in range(-1, repetitions):  # the first does not count
        legs = [(placement, index) for placement in placements for index in range(len(lengths))]
        order.shuffle(legs)
        for placement, index in legs:
            ops = program(placement, streams, lengths[index], waiting, kernel_us, len(fillers))
            outcome = checked.run(ops)
            if repetition >= 0:
                last = first + lengths[index] - 1
                spans[placement][repetition, index] = outcome.start_us[last] - outcome.start_us[first]
                primed = primed and outcome.primed
    within_us, across = (slopes_us(spans[placement], lengths) - kernel_us for placement in placements)
    tick_us = machine.clock.tick_ns / 1e3 / (lengths[-1] - lengths[0])
    median_us, interval = pseudo_median(across - within_us, tick_us)
    return QueueEdge(
        where=where,
        streams=len(streams),
        waiting=len(waiting),
        kernel_us=kernel_us,
        same_us=pseudo_median(within_us)[0],
        edge_us=pseudo_median(across)[0],
        longer=ChainDifference(us=median_us, interval_us=interval),
        seen=checked.seen,
        primed=primed,
    )


def program(
    placement: Placement,
    streams: Sequence[int],
    length: int,
    waiting: Sequence[int],
    kernel_us: float,
    num_fillers: int = 0,
) -> list[Op]:
    """A chain; then, on each waiting stream, a wait for its end and a kernel.

    With fillers a kernel comes first that outlasts all of them.
    """
    chain = chain_program(placement, streams, length)
    if kernel_us:
        chain = [Spin(op.stream, kernel_us) if isinstance(op, Stamp) else op for op in chain]
    if num_fillers:
        chain.insert(0, Spin(streams[0], FILLER_US * num_fillers * (1 + length + MOST_GROUPS)))
    if not waiting:
        return chain
    ended = length  # the chain's own events are 0 … length − 1
    chain.append(QueueRecord(chain[-1].stream, ended))
    return chain + [op for stream in waiting for op in (QueueWait(stream, ended), Stamp(stream))]
