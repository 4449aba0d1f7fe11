"""Effect of stream priorities, and whether a medium stream can hold up a high-priority one.

Effect: small kernels, one after the other, beside floods that fill the device several times over. A small
kernel that becomes ready waits until the block scheduler picks it: with equal priority after the flood's
kernel has been placed whole, with high priority as soon as any CTA ends.

Inversion: a high-priority stream waits for a small kernel of a low-priority stream while medium streams
flood the device. If the medium floods go first the high stream waits for them, although it ranks above
them.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from aorta.queues.probe.machine import (
    Floats,
    MakeMachine,
    Op,
    Outcome,
    QueueRecord,
    QueueWait,
    Spin,
)

SMALL_US = 10.0
SETTLE_US = 60.0
"""Delay of the small stream after the gate; by then the floods run."""
FLOOD_AFTER_US = 20.0
"""Delay of the floods after the gate."""
FLOOD_CTA_US = 100.0
FLOOD_WAVES = 4
"""Times that the CTAs of one flood kernel would fill the device."""
FLOODS = 8
"""Flood kernels of each flooding stream."""
NUM_SMALL = 40
REPETITIONS = 5
EFFECT_STREAMS, INVERSION_STREAMS = 3, 4
"""Streams that must not share a queue: with fewer queues a delay would be the queue's."""

Leg = Literal["high", "equal", "alone"]


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Start delay of the small kernels."""

    mean_us: float
    p50_us: float
    p99_us: float
    largest_us: float
    num: int


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Start delay of the small kernels that became ready while a flood was running."""

    high: Delays | None
    equal: Delays | None
    alone: Delays | None
    """No floods."""
    levels: int
    reason: str | None
    primed: bool


class Inversion(msgspec.Struct, frozen=True, kw_only=True):
    """Delays from the low kernel's being ready to the start of the high one that waits for it, by leg; µs."""

    prioritized_us: list[float] | None
    """low < medium < high."""
    equal_us: list[float] | None
    alone_us: list[float] | None
    inverted: bool | None
    """Every prioritised run took longer than every one with equal priorities."""
    reason: str | None
    primed: bool


def effect(make: MakeMachine, greatest: int) -> Effect:
    """`greatest`: the device's highest priority (most negative)."""
    levels = 1 - greatest
    if levels < 2:
        reason = "not measured: the device's streams have one priority"
        return Effect(high=None, equal=None, alone=None, levels=levels, reason=reason, primed=True)
    delays: dict[Leg, list[Floats]] = {"high": [], "equal": [], "alone": []}
    primed = True
    machines = {"high": make([greatest, 0, 0]), "equal": make([0, 0, 0])}
    machines["alone"] = machines["equal"]
    for _ in range(REPETITIONS):
        for leg, values in delays.items():
            machine = machines[leg]
            outcome = machine.run(effect_program(leg != "alone", machine.resident_ctas))
            values.append(small_delays_us(outcome, leg != "alone"))
            primed = primed and outcome.primed
    summaries = {leg: _summary(values) for leg, values in delays.items()}
    none_seen = None
    if summaries["high"] is None or summaries["equal"] is None:
        none_seen = "no small kernel became ready while a flood was running"
    return Effect(**summaries, levels=levels, reason=none_seen, primed=primed)


def effect_program(flooded: bool, resident_ctas: int) -> list[Op]:
    """Stream 0: a kernel that lets the floods begin, then NUM_SMALL small ones. Streams 1, 2: floods."""
    floods = _floods((1, 2), resident_ctas) if flooded else []
    return [Spin(0, SETTLE_US), *floods, *[Spin(0, SMALL_US)] * NUM_SMALL]


def small_delays_us(outcome: Outcome, flooded: bool) -> Floats:
    """Delay of each small kernel that became ready in the flood's time; of all where there is none."""
    first_small = 1 + (2 * (1 + FLOODS) if flooded else 0)
    ready = np.concatenate([outcome.end_us[:1], outcome.end_us[first_small:-1]])
    delay = outcome.start_us[first_small:] - ready
    if not flooded:
        return np.asarray(delay)
    flood_start, flood_end = outcome.start_us[3:first_small], outcome.end_us[3:first_small]
    during: Floats = delay[(ready > flood_start.min()) & (ready < flood_end.max() - FLOOD_CTA_US)]
    return during


def inversion(make: MakeMachine, greatest: int) -> Inversion:
    """`greatest`: the device's highest priority (most negative)."""
    if greatest > -2:
        reason = f"not measured: three priorities are needed, the device's streams have {1 - greatest}"
        return Inversion(
            prioritized_us=None, equal_us=None, alone_us=None, inverted=None, reason=reason, primed=True
        )
    prioritized, equal = make([0, -2, -1, -1]), make([0, 0, 0, 0])
    legs = ((prioritized, True), (equal, True), (equal, False))
    latencies: list[list[float]] = [[], [], []]
    primed = True
    for _ in range(REPETITIONS):
        for values, (machine, flooded) in zip(latencies, legs, strict=True):
            outcome = machine.run(inversion_program(flooded, machine.resident_ctas))
            values.append(latency_us(outcome))
            primed = primed and outcome.primed
    return Inversion(
        prioritized_us=latencies[0],
        equal_us=latencies[1],
        alone_us=latencies[2],
        inverted=min(latencies[0]) > max(latencies[1]),
        reason=None,
        primed=primed,
    )


def inversion_program(flooded: bool, resident_ctas: int) -> list[Op]:
    """Stream 0 low, 1 high, 2 and 3 medium; the last kernel is the high one."""
    floods = _floods((2, 3), resident_ctas) if flooded else []
    return [
        Spin(0, SETTLE_US),
        *floods,
        Spin(0, SMALL_US),
        QueueRecord(0, 0),
        QueueWait(1, 0),
        Spin(1, SMALL_US),
    ]


def latency_us(outcome: Outcome) -> float:
    return float(outcome.start_us[-1] - outcome.end_us[0])


def _floods(streams: Sequence[int], resident_ctas: int) -> list[Op]:
    """First one small kernel per stream, so that the floods come after what was there at the start."""
    late: list[Op] = [Spin(stream, FLOOD_AFTER_US) for stream in streams]
    flood_ctas = FLOOD_WAVES * resident_ctas
    return late + [Spin(stream, FLOOD_CTA_US, flood_ctas) for _ in range(FLOODS) for stream in streams]


def _summary(values: Sequence[Floats]) -> Delays | None:
    delay_us = np.concatenate(values)
    if not len(delay_us):
        return None
    p50_us, p99_us, largest_us = np.percentile(delay_us, [50, 99, 100]).tolist()
    mean_us = float(delay_us.mean())
    return Delays(mean_us=mean_us, p50_us=p50_us, p99_us=p99_us, largest_us=largest_us, num=len(delay_us))
