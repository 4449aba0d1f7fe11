"""Effect of stream priorities: small kernels, one after the other, beside floods that fill the device several
times over.

A small kernel that becomes ready waits until the block scheduler picks it: with equal priority after the
flood's kernel has been placed whole, with high priority as soon as any CTA ends.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from aorta.queues.probe.machine import MakeMachine, Op, Outcome, Spin
from aorta.timeline.arrays import Floats

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
EFFECT_STREAMS = 3
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
