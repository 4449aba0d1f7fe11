"""Runs the parts of the probe on a GPU, one after the other."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from aorta.queues.probe.gpu.device import Device, warm_up
from aorta.queues.probe.machine import ProbeError, ProbeMachine, check_streams
from aorta.queues.probe.parts.blocking import blocking
from aorta.queues.probe.parts.chain import Chains, chains
from aorta.queues.probe.parts.checked import QueueLayout, layout
from aorta.queues.probe.parts.convoy import Convoy, convoy
from aorta.queues.probe.parts.edges import edges
from aorta.queues.probe.parts.priority import EFFECT_STREAMS, INVERSION_STREAMS, Inversion, effect, inversion
from aorta.queues.probe.parts.queues import QueueCount, staircase
from aorta.queues.probe.parts.sharing import Sharing, sharing
from aorta.queues.probe.parts.switch import summary
from aorta.queues.probe.result import SCHEMA, ProbeResult, conclude

Part = Literal["queues", "sharing", "blocking", "chains", "edges", "effect", "inversion", "convoy"]
PARTS: tuple[Part, ...] = get_args(Part)
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "DEBUG_HIP_IGNORE_STREAM_PRIORITY")
SWITCH_STREAMS = 2


def probe(device: torch.device, num_streams: int = 64, parts: Sequence[Part] = PARTS) -> ProbeResult:
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
    results: dict[str, Any] = dict.fromkeys(PARTS)

    def measure(part: Part, run: Callable[[], Any]) -> None:
        if part not in parts:
            reasons[part] = "not asked for"
        else:
            try:
                results[part] = run()
            except (ProbeError, RuntimeError) as error:
                reasons[part] = " ".join(str(error).split())

    measure("queues", lambda: staircase(machine))
    measure("sharing", lambda: sharing(machine))
    conclusion = conclude(results["queues"], results["sharing"])
    num_queues = None if conclusion.at_least else conclusion.queues
    measure("blocking", lambda: blocking(machine, _classes(results["sharing"])))
    measure("chains", lambda: switch_chains(machine, results["sharing"], conclusion.queues))
    measure("edges", lambda: edges(machine, plan(machine, results["sharing"], conclusion.queues)))
    measure("effect", lambda: effect(shared.machine, greatest, enough(num_queues, EFFECT_STREAMS)))
    measure("inversion", lambda: _inversion(shared, greatest, num_queues))
    measure("convoy", lambda: _convoy(machine, results["queues"], conclusion.queues))
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


def plan(machine: ProbeMachine, sharing: Sharing | None, queues: int | None) -> QueueLayout:
    """Streams for the parts that want them on different queues or on one; every run of theirs checks it.

    ProbeError where the number of queues is not known.
    """
    if queues is None:
        raise ProbeError("the number of queues is not known")
    return layout(machine.num_streams, queues, _classes(sharing))


def switch_chains(machine: ProbeMachine, sharing: Sharing | None, queues: int | None) -> Chains:
    """Around SWITCH_STREAMS streams, of different queues where there are two."""
    if queues is None:
        return chains(machine, range(SWITCH_STREAMS))[0]
    streams = plan(machine, sharing, queues)
    if len(streams.apart) < SWITCH_STREAMS:
        return chains(machine, streams.together, where="one queue")[0]
    return chains(machine, streams.apart[:SWITCH_STREAMS], where="different queues")[0]


def _classes(sharing: Sharing | None) -> list[list[int]]:
    return sharing.classes if sharing else []


def _convoy(machine: ProbeMachine, staircase: QueueCount | None, queues: int | None) -> Convoy:
    if queues is None or staircase is None:
        raise ProbeError("the number of queues is not known")
    return convoy(machine, queues, staircase.order)


def enough(queues: int | None, needed: int) -> int | None:
    """`queues`; ProbeError where streams that must not share a queue would."""
    if queues is not None and queues < needed:
        raise ProbeError(f"{needed} streams must have a queue each, and there are {queues} queues")
    return queues


def _inversion(shared: Device, greatest: int, queues: int | None) -> Inversion:
    enough(queues, INVERSION_STREAMS)
    return inversion(shared.machine, greatest)
