"""Runs the parts of the probe on a GPU."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from aorta.queues.catalogue import PROBE_PARTS
from aorta.queues.probe.gpu import Device, warm_up
from aorta.queues.probe.machine import ProbeClock, ProbeError, check_streams
from aorta.queues.probe.priority import EFFECT_STREAMS, Effect, effect
from aorta.queues.probe.staircase import QueueCount, staircase
from aorta.queues.probe.switch import SwitchCost, switch_cost

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "DEBUG_HIP_IGNORE_STREAM_PRIORITY")
"""Environment variables that set queues and priorities: a result keeps their values."""
SWITCH_STREAMS = 2
"""Streams that the chains of the switch cost go around."""
SCHEMA = 6


def probe(device: torch.device, num_streams: int = 64, parts: Sequence[str] = PROBE_PARTS) -> "ProbeResult":
    """Probes streams of priority 0; the host waits. ProbeError where there is no GPU or no clock to read.

    A part that fails leaves null and its reason, and so do the parts that need what it would have found.
    """
    check_streams(num_streams)
    started = time.perf_counter()
    shared = Device(device)
    warm_up(shared)
    machine = shared.machine([0] * num_streams)
    _, greatest = shared.least_and_greatest_priority()
    reasons: dict[str, str] = {}
    results: dict[str, Any] = dict.fromkeys(PROBE_PARTS)

    def measure(part: str, run: Callable[[], Any]) -> None:
        if part not in parts:
            reasons[part] = "not asked for"
        else:
            try:
                results[part] = run()
            except (ProbeError, RuntimeError) as error:
                reasons[part] = " ".join(str(error).split())

    measure("queues", lambda: staircase(machine))
    conclusion = conclude(results["queues"])
    num_queues = None if conclusion.at_least else conclusion.queues
    measure("switch", lambda: switch_cost(shared.machine([0] * SWITCH_STREAMS)))

    def effect_of_priority() -> Effect:
        if num_queues is not None and num_queues < EFFECT_STREAMS:
            raise ProbeError(
                f"{EFFECT_STREAMS} streams must have a queue each, and there are {num_queues} queues"
            )
        return effect(shared.machine, greatest)

    measure("effect", effect_of_priority)
    return ProbeResult(
        schema=SCHEMA,
        device=shared.name,
        environment={name: os.environ.get(name) for name in VARIABLES},
        num_streams=num_streams,
        clock=shared.clock,
        **results,
        not_measured=reasons,
        seconds=time.perf_counter() - started,
    )


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One device, one process. A part that is null has its reason in not_measured."""

    schema: int
    device: str
    environment: dict[str, str | None]
    """Variables that set the number of queues, as this process saw them; null where unset."""
    num_streams: int
    clock: ProbeClock
    queues: QueueCount | None
    switch: SwitchCost | None
    effect: Effect | None
    not_measured: dict[str, str]
    seconds: float


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """The number of queues that the streams use, and why it is believed."""

    queues: int | None
    """None where starts and times disagree."""
    at_least: bool
    """Every stream tried has a queue to itself."""
    because: str


def conclude(count: QueueCount | None) -> Conclusion:
    """Believes a number that the kernels' starts and the runs' lengths both give."""
    if count is None:
        return Conclusion(queues=None, at_least=False, because="the staircase was not measured")
    agreed = count.agrees and count.even and count.primed
    reasons = [
        f"{count.queues} of up to {count.steps[-1].streams} streams start at once",
        f"run times fit {count.from_times} evenly filled queues",
    ]
    if not count.even:
        reasons.append(f"but the queues are filled unevenly (times off by {100 * count.worst_error:.0f} %)")
    if not count.primed:
        reasons.append("but some runs were launch-bound")
    return Conclusion(
        queues=count.queues if agreed else None,
        at_least=agreed and count.at_least,
        because="; ".join(reasons),
    )
