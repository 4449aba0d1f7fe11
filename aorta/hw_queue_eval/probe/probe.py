"""Runs the parts of the probe on a GPU, one after the other."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from aorta.hw_queue_eval.probe.blocking import blocking
from aorta.hw_queue_eval.probe.chain import chains
from aorta.hw_queue_eval.probe.convoy import convoy
from aorta.hw_queue_eval.probe.device import Device, warm_up
from aorta.hw_queue_eval.probe.machine import ProbeError, check_streams
from aorta.hw_queue_eval.probe.priority import effect, inversion
from aorta.hw_queue_eval.probe.queues import staircase
from aorta.hw_queue_eval.probe.result import SCHEMA, ProbeResult
from aorta.hw_queue_eval.probe.sharing import sharing
from aorta.hw_queue_eval.probe.switch import summary

Part = Literal["queues", "sharing", "blocking", "chains", "effect", "inversion", "convoy"]
PARTS: tuple[Part, ...] = ("queues", "sharing", "blocking", "chains", "effect", "inversion", "convoy")
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
    found: dict[str, Any] = dict.fromkeys(PARTS)

    def measure(part: Part, run: Callable[[], Any], needs: Part | None = None) -> None:
        if part not in parts:
            reasons[part] = "not asked for"
        elif needs is not None and found[needs] is None:
            reasons[part] = f"needs {needs}: {reasons[needs]}"
        else:
            try:
                found[part] = run()
            except (ProbeError, RuntimeError) as error:
                reasons[part] = " ".join(str(error).split())

    measure("queues", lambda: staircase(machine))
    measure("sharing", lambda: sharing(machine))
    measure("blocking", lambda: blocking(machine, found["sharing"].classes), needs="sharing")
    measure("chains", lambda: chains(machine, _unshared(found["sharing"].classes))[0], needs="sharing")
    measure("effect", lambda: effect(shared.machine, greatest))
    measure("inversion", lambda: inversion(shared.machine, greatest))
    measure("convoy", lambda: convoy(machine, found["sharing"].classes, _order(found)), needs="sharing")
    return ProbeResult(
        schema=SCHEMA,
        device=shared.name,
        environment={name: os.environ.get(name) for name in VARIABLES},
        num_streams=num_streams,
        clock=shared.clock,
        **found,
        switch=None if found["chains"] is None else summary(found["chains"], shared.clock),
        not_measured=reasons,
        seconds=time.perf_counter() - started,
    )


def _unshared(classes: Sequence[Sequence[int]]) -> list[int]:
    """SWITCH_STREAMS streams, of different queues as far as there are any."""
    first = [members[0] for members in classes]
    rest = [stream for members in classes for stream in members[1:]]
    return [*first, *rest][:SWITCH_STREAMS]


def _order(found: dict[str, Any]) -> Any:
    return None if found["queues"] is None else found["queues"].order
