"""Runs the parts of the probe on a GPU, one after the other."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aorta.queues.probe.gpu.device import Device, warm_up
from aorta.queues.probe.machine import ProbeError, ProbeMachine, check_streams
from aorta.queues.probe.parts.chain import Chains, chains
from aorta.queues.probe.parts.priority import EFFECT_STREAMS, INVERSION_STREAMS, Inversion, effect, inversion
from aorta.queues.probe.parts.queues import staircase
from aorta.queues.probe.parts.switch import summary
from aorta.queues.probe.result import SCHEMA, ProbeResult, conclude
from aorta.queues.words import PROBE_PARTS

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "DEBUG_HIP_IGNORE_STREAM_PRIORITY")
SWITCH_STREAMS = 2


def probe(device: torch.device, num_streams: int = 64, parts: Sequence[str] = PROBE_PARTS) -> ProbeResult:
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
    measure("chains", lambda: switch_chains(machine, conclusion.queues))
    measure("effect", lambda: effect(shared.machine, greatest, enough(num_queues, EFFECT_STREAMS)))
    measure("inversion", lambda: _inversion(shared, greatest, num_queues))
    return ProbeResult(
        schema=SCHEMA,
        device=shared.name,
        environment={name: os.environ.get(name) for name in VARIABLES},
        num_streams=num_streams,
        clock=shared.clock,
        **results,
        switch=None if results["chains"] is None else summary(results["chains"], shared.clock),
        not_measured=reasons,
        seconds=time.perf_counter() - started,
    )


def switch_chains(machine: ProbeMachine, queues: int | None) -> Chains:
    """Chains around SWITCH_STREAMS streams, seen on different queues where there are as many."""
    return chains(machine, range(SWITCH_STREAMS), apart=(queues or 0) >= SWITCH_STREAMS)[0]


def enough(queues: int | None, needed: int) -> int | None:
    """`queues`; ProbeError where streams that must not share a queue would."""
    if queues is not None and queues < needed:
        raise ProbeError(f"{needed} streams must have a queue each, and there are {queues} queues")
    return queues


def _inversion(shared: Device, greatest: int, queues: int | None) -> Inversion:
    enough(queues, INVERSION_STREAMS)
    return inversion(shared.machine, greatest)
