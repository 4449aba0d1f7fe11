"""Result of the probe, and the sentence that says how many queues there are and why."""

import msgspec

from aorta.queues.probe.machine import ProbeClock
from aorta.queues.probe.parts.chain import Chains
from aorta.queues.probe.parts.priority import Effect, Inversion
from aorta.queues.probe.parts.queues import QueueCount
from aorta.queues.probe.parts.switch import SwitchCost

SCHEMA = 4


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
    chains: Chains | None
    effect: Effect | None
    inversion: Inversion | None
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
        reasons.append(f"but the queues are filled unevenly (times off by {count.worst_error:.0%})")
    if not count.primed:
        reasons.append("but some runs were launch-bound")
    return Conclusion(
        queues=count.queues if agreed else None,
        at_least=agreed and count.at_least,
        because="; ".join(reasons),
    )
