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
from typing import Literal

import msgspec
import numpy as np
import torch

from aorta.queues.probe.machine import Op, ProbeClock, ProbeError, ProbeMachine, QueueRecord, QueueWait, Stamp
from aorta.timeline.arrays import Floats

LENGTHS = (16, 48, 96, 160)
"""Kernels of a chain."""
REPETITIONS = 15
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

    per_switch_us: float | None = None
    """Slope across streams less slope of one stream; may be negative, null where not measured.

    It is a cost per edge between streams by an event, not of streams that are independent, and it depends
    on how many streams the chain goes around: all but one of them wait at any time.
    """
    streams: int | None = None
    """Streams that the chain goes around."""
    interval_us: tuple[float, float] | None = None
    """95 % of per_switch_us."""
    same_stream_us: float | None = None
    """Start to start of neighbouring empty kernels of one stream."""
    clock_tick_ns: float | None = None
    """Smallest step of the clock that the kernels read."""
    source: str = "none"
    """Kernels that read the clock."""
    reason: str | None = None
    """Reason why per_switch_us is null."""


def measure_switch(device: torch.device, streams: int) -> SwitchCost:
    """Chains of empty kernels around `streams` streams, MOST_STREAMS at most, against chains on one stream;
    the host waits, about 3 s.

    On a CPU, and wherever the device's clock cannot be read, every number is null with the reason.
    """
    if device.type == "cpu":
        return SwitchCost(reason=NO_QUEUES)
    from aorta.queues.probe.gpu import Device, warm_up

    try:
        shared = Device(device)
        warm_up(shared)
        machine = shared.machine([0] * min(max(1, streams), MOST_STREAMS))
    except ProbeError as error:
        return SwitchCost(reason=f"not measured: {error}")
    return switch_cost(machine)


def switch_cost(
    machine: ProbeMachine, lengths: Sequence[int] = LENGTHS, repetitions: int = REPETITIONS
) -> SwitchCost:
    """Measures the switch around all streams of the machine, against chains on the first of them."""
    streams, order = range(machine.num_streams), random.Random(0)
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
    return cost_of(spans, lengths, len(streams), machine.clock, primed)


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


def cost_of(
    spans: Spans, lengths: Sequence[int], streams: int, clock: ProbeClock, primed: bool
) -> SwitchCost:
    """Slopes and their difference, with a tick of the clock over the longest chain in every interval; null
    where the host was too slow or there is nothing to switch between."""
    reason = None
    if not primed:
        reason = LAUNCH_BOUND
    elif streams < 2:
        reason = "not measured: one stream has nothing to switch to"
    slopes = {placement: slopes_us(spans[placement], lengths) for placement in PLACEMENTS}
    tick_us = clock.tick_ns / 1e3 / (lengths[-1] - lengths[0])
    per_switch_us, interval_us = pseudo_median(slopes["switching"] - slopes["same"], tick_us)
    return SwitchCost(
        per_switch_us=None if reason else per_switch_us,
        streams=streams,
        interval_us=None if reason else interval_us,
        same_stream_us=pseudo_median(slopes["same"])[0] if primed else None,
        clock_tick_ns=clock.tick_ns,
        source=clock.source,
        reason=reason,
    )


def slopes_us(span_us: Floats, lengths: Sequence[int]) -> Floats:
    """Least-squares slope over the length, one per repetition; span_us is [repetition, length]."""
    kernels = np.asarray(lengths, dtype=np.float64)
    kernels -= kernels.mean()
    return span_us @ kernels / (kernels @ kernels)


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
