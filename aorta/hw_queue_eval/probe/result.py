"""What the probe found, and the sentence that says how many queues there are and why."""

import msgspec

from aorta.hw_queue_eval.probe.blocking import Blocking
from aorta.hw_queue_eval.probe.chain import Chains
from aorta.hw_queue_eval.probe.convoy import Convoy
from aorta.hw_queue_eval.probe.machine import Clock
from aorta.hw_queue_eval.probe.priority import Effect, Inversion
from aorta.hw_queue_eval.probe.queues import QueueCount
from aorta.hw_queue_eval.probe.sharing import Sharing
from aorta.hw_queue_eval.probe.switch import SwitchCost

SCHEMA = 1


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One device, one process. A part that is null has its reason in not_measured."""

    schema: int
    device: str
    environment: dict[str, str | None]
    """Variables that set the number of queues, as this process saw them; null where unset."""
    num_streams: int
    clock: Clock
    queues: QueueCount | None
    sharing: Sharing | None
    blocking: Blocking | None
    switch: SwitchCost | None
    chains: Chains | None
    effect: Effect | None
    inversion: Inversion | None
    convoy: Convoy | None
    not_measured: dict[str, str]
    seconds: float


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """The number of queues that the streams use, and why it is believed."""

    queues: int | None
    """None where the methods disagree."""
    at_least: bool
    """Every stream tried has a queue to itself."""
    because: str


def conclude(queues: QueueCount | None, sharing: Sharing | None) -> Conclusion:
    """Staircase and sharing are independent; only a number that both give is one."""
    if queues is None or sharing is None:
        return Conclusion(queues=None, at_least=False, because="the staircase or the rows were not measured")
    tried, classes = queues.steps[-1].streams, len(sharing.classes)
    staircase = f"{queues.queues} of up to {tried} streams start at once"
    rows = f"who waits behind whom makes {classes} groups of {sum(map(len, sharing.classes))} streams"
    times = f"run times fit {queues.from_times} evenly filled queues"
    doubts = _doubts(queues, sharing)
    agreed = queues.queues == classes
    return Conclusion(
        queues=queues.queues if agreed else None,
        at_least=agreed and queues.at_least,
        because="; ".join([staircase, rows, times, *doubts]),
    )


def _doubts(queues: QueueCount, sharing: Sharing) -> list[str]:
    doubts = []
    if not queues.even:
        doubts.append(f"but the queues are filled unevenly (times off by {queues.worst_error:.0%})")
    if sharing.contradictions:
        doubts.append(f"but {sharing.contradictions} pairs of streams contradict the groups")
    if not sharing.pairs_agree:
        doubts.append("but single pairs contradict the groups")
    if not (queues.primed and sharing.primed):
        doubts.append("but some runs were launch-bound")
    return doubts
