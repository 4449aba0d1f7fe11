"""Cost of a change of stream, from chains of kernels that only read the clock.

These kernels are empty, so that a slope is the gap from the end of one to the start of the next.

A chain of N kernels takes a + b (N − 1); b is the slope, in µs from start to start. Placements:

same        all on one stream: the gap that a stream has anyway
switching   around k streams, each kernel after the one before it, by events

The cost of a switch is the slope of `switching` less that of `same`: what an edge to another stream takes
longer than an edge along a stream. It depends on whether the streams share a queue, and on how many of them
wait at the same time. Every repetition runs every placement at every length in random order and gives one
difference; their pseudo-median and its interval are the answer. Nothing is dropped and nothing is clamped: a
kernel that starts before its neighbour gives a negative gap.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import torch

from aorta.queues.probe.machine import (
    Floats,
    Op,
    Outcome,
    ProbeClock,
    ProbeError,
    ProbeMachine,
    QueueRecord,
    QueueWait,
    Spin,
    Stamp,
)
from aorta.queues.probe.staircase import pairs_program, started_at_once

LENGTHS = (16, 48, 96, 160)
"""Kernels of a chain."""
REPETITIONS = 15
CHECK_US = 100.0
"""Length of the spins that show which streams share a queue."""
TRIES = 3
"""Runs of a program until one is seen with its streams on different queues."""
Z_95 = 1.960
"""Quantile of the normal distribution for intervals of 95 %."""

Placement = Literal["same", "switching"]
PLACEMENTS: tuple[Placement, ...] = ("same", "switching")
Spans = Mapping[Placement, Floats]
"""Start of the first to start of the last kernel in µs, [repetition, length], by placement."""
NO_QUEUES = "not measured: a CPU has no hardware queues and no clock that a kernel could read"
MOST_STREAMS = 31
"""Most streams: with the gate's these are torch's pool, and no stream is created for good at each call."""
LAUNCH_BOUND = "not measured: launch-bound, the chain began before the host had submitted all of it"


class SwitchCost(msgspec.Struct, frozen=True, kw_only=True):
    """Start-to-start time added by each change of stream in a chain of kernels ordered by events."""

    per_switch_us: float | None
    """Slope across streams less slope of one stream; may be negative, null where not measured.

    It is a cost per edge between streams by an event, not of streams that are independent, and it depends
    on how many streams the chain goes around: all but one of them wait at any time.
    """
    streams: int | None
    """Streams that the chain goes around."""
    interval_us: tuple[float, float] | None
    """95 % of per_switch_us."""
    same_stream_us: float | None
    """Start to start of neighbouring empty kernels of one stream."""
    clock_tick_ns: float | None
    """Smallest step of the clock that the kernels read."""
    source: str
    """Kernels that read the clock."""
    reason: str | None
    """Reason why per_switch_us is null."""


def measure_switch(device: torch.device, streams: int) -> SwitchCost:
    """Chains of empty kernels around `streams` streams, MOST_STREAMS at most, against chains on one stream;
    the host waits, about 3 s.

    On a CPU, and wherever the device's clock cannot be read, every number is null with the reason.
    """
    if device.type == "cpu":
        return _no_cost(NO_QUEUES)
    from aorta.queues.probe.gpu import Device, warm_up

    try:
        shared = Device(device)
        warm_up(shared)
        machine = shared.machine([0] * min(max(1, streams), MOST_STREAMS))
    except ProbeError as error:
        return _no_cost(f"not measured: {error}")
    return switch_cost(machine)


def _no_cost(reason: str) -> SwitchCost:
    return SwitchCost(
        per_switch_us=None,
        streams=None,
        interval_us=None,
        same_stream_us=None,
        clock_tick_ns=None,
        source="none",
        reason=reason,
    )


def switch_cost(machine: ProbeMachine) -> SwitchCost:
    """Measures the switch around all streams of the machine."""
    measured, _ = chains(machine, range(machine.num_streams))
    return as_switch_cost(measured, machine.clock)


def as_switch_cost(measured: "Chains", clock: ProbeClock) -> SwitchCost:
    """Chains as the one number; null where the host was too slow or there is nothing to switch between."""
    reason = None
    if not measured.primed:
        reason = LAUNCH_BOUND
    elif measured.streams < 2:
        reason = "not measured: one stream has nothing to switch to"
    return SwitchCost(
        per_switch_us=None if reason else measured.per_switch.us,
        streams=measured.streams,
        interval_us=None if reason else measured.per_switch.interval_us,
        same_stream_us=measured.slopes["same"].us if measured.primed else None,
        clock_tick_ns=clock.tick_ns,
        source=clock.source,
        reason=reason,
    )


class Chains(msgspec.Struct, frozen=True, kw_only=True):
    """Slopes by placement, and what `switching` adds to `same`."""

    streams: int
    seen: "Seen | None"
    """Runs whose streams were on different queues; None: not checked."""
    slopes: "dict[Placement, Slope]"
    per_switch: "ChainDifference"
    primed: bool


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """µs from start to start of neighbouring kernels."""

    us: float
    interval_us: tuple[float, float]


class ChainDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Slope of one placement less that of another."""

    us: float
    interval_us: tuple[float, float]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that showed their streams on different queues."""

    verified: int
    runs: int
    """Runs that used more than one stream."""

    @property
    def always(self) -> bool:
        return self.verified == self.runs


def chains(
    machine: ProbeMachine,
    streams: Sequence[int],
    lengths: Sequence[int] = LENGTHS,
    repetitions: int = REPETITIONS,
    seed: int = 0,
    apart: bool = False,
) -> tuple[Chains, Spans]:
    """Runs chains around `streams`, those of `same` on the first of them; the summary and all spans.

    apart: every run also shows whether its streams are on different queues, see CheckedProbe.
    """
    checked = CheckedProbe(machine) if apart else None
    machine = checked or machine
    order = random.Random(seed)
    spans = {placement: np.zeros((repetitions, len(lengths))) for placement in PLACEMENTS}
    primed = True
    for placement in PLACEMENTS:  # a first run may set things up, which must not be part of a slope
        machine.run(chain_program(placement, streams, lengths[-1]))
    for repetition in range(repetitions):
        legs = [(placement, index) for placement in PLACEMENTS for index in range(len(lengths))]
        order.shuffle(legs)
        for placement, index in legs:
            outcome = machine.run(chain_program(placement, streams, lengths[index]))
            spans[placement][repetition, index] = outcome.start_us[-1] - outcome.start_us[0]
            primed = primed and outcome.primed
    checks = checked.seen if checked else None
    return compare(spans, lengths, len(streams), machine.clock.tick_ns, primed, checks), spans


def chain_program(placement: Placement, streams: Sequence[int], length: int) -> list[Op]:
    """A chain of `length` kernels."""
    program: list[Op] = []
    for index in range(length):
        switches = placement == "switching"
        stream = streams[index % len(streams)] if switches else streams[0]
        if switches and index:
            program.append(QueueWait(stream, index - 1))
        program.append(Stamp(stream))
        if switches:
            program.append(QueueRecord(stream, index))
    return program


def compare(
    spans: Spans,
    lengths: Sequence[int],
    streams: int,
    tick_ns: float,
    primed: bool,
    seen: Seen | None = None,
) -> Chains:
    """Slopes and differences; a tick of the clock over the longest chain widens every interval."""
    slopes = {placement: slopes_us(spans[placement], lengths) for placement in PLACEMENTS}
    tick_us = tick_ns / 1e3 / (lengths[-1] - lengths[0])
    median_us, interval = pseudo_median(slopes["switching"] - slopes["same"], tick_us)
    return Chains(
        streams=streams,
        seen=seen,
        slopes={placement: _slope(spans[placement], lengths, tick_us) for placement in PLACEMENTS},
        per_switch=ChainDifference(us=median_us, interval_us=interval),
        primed=primed,
    )


def _slope(span_us: Floats, lengths: Sequence[int], tick_us: float) -> Slope:
    median_us, interval = pseudo_median(slopes_us(span_us, lengths), tick_us)
    return Slope(us=median_us, interval_us=interval)


def slopes_us(span_us: Floats, lengths: Sequence[int]) -> Floats:
    """Least-squares slope over the length, one per repetition; span_us is [repetition, length]."""
    kernels = np.asarray(lengths, dtype=np.float64)
    kernels -= kernels.mean()
    slopes: Floats = span_us @ kernels / (kernels @ kernels)
    return slopes


def pseudo_median(values: Floats, tick: float = 0.0) -> tuple[float, tuple[float, float]]:
    """Hodges-Lehmann estimate and its interval (Wilcoxon's signed ranks), widened by `tick`.

    Needs no normal distribution, and a few runs that something disturbed hardly move it.
    """
    num = len(values)
    rows, columns = np.triu_indices(num)
    pairs = np.sort((values[rows] + values[columns]) / 2)
    mean, deviation = num * (num + 1) / 4, np.sqrt(num * (num + 1) * (2 * num + 1) / 24)
    cut = max(0, int(np.floor(mean - Z_95 * deviation)) - 1)
    return float(np.median(pairs)), (float(pairs[cut] - tick), float(pairs[-1 - cut] + tick))


class CheckedProbe:
    """A machine whose runs carry their own proof that their streams are on different queues.

    Nothing is taken from another run. Before the program and after it spins show who waits behind whom: with
    two spins per stream as many first ones start at once as there are queues. A run is repeated until its
    streams are seen apart, TRIES at most; one that never is counts all the same, and `seen` says how many.
    """

    def __init__(self, machine: ProbeMachine) -> None:
        self.machine, self.clock = machine, machine.clock
        self.num_streams, self.resident_ctas = machine.num_streams, machine.resident_ctas
        self.seen = Seen(verified=0, runs=0)

    def run(self, program: Sequence[Op]) -> Outcome:
        """Returns the stamps of `program` alone."""
        streams = list(dict.fromkeys(op.stream for op in program))
        if len(streams) < 2:
            return self.machine.run(program)
        check: list[Op] = [Spin(streams[op.stream], CHECK_US) for op in pairs_program(len(streams), CHECK_US)]
        whole = [*check, *program, *_joined(program, streams), *check]
        for attempt in range(TRIES):
            outcome = self.machine.run(whole)
            apart = _apart(outcome, len(streams), len(check))
            hopeless = self.seen.runs >= 2 * TRIES and not self.seen.verified
            if apart or (attempt == 0 and hopeless):
                break
        self.seen = Seen(verified=self.seen.verified + apart, runs=self.seen.runs + 1)
        inner = slice(len(check), -len(check))
        return replace(outcome, start_us=outcome.start_us[inner], end_us=outcome.end_us[inner])


def _joined(program: Sequence[Op], streams: Sequence[int]) -> list[Op]:
    """Lets the other streams wait for the end of the program's last kernel."""
    event = 1 + max([op.event for op in program if isinstance(op, QueueRecord | QueueWait)], default=-1)
    last = next(op.stream for op in reversed(program) if isinstance(op, Spin | Stamp))
    waits = [QueueWait(stream, event) for stream in streams if stream != last]
    return [QueueRecord(last, event), *waits]


def _apart(outcome: Outcome, num_streams: int, num_checked: int) -> bool:
    """True if in both checks the first spins of all streams started at once."""
    checks = (slice(None, num_checked), slice(-num_checked, None))
    return all(
        started_at_once(outcome.start_us[part][::2], outcome.end_us[part]) == num_streams for part in checks
    )
