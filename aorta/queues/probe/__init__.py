"""Probe of a device's streams: number of queues, streams that share one, cost of a switch, priorities.

Kernels stamp the device's own clock; nothing is inferred from host times. Every inference is a plain function
on those stamps, so that it can be tested against a simulated device whose queues are known.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aorta.queues.probe.cli import probe_command

__all__ = ["probe_command"]


def __getattr__(name: str) -> Any:
    # click is imported where the command is used, not where the measurement is.
    if name == "probe_command":
        from aorta.queues.probe.cli import probe_command

        return probe_command
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
