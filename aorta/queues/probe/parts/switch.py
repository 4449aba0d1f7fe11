"""Cost of a next kernel that is on another stream and waits for the one before it."""

import msgspec
import torch

from aorta.queues.probe.machine import ProbeClock, ProbeError, ProbeMachine
from aorta.queues.probe.parts.chain import Chains, chains

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
        return not_measured(NO_QUEUES)
    from aorta.queues.probe.gpu.device import Device, warm_up

    try:
        shared = Device(device)
        warm_up(shared)
        machine = shared.machine([0] * min(max(1, streams), MOST_STREAMS))
    except ProbeError as error:
        return not_measured(f"not measured: {error}")
    return switch_cost(machine)


def switch_cost(machine: ProbeMachine) -> SwitchCost:
    """Around all streams of the machine."""
    measured, _ = chains(machine, range(machine.num_streams))
    return summary(measured, machine.clock)


def summary(measured: Chains, clock: ProbeClock) -> SwitchCost:
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


def not_measured(reason: str) -> SwitchCost:
    return SwitchCost(
        per_switch_us=None,
        streams=None,
        interval_us=None,
        same_stream_us=None,
        clock_tick_ns=None,
        source="none",
        reason=reason,
    )
